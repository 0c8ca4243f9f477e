"""A KV store from outside: built, installed, named; the next engine finds the blocks."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.processes import ROOT, run

RESTART = """
import json, sys
from hardpoint import SamplingParams
from hardpoint.testing import scripted_engine

folder, path, in_process = map(json.loads, sys.argv[1:])
params = SamplingParams(temperature=0.7, seed=5, max_tokens=6, ignore_eos=True)

def answers(*stores):
    config = {"kv_connector": {"stores": stores}, "plugin": {"sqlite": {"path": path}}}
    config = config if stores else {}
    cache = {"num_blocks": 32, "block_size": 4}
    config = {"kv_cache": cache, "max_model_len": 64, **config}
    config["engine"] = {"in_process": in_process}
    engine = scripted_engine(folder, config)
    outputs = {}
    for number in range(3):
        engine.add_request(str(number), [40 + number] * 12 + [60], params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[number] = output
    faults = list(engine.health().fallbacks)
    engine.close()
    assert faults == [], faults
    tokens = {number: output.outputs[0].token_ids for number, output in outputs.items()}
    return tokens, [output.num_cached_tokens for output in outputs.values()]

expected, _ = answers()
cold, none = answers("sqlite")
warm, cached = answers("acme_kv_stores:SqliteStore")  # the same one
assert cold == warm == expected
print(json.dumps([none, cached]))
"""


@pytest.fixture
def command(acme_kv_stores, tmp_path):
    """Runs Python where the package is installed; returns what it prints."""

    def run_it(*arguments):
        return run(sys.executable, *arguments, path=acme_kv_stores, cwd=tmp_path, examples=0.1)

    return run_it


@pytest.mark.nightly
def test_their_own_tests_pass(command, tmp_path):
    shutil.copytree(ROOT / "examples" / "acme_kv_stores" / "tests", tmp_path / "tests")
    assert "passed" in command("-m", "pytest", "-q", "tests")


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_blocks_outlive_the_engine(command, scripted, tmp_path, in_process):
    arguments = map(json.dumps, (str(scripted), str(tmp_path / "blocks.db"), in_process))
    assert json.loads(command("-c", RESTART, *arguments)) == [[0, 0, 0], [12, 12, 12]]
