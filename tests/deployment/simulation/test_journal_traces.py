"""A journal as a trace: times, prefixes in whole blocks, tenants, conversations, priorities."""

from __future__ import annotations

import json
import time

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.journal.replay import JournalFile
from hardpoint.simulation import read_trace
from hardpoint.simulation.workload import tokens_of
from hardpoint.testing import scripted_config

ANSWER = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CACHE = {"block_size": 8}
PAUSE_S = 0.1


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, scripted):
    """A journal of five requests, one after the other; the second continues the first.

    The fourth has another salt.
    """
    path = tmp_path_factory.mktemp("recorded") / "journal"
    config = scripted_config(scripted, {"engine": {"journal": str(path)}, "kv_cache": CACHE})
    with LLM(config=config) as llm:
        time.sleep(PAUSE_S)
        turn = {"session": "s", "retain_seconds": 9.0, "tags": {"tenant": "acme"}, "priority": 2}
        (first,) = llm.generate([[7] * 20], ANSWER, **turn)
        prompt = [*[7] * 20, *first.outputs[0].token_ids, *[3] * 5]
        time.sleep(PAUSE_S)
        llm.generate([prompt], ANSWER, **turn)
        llm.generate([[7] * 16 + [1] * 4], ANSWER)
        llm.generate([[7] * 20], ANSWER, cache_salt="other")
        llm.generate([[7] * 16], ANSWER)
    return path


def test_times_and_lengths(recorded):
    requests = read_trace(recorded)
    at = [request.at for request in requests]
    assert at == sorted(at)
    assert at[0] == 0
    assert PAUSE_S <= at[1] < at[4] < 600
    assert [request.prompt_length for request in requests] == [20, 37, 20, 20, 16]
    assert [request.output.length for request in requests] == [12] * 5


def test_prompts_share_whole_blocks_of_the_engine(recorded):
    first, second, third, salted, last = read_trace(recorded)
    history = tokens_of((*first.prompt, first.output))
    assert tokens_of(second.prompt)[:32] == history
    assert tokens_of(third.prompt)[:16] == history[:16] == tokens_of(last.prompt)
    assert tokens_of(third.prompt)[16] != history[16]
    assert not set(salted.prompt) & set(first.prompt)


def test_a_simulated_cache_finds_what_the_engine_found(recorded, open_fleet):
    report = open_fleet(1, kv_cache=CACHE).run(read_trace(recorded))
    lines = [json.loads(line) for line in JournalFile(recorded).export("redacted")]
    assert [line["cached_tokens"] for line in lines] == [0, 24, 16, 0, 8]
    assert report.reuse * report.prompt_tokens == pytest.approx(48)


def test_tenants_conversations_and_priorities(recorded):
    requests = read_trace(recorded)
    assert [request.session for request in requests] == ["s", "s", None, None, None]
    assert [request.is_last for request in requests] == [False, True, False, False, False]
    assert [request.tags for request in requests] == [{"tenant": "acme"}] * 2 + [{}] * 3
    assert [request.priority for request in requests] == [2, 2, 0, 0, 0]
