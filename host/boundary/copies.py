"""Copies of a process of Hardpoint that a plugin makes by `os.fork`.

A copy that returns from the call in which the plugin made it would go on as the engine or worker
that it is a copy of, with its memory and its sockets. So it ends there, and one that a plugin makes
in a thread of its own ends with that thread. A copy that does work of its own and then exits, as
those of `multiprocessing`, is left alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from hardpoint.host.registry.blame import component_of
from hardpoint.host.system.forks import FORKS, end_copy
from hardpoint.plugins.component import Component, Source
from hardpoint.plugins.executor import Executor

from .activity import PluginCalls

_log = logging.getLogger("hardpoint")

_RUN = PluginCalls.run.__code__
_named: set[tuple[str, str]] = set()
_of_thread = threading.local()


def watch_forks() -> None:
    """End copies from now on, and log which plugin makes one; for processes of Hardpoint's own."""
    main = threading.get_ident()

    def after_in_child() -> None:
        FORKS[0] += 1
        if threading.get_ident() != main:
            _of_thread.end = _EndOfThread()

    os.register_at_fork(after_in_parent=_log_fork, after_in_child=after_in_child)


class _EndOfThread:
    """Ends a copy with its only thread, which would otherwise wait for others for ever."""

    def __del__(self) -> None:
        end_copy()


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
    """Return the innermost plugin in whose method or hook this thread is, and that.

    An executor may start its workers in this way, and is not returned.
    """
    frame = sys._getframe()
    component: Component | None = None
    method = ""
    while (caller := frame.f_back) is not None:
        frame = caller
        if component is None and frame.f_code is _RUN:  # of a plugin that is no component
            calls: PluginCalls = frame.f_locals["self"]
            return None if calls.kind == "executors" else (calls.source, frame.f_locals["method"])
        owner = component_of(frame)
        if component is None:
            component = owner
        if component is not None:
            if owner is not component:
                break
            method = frame.f_code.co_name
    source = getattr(getattr(component, "context", None), "source", None)
    return None if source is None or isinstance(component, Executor) else (source, method)
