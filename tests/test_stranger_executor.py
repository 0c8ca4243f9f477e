"""An executor from outside: built, installed, named; several ranks give the tokens of one."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.processes import ROOT, run

RANKS = """
import json, sys
from hardpoint import SamplingParams
from hardpoint.testing import scripted_engine

folder, sizes = map(json.loads, sys.argv[1:])
params = SamplingParams(temperature=0.7, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)

def answers(config):
    engine = scripted_engine(folder, {"engine": {"in_process": False}, **config})
    for number in range(5):
        engine.add_request(str(number), [40 + number] * (1 + 5 * number), params)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
    engine.close()
    return tokens

expected = answers({})
for tensor, pipeline in sizes:
    parallel = {"tensor": tensor, "pipeline": pipeline}
    assert answers({"executor": {"use": "threads"}, "parallel": parallel}) == expected
print(len(expected))
"""


@pytest.fixture
def command(acme_executors, tmp_path):
    """Runs Python where the package is installed; returns what it prints."""

    def run_it(*arguments):
        return run(sys.executable, *arguments, path=acme_executors, cwd=tmp_path, examples=0.2)

    return run_it


@pytest.mark.nightly
def test_their_own_tests_pass(command, tmp_path):
    shutil.copytree(ROOT / "examples" / "acme_executors" / "tests", tmp_path / "tests")
    assert "passed" in command("-m", "pytest", "-q", "tests")


@pytest.mark.parametrize(
    "sizes", [[(2, 2)], pytest.param([(1, 1), (3, 1), (1, 3)], marks=pytest.mark.nightly)]
)
def test_ranks_in_an_engine_process_give_the_tokens_of_one(command, scripted, sizes):
    assert json.loads(command("-c", RANKS, json.dumps(str(scripted)), json.dumps(sizes))) == 5
