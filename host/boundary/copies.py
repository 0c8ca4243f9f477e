"""Copies of a process of Hardpoint that a plugin makes by `os.fork`.

A copy that returns from the plugin's method to the engine would continue as the engine or worker
that it is a copy of, with its memory and its sockets. It ends when it returns. A copy that a plugin
makes in a thread of its own ends with that thread. A copy that does work of its own and then exits,
such as a process of `multiprocessing`, is not ended.

Only `os.register_at_fork` is used: the calls of plugins are not checked.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from hardpoint.host.registry.blame import component_of
from hardpoint.plugins.component import Component, Source
from hardpoint.plugins.executor import Executor

from .activity import PluginCalls

_log = logging.getLogger("hardpoint")

_RUN = PluginCalls.run.__code__
_RUN_PROCESS = BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]
_ENGINE = ("hardpoint.core.", "hardpoint.host.", "hardpoint.process.")
_named: set[tuple[str, str]] = set()
_of_thread = threading.local()


def watch_forks() -> None:
    """End copies from now on, and log which plugin makes one; for processes of Hardpoint's own."""
    main = threading.get_ident()

    def after_in_child() -> None:
        _end_on_return(sys._getframe(1))
        if threading.get_ident() != main:
            _of_thread.end = _EndOfThread()

    os.register_at_fork(after_in_parent=_log_fork, after_in_child=after_in_child)


def _end_on_return(frame: FrameType | None) -> None:
    """End this copy as soon as the engine's innermost frame continues; set by a trace function."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_ENGINE):
        frame = frame.f_back
    if frame is not None:
        frame.f_trace_opcodes, frame.f_trace = True, _end
        sys.settrace(_trace_call)


def _end(_frame: FrameType, _event: str, _value: Any) -> None:
    """End this process without cleanup of the parent's resources."""
    os._exit(0)


def _trace_call(frame: FrameType, _event: str, _value: Any) -> None:
    """Trace no call; stop tracing in a process of `multiprocessing`, which never returns."""
    if frame.f_code is _RUN_PROCESS:
        sys.settrace(None)


class _EndOfThread:
    """Ends a copy with its only thread, which would otherwise wait for others for ever."""

    def __del__(self) -> None:
        os._exit(0)


def _log_fork() -> None:
    fork = _forking()
    if fork is not None and (key := (str(fork[0]), fork[1])) not in _named:
        _named.add(key)
        _log.warning(
            "%s: its %s() forked this process (pid %d); a copy that returns from it is ended",
            *key,
            os.getpid(),
        )


def _forking() -> tuple[Source, str] | None:
    """Return the innermost plugin that this thread runs, and its method or hook.

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
