"""Engines of several processes that share the blocks of one folder; one is killed."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from support.process.forked_python import forked_python
from support.processes import ROOT
from support.searching import soak_seconds

from hardpoint.testing import write_scripted_model

USER = """
import random, sys, time
from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config

folder, store, seed, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
NUM_BLOCKS = {"num_blocks": 48}


def open_engine(**tables):
    return LLM(folder, config=scripted_config(folder, {"kv_cache": NUM_BLOCKS, **tables}))


def prompt(numbers):
    # A few texts that many prompts begin with, so that blocks of one engine are of use to others.
    common = numbers.randrange(8)
    text = bytes((common * 31 + i * 7) % 256 for i in range(16 * (4 + common)))
    return {"prompt_token_ids": [*text, *(numbers.randrange(256) for _ in range(3))]}


numbers = random.Random(seed)
params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
plain = open_engine()
stored = open_engine(
    kv_connector={"stores": ["disk"]},
    plugin={"disk": {"path": store, "size_bytes": SIZE}},
)
end = time.monotonic() + seconds
count = hits = 0
while time.monotonic() < end:
    prompts = [prompt(numbers) for _ in range(6)]
    expected = plain.generate(prompts, params)
    found = stored.generate(prompts, params)
    for want, got in zip(expected, found):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids, "WRONG"
    stored.reset_prefix_cache()
    plain.reset_prefix_cache()
    count += len(prompts)
    hits += sum(got.num_cached_tokens for got in found)
    print(count, hits, flush=True)
health = stored.plugins.health()
stored.close()
plain.close()
assert not health.fallbacks, health
"""


def start(folder: Path, store: Path, seed: int, seconds: float, size: int) -> subprocess.Popen[str]:
    """Start a program that compares outputs with an engine without a connector."""
    source = USER.replace("SIZE", str(size))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return forked_python().popen(
        ["-c", source, str(folder), str(store), str(seed), str(seconds)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_engine_finds_what_another_one_stored(tmp_path):
    folder = write_scripted_model(tmp_path / "model", seed=5)
    for seed in (1, 1):
        user = start(folder, tmp_path / "store", seed, 0.1, 1 << 24)
        out, err = user.communicate(timeout=300)
        assert user.returncode == 0, err
    first = out.splitlines()[0].split()
    assert int(first[1]) >= 6 * 64  # each prompt begins with at least 4 blocks of the first program


@pytest.mark.nightly
@pytest.mark.parametrize("size", [1 << 24, 1 << 16], ids=["room", "evicting"])
def test_a_killed_engine_leaves_no_wrong_block(tmp_path, size):
    folder = write_scripted_model(tmp_path / "model", seed=5)
    store, seconds = tmp_path / "store", soak_seconds()
    chance = random.Random(size)
    survivor = start(folder, store, 1, seconds, size)
    end, seed, kills = time.monotonic() + seconds, 2, 0
    while time.monotonic() < end:
        victim = start(folder, store, seed, 600, size)
        victim.stdout.readline()
        time.sleep(chance.uniform(0.0, 10.0))
        assert victim.poll() is None, victim.communicate()[1]
        victim.kill()
        _, err = victim.communicate()
        assert "WRONG" not in err
        seed, kills = seed + 1, kills + 1
    out, err = survivor.communicate(timeout=300)
    assert survivor.returncode == 0, err
    count, hits = map(int, out.splitlines()[-1].split())
    print(f"{count} outputs right, {hits} tokens from the store, {kills} kills")
    assert hits > 0
