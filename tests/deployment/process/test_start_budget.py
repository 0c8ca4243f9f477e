"""The time limit of an engine's start includes the work before its process is launched."""

from functools import partial
from pathlib import Path

import pytest

from hardpoint.errors import EngineDeadError
from hardpoint.process import start_budget
from hardpoint.process.start_budget import StartBudget

PLUGIN = """
def wait_until_recorded(start):
    budget = start()
    assert budget.passed.wait(60)
    return budget
"""
LOADER = "def load(plugin, start):\n    return plugin(start)\n"


def run_plugin(start, folder):
    """Let Hardpoint call a plugin in which the limit passes; return the budget."""
    plugin, loader = {}, {}
    exec(compile(PLUGIN, str(folder / "acme_slow.py"), "exec"), plugin)
    exec(compile(LOADER, str(Path(start_budget.__file__).with_name("loading.py")), "exec"), loader)
    return loader["load"](plugin["wait_until_recorded"], start)


def test_the_error_names_the_slow_code(caplog, tmp_path):
    budget = run_plugin(partial(StartBudget, 0.01), tmp_path)
    with pytest.raises(EngineDeadError) as error:
        budget.check()
    message = str(error.value)
    assert "of 0.01 s for the whole start (engine.start_timeout_seconds); slow was " in message
    assert f"slow was wait_until_recorded() in {tmp_path}/acme_slow.py:" in message
    assert "the engine process is not launched after 0.01 s" in caplog.text


def test_nothing_is_recorded_within_the_limit(caplog):
    budget = StartBudget(3600.0)
    budget.check()
    budget.cancel()
    assert not budget.passed.is_set()
    assert caplog.text == ""
