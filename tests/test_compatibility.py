"""Plugins that were built for an earlier version of a stable contract run unchanged.

A wheel in tests/compatibility is built once, when its contract is published, and never again: an
engine that accepts that version of the contract has to run it. Those of the example packages are
what the examples were when the wheels were built. `unzip -p WHEEL '*.py'` prints the code.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
import zipfile

import pytest
from support.process.forked_python import forked_python
from support.processes import ROOT, run

from hardpoint.host.registry.kinds import KINDS, Stability

FOLDER = ROOT / "tests" / "compatibility"
WHEELS = sorted(FOLDER.glob("*/*.whl"))
LATER = {
    "activation_taps",
    "adapter_resolvers",
    "balancers",
    "component_adapters",
    "io_processors",
    "poolers",
    "speculators",
    "step_parts",
}
"""Kinds that came after the wheels were frozen."""
STABLE = [wheel for wheel in WHEELS if wheel.name.startswith("written_for_contract_")]
"""Of the stable kinds alone."""
PROGRAMS = sorted((FOLDER / "programs").glob("*.py"))

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
    health = llm.plugins.health()
print(json.dumps({
    "same": together == alone,
    "changed": [one != other for one, other in zip(together, unchanged)],
    "banned": sorted(set(range(128)) & set(together[1])),
    "refused": refused,
    "faults": [*health.fallbacks, *health.quarantined],
}))
"""


def install(folder, wheels):
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def entry_points(wheel):
    """Return (group, name) of each entry point of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        text = archive.read(name).decode()
    parser = configparser.ConfigParser()
    parser.optionxform = str
    parser.read_string(text)
    return [(group, name) for group in parser.sections() for name in parser[group]]


@pytest.fixture(params=STABLE, ids=lambda wheel: wheel.parent.name)
def site(request, tmp_path):
    """A folder in which a frozen wheel is installed."""
    return install(tmp_path / "site", [request.param])


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


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program, id=program.stem, marks=pytest.mark.nightly if program.stem == "server" else ()
        )
        for program in PROGRAMS
    ],
)
def test_frozen_wheels_of_every_kind_run_together(program, tmp_path):
    site = install(tmp_path / "site", sorted(set(WHEELS) - set(STABLE)))
    (tmp_path / "work").mkdir()
    run(sys.executable, "-c", program.read_text(), "work", path=site, cwd=tmp_path)


QUICK = ("reasoning_parsers/compat_brackets",)
"""Frozen plugins whose suites run in each run of the tests; those of the others, with --all."""

NARROW = (
    "grammars/compat_digits",
    "kv_event_publishers/compat_publisher",
    "logits_processors/compat_dense",
    "logits_processors/compat_sparse",
)
"""Those that are made for the programs here: they assert that they get what these send."""

GIVEN = {
    "kv_connectors/layered_files": ("--option", 'path="{folder}"'),
    "executors/timed": ("--option", 'log="steps.log"'),
    "kv_event_publishers/compat_publisher": ("--option", 'path="events"'),
    "kv_stores/sqlite": ("--option", 'path="store.db"'),
    "stat_sinks/compat_sink": ("--option", 'path="figures"'),
}
"""Options that have no default."""

FAILED = {
    "eviction_policies/compat_eviction": ["test_speed"],  # it sorts all candidates
    "samplers/top_n_sigma": ["test_frequencies"],  # of the probabilities that it truncates
    "stat_sinks/compat_sink": ["test_close"],  # it cannot report after it
}
"""Checks that a frozen plugin has not passed since it was built."""


def frozen_plugins():
    """Return a parameter for each plugin of the frozen wheels, as `kind/name`."""
    names = {
        f"{group.removeprefix('hardpoint.')}/{name}"
        for wheel in WHEELS
        for group, name in entry_points(wheel)
    }
    nightly = pytest.mark.nightly
    return [
        pytest.param(name, id=name, marks=() if name in QUICK else nightly)
        for name in sorted(names - set(NARROW))
    ]


@pytest.mark.parametrize("name", frozen_plugins())
def test_a_frozen_plugin_passes_its_suite(name, tmp_path):
    site = install(tmp_path / "site", WHEELS)
    command = [sys.executable, "-m", "hardpoint", "plugins", "check", name, "--json"]
    command += GIVEN.get(name, ())
    given = os.environ | {"PYTHONPATH": str(site), "HARDPOINT_EXAMPLES": "0.05"}
    done = forked_python().run(command[1:], tmp_path, given)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [r["check"] for r in records if r["record"] == "check" and r["outcome"] == "failed"]
    assert failed == FAILED.get(name, []), done.stdout + done.stderr
    assert records[-1]["record"] == "result", done.stderr
    assert done.returncode == (1 if failed else 0), records[-1]
    (plugin,) = [record for record in records if record["record"] == "plugin"]
    kind = KINDS[name.partition("/")[0]]
    is_earlier = plugin["contract"] < kind.contract
    assert plugin["deprecated"].endswith(
        f"it states contract 1 of {kind.name}, and runs as before until hardpoint 0.3; the current "
        f"one is 2: see docs/contract-history.md"
        if is_earlier
        else ""
    )
    assert bool(plugin["deprecated"]) == is_earlier


def test_every_kind_has_a_frozen_plugin():
    frozen = {group for wheel in WHEELS for group, _ in entry_points(wheel)}
    assert frozen == {kind.group for kind in KINDS.values() if kind.name not in LATER}


def test_every_stable_kind_has_a_frozen_plugin_that_uses_all_of_it():
    frozen = {group for wheel in STABLE for group, _ in entry_points(wheel)}
    stable = [kind for kind in KINDS.values() if kind.stability is Stability.STABLE]
    assert frozen >= {kind.group for kind in stable}


def test_every_frozen_plugin_is_run():
    programs = PROGRAM + "".join(program.read_text() for program in PROGRAMS)
    words = set(re.findall(r"\w+", programs))
    for wheel in WHEELS:
        assert {name for _, name in entry_points(wheel)} <= words, wheel.name


def test_frozen_wheels_are_of_pure_python_and_small():
    for wheel in WHEELS:
        assert wheel.name.endswith("-py3-none-any.whl")
        assert wheel.stat().st_size < 20_000
