"""The time limit of an engine's start includes the work before its process is launched."""

import threading
from functools import partial
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from hardpoint.errors import EngineDeadError
from hardpoint.process import start_budget
from hardpoint.process.start_budget import StartBudget

PLUGIN = """
def wait_until_recorded(start):
    budget = start()
    budget_is_ready.set()
    assert budget.passed.wait(60)
    return budget
"""
LOADER = "def load(plugin, start):\n    return plugin(start)\n"


def run_plugin(start, folder):
    """Let Hardpoint call a plugin in which the limit passes; return the budget."""
    plugin, loader = {"budget_is_ready": HeldTimer.may_fire}, {}
    exec(compile(PLUGIN, str(folder / "acme_slow.py"), "exec"), plugin)
    exec(compile(LOADER, str(Path(start_budget.__file__).with_name("loading.py")), "exec"), loader)
    return loader["load"](plugin["wait_until_recorded"], start)


class HeldTimer(threading.Timer):
    """A timer that waits for an event instead of a time."""

    may_fire = threading.Event()

    def run(self):
        assert self.may_fire.wait(PATIENCE_S)
        self.function()


def test_the_error_names_the_slow_code(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(threading, "Timer", HeldTimer)
    budget = run_plugin(partial(StartBudget, 1e-9), tmp_path)
    with pytest.raises(EngineDeadError) as error:
        budget.check()
    message = str(error.value)
    assert "of 1e-09 s for the whole start (engine.start_timeout_seconds); slow was " in message
    assert f"slow was wait_until_recorded() in {tmp_path}/acme_slow.py:" in message
    assert "the engine process is not launched after 1e-09 s" in caplog.text


def test_nothing_is_recorded_within_the_limit(caplog):
    budget = StartBudget(3600.0)
    budget.check()
    budget.cancel()
    assert not budget.passed.is_set()
    assert caplog.text == ""
