"""The time limit of an engine's start includes the work before its process is launched."""

import pytest

from hardpoint.errors import EngineDeadError
from hardpoint.process.start_budget import StartBudget


def wait_until_recorded(budget):
    assert budget.passed.wait(60)


def test_the_error_names_the_slow_code(caplog):
    budget = StartBudget(0.01)
    wait_until_recorded(budget)  # as an import of a plugin would take the time
    with pytest.raises(EngineDeadError) as error:
        budget.check()
    message = str(error.value)
    assert "of 0.01 s for the whole start (engine.start_timeout_seconds); slow was " in message
    assert f"wait_until_recorded() in {__file__}:" in message
    assert "the engine process is not launched after 0.01 s" in caplog.text


def test_nothing_is_recorded_within_the_limit(caplog):
    budget = StartBudget(3600.0)
    budget.check()
    budget.cancel()
    assert not budget.passed.is_set()
    assert caplog.text == ""
