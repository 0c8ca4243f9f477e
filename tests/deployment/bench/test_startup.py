"""Starts are measured by stage, with cold and with warm caches."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.process.forked_python import forked_python
from support.waiting import wait_until

from hardpoint.bench import StartupPlan, first_token, measure_startup, startup
from hardpoint.plugins import ConfigError, HardpointError

STAGES = [*startup.STAGES, "to the first token", "close"]
SMALL = ["max_model_len=64", "kv_cache.num_blocks=16"]


def test_a_start_by_stage(monkeypatch):
    """Of an interpreter that is forked, which takes less time than to start one."""

    def run(command, *, input, env, **_):
        return forked_python().run(command[1:], Path.cwd(), env, stdin=input)

    monkeypatch.setattr(startup, "subprocess", SimpleNamespace(run=run))
    record = startup.start_once(StartupPlan(), ["model=scripted", *SMALL], os.environ)
    seconds = record["seconds"]
    assert list(seconds) == STAGES
    assert all(duration > 0 for duration in seconds.values())
    total = sum(seconds[name] for name in startup.STAGES)
    assert seconds["to the first token"] == pytest.approx(total)
    assert record["bytes"]["caller"] > 50 << 20


def test_a_process_that_has_ended_has_no_memory():
    child = subprocess.Popen(["true"])
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    pid = str(child.pid)
    assert pid in first_token.children("self")  # until somebody waits for it
    assert first_token.peak(pid) == 0
    child.wait()
    assert (first_token.peak(pid), first_token.children(pid)) == (0, [])


@pytest.mark.nightly
def test_cold_and_warm_starts_of_the_real_model():
    settings = ["max_model_len=128", "engine.in_process=false"]
    plan = {"model": "smollm2", "settings": settings, "runs": 1}
    *records, result = measure_startup(plan)
    assert [record["record"] for record in records] == ["progress", *["progress", "run"] * 2]
    assert (result["model"], result["interrupted"]) == ("smollm2", False)
    for name in ("cold", "warm"):
        spreads = result["caches"][name]
        assert spreads["runs"] == 1
        assert list(spreads["seconds"]) == STAGES
        assert spreads["bytes"]["largest other process"]["median"] > 100 << 20


def test_cold_and_warm_starts_take_turns(monkeypatch):
    kinds = []

    def run(plan, settings, environment):
        cold = [setting for setting in settings if setting.startswith("weight_cache.path=")]
        kinds.append("cold" if cold else "warm")
        assert ("hardpoint-cold-" in environment.get("TRITON_CACHE_DIR", "")) is bool(cold)
        seconds = dict.fromkeys(STAGES, float(len(kinds)))
        return {"seconds": seconds, "bytes": {"caller": 1.0}}

    forgotten = []
    monkeypatch.setattr(startup, "start_once", run)
    monkeypatch.setattr(startup, "_forget", forgotten.append)
    *_, result = measure_startup({"model": "scripted", "runs": 3})
    assert kinds == ["warm", *["cold", "warm"] * 3]
    assert forgotten == ["scripted"] * 3
    cold, warm = result["caches"]["cold"], result["caches"]["warm"]
    assert cold["seconds"]["engine"] == {"median": 4.0, "low": 2.0, "high": 6.0}
    assert warm["seconds"]["engine"] == {"median": 5.0, "low": 3.0, "high": 7.0}


def test_an_interrupt_leaves_what_there_is(monkeypatch):
    count = iter(range(9))

    def run(plan, settings, environment):
        if next(count) == 2:
            raise KeyboardInterrupt
        return {"seconds": dict.fromkeys(STAGES, 1.0), "bytes": {"caller": 1.0}}

    monkeypatch.setattr(startup, "start_once", run)
    *_, result = measure_startup({"model": "scripted", "runs": 3, "caches": ["warm"]})
    assert result["interrupted"]
    assert result["caches"]["warm"]["runs"] == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"runs": 0}, "runs: expected a whole number .*1.*, got 0"),
        ({"caches": ["hot"]}, r"caches\[0\]: expected .*cold.*warm.*, got 'hot'"),
        ({"caches": []}, "caches: expected cold, warm or both, each once, got "),
        ({"settings": ["x.y=1"]}, "x: unknown"),
    ],
    ids=range(4),
)
def test_what_is_wrong_is_named(fields, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        list(measure_startup({"model": "scripted", **fields}))


def test_a_start_that_fails_is_an_error(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho Traceback >&2\necho 'ModelError: no model' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(startup.sys, "executable", str(program))
    with pytest.raises(HardpointError, match="^a start failed, with exit code 3: ModelError: no"):
        list(measure_startup({"model": "scripted", "runs": 1}))
