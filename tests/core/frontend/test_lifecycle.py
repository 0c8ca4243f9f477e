"""The states of an AsyncEngine: only the transitions that its page shows."""

from __future__ import annotations

import pytest

from hardpoint.core.frontend.watched_engine import EngineLifecycle, EngineState
from hardpoint.errors import EngineDeadError


def in_state(state: EngineState) -> EngineLifecycle:
    lifecycle = EngineLifecycle()
    lifecycle.state = state
    return lifecycle


@pytest.mark.parametrize("state", EngineState)
def test_it_is_closed_once(state):
    lifecycle = in_state(state)
    assert lifecycle.close() is (state is not EngineState.CLOSED)
    assert lifecycle.state is EngineState.CLOSED
    assert not lifecycle.close()


@pytest.mark.parametrize("state", EngineState)
def test_dying_keeps_the_first_error(state):
    lifecycle = in_state(state)
    dies = state is EngineState.SERVING
    assert lifecycle.die(EngineDeadError("gone")) is dies
    assert lifecycle.state is (EngineState.DEAD if dies else state)
    assert not lifecycle.die(EngineDeadError("again"))
    assert str(lifecycle.dead_error) == ("gone" if dies else "None")
