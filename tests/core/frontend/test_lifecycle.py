"""The states of an AsyncEngine: only the transitions that the picture shows."""

from __future__ import annotations

import re

import pytest

from hardpoint.core.frontend import lifecycle as module
from hardpoint.core.frontend.lifecycle import EngineLifecycle, EngineState
from hardpoint.errors import EngineDeadError


def documented() -> set[tuple[EngineState, EngineState]]:
    """Return the transitions that the module's docstring lists."""
    lines = re.findall(r"^ +([A-Z, ]+) -+\(.*\)-+> ([A-Z]+)$", module.__doc__, re.MULTILINE)
    return {
        (EngineState[state], EngineState[to])
        for states, to in lines
        for state in states.split(", ")
    }


def in_state(state: EngineState) -> EngineLifecycle:
    lifecycle = EngineLifecycle()
    lifecycle.state = state
    return lifecycle


@pytest.mark.parametrize("to", EngineState)
@pytest.mark.parametrize("state", EngineState)
def test_only_documented_transitions_happen(state, to):
    lifecycle = in_state(state)
    assert lifecycle.move(to) is ((state, to) in documented())
    assert lifecycle.state is (to if (state, to) in documented() else state)


@pytest.mark.parametrize("state", EngineState)
def test_dying_keeps_the_first_error(state):
    lifecycle = in_state(state)
    dies = state in (EngineState.SERVING, EngineState.DRAINING, EngineState.RESTARTING)
    assert lifecycle.die(EngineDeadError("gone")) is dies
    assert not lifecycle.die(EngineDeadError("again"))
    assert str(lifecycle.dead_error) == ("gone" if dies else "None")


def test_outputs_are_taken_until_the_end_of_the_engine_is_delivered():
    counted = [state for state in EngineState if in_state(state).takes_outputs]
    assert counted == [EngineState.SERVING, EngineState.DRAINING]
