"""Plugins that were built for an earlier version of a stable contract run unchanged.

A wheel in tests/compatibility is built once, when its contract is published, and never again: an
engine that accepts that version of the contract has to run it.
"""

from __future__ import annotations

import json
import sys
import zipfile

import pytest
from support.processes import ROOT, run

from hardpoint.plugins.kinds import KINDS, Stability

WHEELS = sorted((ROOT / "tests" / "compatibility").glob("*/*.whl"))

PROGRAM = """
import json, sys
from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config

FORMS = ("dense", "sparse", "batch", "device", "observe")
folder, sink, in_process = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
extra = {
    "engine": {"in_process": in_process},
    "plugins": {"enable": [f"compat_{form}" for form in FORMS]},
    "scheduler": {"policy": "compat_policy", "max_num_batched_tokens": 32},
    "kv_cache": {"eviction": "compat_eviction", "block_size": 4, "num_blocks": 24},
    "max_model_len": 64,
    "stats": {"sinks": ["compat_sink"]},
    "plugin": {"compat_sink": {"path": sink}, "compat_policy": {"most": 3}},
}
arguments = [
    {"compat_dense": {"by": 50.0}},
    {"compat_sparse": {"ban": list(range(128))}},
    {"compat_batch": {"by": -50.0}},
    {"compat_device": {"by": 2.0}},
    {"compat_observe": {}},
    {},
]
prompts = [[97 + n] * 13 + [n] * (1 + 3 * n) for n in range(6)]
params = [
    SamplingParams(seed=n, max_tokens=20, ignore_eos=True, plugin_args=own)
    for n, own in enumerate(arguments)
]
plain = [SamplingParams(seed=n, max_tokens=20, ignore_eos=True) for n in range(6)]

def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]

with LLM(config=scripted_config(folder, extra)) as llm:
    together = tokens(llm.generate(prompts, params))
    alone = [tokens(llm.generate([one], [own]))[0] for one, own in zip(prompts, params)]
    unchanged = tokens(llm.generate(prompts, plain))
    refused = ""
    try:
        llm.generate("x", SamplingParams(plugin_args={"compat_dense": {"by": 99.0}}))
    except ValueError as error:
        refused = str(error)
    health = llm.health()
print(json.dumps({
    "same": together == alone,
    "changed": [one != other for one, other in zip(together, unchanged)],
    "banned": sorted(set(range(128)) & set(together[1])),
    "refused": refused,
    "faults": [*health.fallbacks, *health.quarantined],
}))
"""


@pytest.fixture(params=WHEELS, ids=lambda wheel: wheel.parent.name)
def site(request, tmp_path):
    """A folder in which a frozen wheel is installed."""
    folder = tmp_path / "site"
    with zipfile.ZipFile(request.param) as wheel:
        wheel.extractall(folder)
    return folder


@pytest.mark.parametrize("in_process", [True, False])
def test_a_frozen_wheel_runs(site, scripted, tmp_path, in_process):
    sink = tmp_path / "sink.jsonl"
    program = (sys.executable, "-c", PROGRAM, str(scripted), str(sink), str(in_process))
    result = json.loads(run(*program, path=site, cwd=tmp_path).splitlines()[-1])
    assert result.pop("refused").endswith("by: expected at most 50.0, got 99.0")
    assert result == {
        "same": True,
        "changed": [True, True, True, True, True, False],
        "banned": [],
        "faults": [],
    }
    assert json.loads(sink.read_text().splitlines()[-1])["tokens"] == 3 * 6 * 20


def test_every_stable_kind_has_a_frozen_plugin():
    points = ""
    for wheel in WHEELS:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
            points += archive.read(name).decode()
    for kind in KINDS.values():
        if kind.stability is Stability.STABLE:
            assert f"[{kind.group}]" in points
