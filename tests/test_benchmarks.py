"""Benchmarks that no other test runs still run, in a short form."""

from __future__ import annotations

import json
import statistics
import sys

import pytest
from support.processes import ROOT, run


def grammars(tmp_path, *arguments):
    """Return the measurements of the benchmark of grammars."""
    script = str(ROOT / "benchmarks" / "grammars.py")
    short = ("--sizes", "49152", "--rounds", "2", "--json", "found.json")
    run(sys.executable, script, *short, *arguments, cwd=tmp_path, examples=0.05)
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.nightly
def test_grammars(tmp_path):
    found = grammars(tmp_path, "--parts", "masks", "compile", "--batches", "1", "2")
    for name, results in found["masks"]["49152"].items():
        assert [result["rows"] for result in results] == [1, 2]
        for result in results:
            parts = ("fill", "advance", "bitmask", "native", "torch")
            assert all(min(result[part]) > 0 for part in parts), name
            assert sum(result["bitmask"]) < 100_000, name
    times = found["compile"]["49152"]
    assert statistics.median(times["cached"]) < statistics.median(times["first"])


@pytest.mark.timing
def test_grammars_in_steps(tmp_path):
    found = grammars(tmp_path, "--parts", "step", "--running", "1")
    for result in found["step"].values():
        assert 0 < result["1"]["bitmask"] < 0.5
        assert 0 < result["1"]["apply"] < 0.5


def executors(tmp_path, *arguments):
    """Return the measurements of the benchmark of executors."""
    script = str(ROOT / "benchmarks" / "throughput.py")
    short = ("executors", "--rounds", "1", "--tokens", "4", "--hidden", "64", "--layers", "2")
    run(sys.executable, script, *short, "--json", "found.json", *arguments, cwd=tmp_path)
    return json.loads((tmp_path / "found.json").read_text())


def test_executors_with_one_worker(tmp_path):
    found = executors(tmp_path, "--streams", "4", "--ranks", "uniproc")
    assert found["scripted model"]["4 streams"]["uniproc"] > 0
    assert found["random Llama"]["4 streams"]["uniproc"] > 0


@pytest.mark.nightly
def test_executors_with_several_workers(tmp_path):
    names = ("uniproc", "tensor 2", "pipeline 2")
    found = executors(tmp_path, "--ranks", *names)
    for count in ("1 streams", "32 streams"):
        for scenario in ("scripted model", "random Llama"):
            assert found[scenario][count].keys() == {*names}
            assert all(value > 0 for value in found[scenario][count].values())
        assert 0 < found["random Llama: more"][count]["tensor 2"]["share"] < 1


@pytest.mark.nightly
def test_replicas(tmp_path):
    script = str(ROOT / "benchmarks" / "throughput.py")
    short = ("replicas", "--engines", "1", "2", "--rounds", "1", "--tokens", "4")
    run(sys.executable, script, *short, "--json", "found.json", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["1 engines: more"]["share"] == 1
    assert all(value > 0 for value in found["2 engines: more"].values())


def planning_ahead(tmp_path):
    """Return the measurements of the benchmark of planning ahead."""
    script = str(ROOT / "benchmarks" / "planning_ahead.py")
    short = ("--rounds", "1", "--tokens", "4", "--running", "2", "--device-ms", "3")
    options = ("--engines", "uniproc, in-process", "--json", "found.json")
    run(sys.executable, script, *short, *options, cwd=tmp_path)
    return json.loads((tmp_path / "found.json").read_text())["uniproc, in-process"]["2"]


@pytest.mark.nightly
def test_planning_ahead(tmp_path):
    found = planning_ahead(tmp_path)
    assert found.keys() == {"device", "plain", "ahead", "plain, median", "ahead, median"}
    assert found["device"] >= 3  # sleeps of 3 ms


@pytest.mark.timing
def test_planning_ahead_takes_the_time_of_the_device(tmp_path):
    found = planning_ahead(tmp_path)
    assert 3 <= found["device"] < 100
    assert found["plain"] > 2
    assert found["ahead"] > 2


@pytest.mark.nightly
def test_update_weights(tmp_path):
    script = str(ROOT / "benchmarks" / "update_weights.py")
    run(sys.executable, script, "--streams", "4", "--rounds", "1", "--json", "f.json", cwd=tmp_path)
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["tokens"].keys() == {"0", "1", "2"}
    for figures in found["updates"].values():
        assert all(value > 0 for times in figures.values() for value in times)


def speculation(tmp_path, *arguments):
    """Return the measurements of the benchmark of speculation."""
    script = str(ROOT / "benchmarks" / "speculation.py")
    run(sys.executable, script, "--json", "found.json", *arguments, cwd=tmp_path)
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.nightly
def test_acceptance_of_a_draft_model(tmp_path):
    found = speculation(tmp_path, "--acceptance", "--streams", "3", "--tokens", "12")
    assert [one["temperature"] for one in found] == [0.0, 0.7, 1.0] * 2
    for one in found:
        assert 0 < one["optimum"] < 1
        if one["temperature"] == 0:
            assert one["accepted"] == pytest.approx(one["optimum"])


@pytest.mark.timing
def test_speculation(tmp_path):
    sets = ("--sets", "edit", "chat", "--streams", "2", "--rounds", "1", "--tokens", "8")
    found = speculation(tmp_path, "--peers", "--speculators", "ngram", *sets)
    assert [one["set"] for one in found] == ["edit", "chat"]
    for one in found:
        assert one["changed"] == 0
        assert one["outputs"] == 4
        assert min(one["ratios"]) > 0.1
