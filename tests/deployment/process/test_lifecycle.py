"""The states of an AsyncEngine: only the transitions that its page shows."""

from __future__ import annotations

import threading

import pytest

from hardpoint.errors import EngineDeadError
from hardpoint.process.watched_engine import EngineLifecycle, EngineState


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
    lifecycle, released = in_state(state), []
    dies = state is EngineState.SERVING
    first, second = (threading.Thread(target=released.append, args=(n,)) for n in (1, 2))
    lifecycle.die(EngineDeadError("gone"), first)
    assert lifecycle.state is (EngineState.DEAD if dies else state)
    lifecycle.die(EngineDeadError("again"), second)
    assert str(lifecycle.dead_error) == ("gone" if dies else "None")
    assert lifecycle.release is (first if dies else None)
    if dies:
        first.join()
    assert released == ([1] if dies else [])


def test_a_thread_that_closes_at_death_finds_a_started_one_to_wait_for():
    """An engine may be closed in one thread while its death is found in another."""
    lifecycle, idents = EngineLifecycle(), []

    def close():
        lifecycle.close()
        idents.append(lifecycle.release.ident)

    closing = threading.Thread(target=close)

    class Slow(threading.Thread):
        def start(self):
            closing.start()
            closing.join(0.2)
            super().start()

    lifecycle.die(EngineDeadError("gone"), Slow(target=int))
    closing.join()
    lifecycle.release.join()
    assert idents == [lifecycle.release.ident]
