"""Eviction policies from outside: built, installed, named; what they keep, and no token changes."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.processes import ROOT, run

TALK = """
import json, sys
from hardpoint import SamplingParams
from hardpoint.testing import scripted_engine

folder, in_process, rounds, policies = map(json.loads, sys.argv[1:])
params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

def talk(eviction, in_process):
    cache = {"eviction": eviction, "num_blocks": 8, "block_size": 4}
    config = {"kv_cache": cache, "max_model_len": 32, "engine": {"in_process": in_process}}
    engine = scripted_engine(folder, config)
    tokens, system = {}, [1] * 12
    for number in range(rounds):
        scan = number % 6 > 2
        prompt = [40 + number] * 24 if scan else [*system, 2 + number % 5]
        for copy in "ab":  # at the same time, so that they share and preempt
            engine.add_request(f"{number}{copy}", prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = output.outputs[0].token_ids
    faults = list(engine.health().fallbacks)
    engine.close()
    return tokens, faults

plain, _ = talk("lru", True)
for name in policies:
    tokens, faults = talk(name, in_process)
    assert faults == [] and tokens == plain, (name, faults)
print(len(plain))
"""


@pytest.fixture
def command(acme_caching, tmp_path):
    """Runs Python where the package is installed; returns what it prints."""

    def run_it(*arguments):
        return run(sys.executable, *arguments, path=acme_caching, cwd=tmp_path, examples=0.05)

    return run_it


@pytest.mark.nightly
def test_their_own_tests_pass(command, tmp_path):
    shutil.copytree(ROOT / "examples" / "acme_caching" / "tests", tmp_path / "tests")
    assert "passed" in command("-m", "pytest", "-q", "tests")


@pytest.mark.parametrize(
    ("in_process", "rounds", "policies"),
    [
        (True, 12, ["lfu", "two_queues", "arc"]),
        pytest.param(False, 4, ["arc"], marks=pytest.mark.nightly),
    ],
)
def test_they_change_no_token(command, scripted, in_process, rounds, policies):
    arguments = map(json.dumps, (str(scripted), in_process, rounds, policies))
    assert json.loads(command("-c", TALK, *arguments)) == 2 * rounds


def test_hit_rates(command, tmp_path):
    """Rules that must hold of the benchmark's workloads, on a short form of them."""
    script = str(ROOT / "benchmarks" / "eviction.py")
    command(script, "--requests", "400", "--sizes", "512", "--json", "rates.json")
    results = json.loads((tmp_path / "rates.json").read_text())
    rates = {result["trace"]: result for result in results}
    assert list(rates) == ["shared prompts", "chat", "scans"]
    for name, result in rates.items():
        for policy in ("lru", "lfu", "2q", "arc"):
            assert 0.3 < result[policy] <= result["no limit"], (name, policy)
    scans, prompts = rates["scans"], rates["shared prompts"]
    assert min(scans[policy] for policy in ("lfu", "2q", "arc")) > scans["lru"] + 0.02
    assert min(prompts["lfu"], prompts["arc"]) > prompts["lru"]
    assert rates["chat"]["lru"] >= max(rates["chat"][p] for p in ("lfu", "2q", "arc"))
