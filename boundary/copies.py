"""Copies of a process of Hardpoint that a plugin makes by `os.fork`.

A copy that returns from the call in which the plugin made it would go on as the engine or worker
that it is a copy of, with its memory and its sockets. So it ends there. A copy that does work of
its own and then exits, as those of `multiprocessing`, is left alone.
"""

from __future__ import annotations

import logging
import os
import sys

from hardpoint.plugins.component import Component
from hardpoint.plugins.executor import Executor
from hardpoint.plugins.manifest import Source
from hardpoint.registry.blame import component_of
from hardpoint.system.forks import FORKS

_log = logging.getLogger("hardpoint")

_named: set[tuple[str, str]] = set()


def watch_forks() -> None:
    """End copies from now on, and log which plugin makes one; for processes of Hardpoint's own."""
    os.register_at_fork(after_in_parent=_log_fork, after_in_child=_count)


def _count() -> None:
    FORKS[0] += 1


def _log_fork() -> None:
    """Name the plugin in whose method this process was copied, once for each method."""
    found = _forking()
    if found is not None and (key := (str(found[0]), found[1])) not in _named:
        _named.add(key)
        _log.warning(
            "%s: its %s() forked this process (pid %d); a copy that returns from it is ended",
            *key,
            os.getpid(),
        )


def _forking() -> tuple[Source, str] | None:
    """Return the innermost component in whose method this thread is, and the method.

    An executor may start its workers in this way, and is not returned.
    """
    frame = sys._getframe()
    component: Component | None = None
    method = ""
    while (caller := frame.f_back) is not None:
        frame = caller
        owner = component_of(frame)
        if component is None:
            component = owner
        if component is not None:
            if owner is not component:
                break
            method = frame.f_code.co_name
    source = getattr(getattr(component, "context", None), "source", None)
    return None if source is None or isinstance(component, Executor) else (source, method)
