"""Requests that go on at another engine, at every output: the same tokens, bit for bit."""

from __future__ import annotations

import msgspec
import pytest
from support.driving import FINAL, alone, drafting, summary, varied_jobs
from support.resuming import at_every_output, place_of, run_moving

from hardpoint import SamplingParams
from hardpoint.testing import scripted_engine

TIGHT = {  # requests are preempted, and prompts computed in pieces
    "max_model_len": 128,
    "kv_cache": {"block_size": 8, "num_blocks": 40},
    "scheduler": {"max_num_batched_tokens": 48},
}


def moved_jobs(expected, jobs):
    """Each job as often as it has outputs."""
    longest = {name: max(len(c[1]) for c in result[0]) for name, result in expected.items()}
    return [moved for job in jobs for moved in at_every_output(job, longest[job[0]])]


def check_moved(scripted, extra, jobs, expected, second=None):
    """Move each job at every output from one engine to another."""
    engines = [scripted_engine(scripted, extra), scripted_engine(scripted, second or extra)]
    results, client = run_moving(engines, moved_jobs(expected, jobs), place_of)
    assert client.num_moves > 0.4 * len(results)
    for name, result in results.items():
        assert [summary(result)] == expected[name.rpartition("@")[0]], name
    for engine in engines:
        engine.close()
    return results, client


@pytest.fixture(scope="module")
def expected(scripted):
    engine = scripted_engine(scripted)
    results = alone(engine, varied_jobs())
    engine.close()
    return results


def test_every_feature_of_sampling(scripted, expected):
    check_moved(scripted, TIGHT, varied_jobs(10), expected)
