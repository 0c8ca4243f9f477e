"""A live change in all processes: the order of what each does, for callers that wait or await."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator

from hardpoint.errors import BusyError, HardpointError
from hardpoint.registry.plugin_set import PluginSet

from .change import Action, Change, Changes

_log = logging.getLogger("hardpoint")

_POLL_SECONDS = (0.002, 0.05)
"""The shortest and the longest time between two questions whether a change is prepared."""

Steps = Generator[Action | float, list[str], None]
"""Yields what the engines are to do next, or seconds to wait for; gets the engines' answer."""


def steps(change: Change, own: Changes, plugins: PluginSet, seconds: float) -> Steps:
    """Run a change: prepared everywhere, then committed everywhere, or undone everywhere.

    Args:
        change: the change.
        own: the changes of the frontend, which switches last.
        plugins: its plugins.
        seconds: time to prepare it in all processes.

    Raises:
        BusyError: another change is under way.
        HardpointError: a process failed, or took too long; nothing has changed.
    """
    own.prepare(change, plugins)
    try:
        yield "prepare"
        yield from _prepared(own, seconds)
        yield "commit"
        own.commit()
    except BaseException as error:
        own.undo()
        if not isinstance(error, BusyError):  # the change of another frontend stays
            with contextlib.suppress(HardpointError):
                yield "undo"
        raise
    try:
        yield "keep"
    except HardpointError as error:  # it was started again meanwhile, with the new plugins
        _log.warning("a live change is committed, but: %s", error)
    own.keep()


def next_of(running: Steps, answer: list[str] | BaseException | None) -> Action | float | None:
    """Return the next step of a change, given the answer to the last one; None at its end.

    Raises:
        BaseException: the change was undone.
    """
    try:
        if isinstance(answer, BaseException):
            return running.throw(answer)
        return next(running) if answer is None else running.send(answer)
    except StopIteration:
        return None


def _prepared(own: Changes, seconds: float) -> Steps:
    """Wait until all processes have prepared the change."""
    ends, (pause, longest) = time.monotonic() + seconds, _POLL_SECONDS
    while True:
        waiting = yield "state"
        if not own.is_prepared():
            waiting = [*waiting, "the frontend"]
        if not waiting:
            return
        if time.monotonic() >= ends:
            raise HardpointError(
                f"the change was not prepared within {seconds:g} s (plugins.change_seconds) by "
                f"{', '.join(dict.fromkeys(waiting))}; nothing has changed"
            )
        yield pause
        pause = min(pause * 1.5, longest)
