"""Callbacks and tasks of plugins in the server's event loop, which run outside of their requests.

Nothing of the server calls them, so that a plugin is known by the module of the function alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

from hardpoint.builtin_plugins.server.faults import ServerFaults
from hardpoint.builtin_plugins.server.timing import Timed
from hardpoint.plugins.server import AsyncGenerator

_log = logging.getLogger("hardpoint")

T = TypeVar("T")

_OWN = "hardpoint"
_TURN = Timed.__await__.__code__


@contextlib.contextmanager
def watched(engine: AsyncGenerator, faults: ServerFaults) -> Iterator[None]:
    """Report functions of plugins that hold this thread's event loop, while the body runs."""
    sources = _sources(engine)
    if not sources or not faults.slow_seconds:
        yield
        return
    loop, ended = asyncio.get_running_loop(), threading.Event()
    arguments = (loop, threading.get_ident(), sources, faults, ended)
    thread = threading.Thread(target=_watch, args=arguments, name="loop watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()  # it may wait for this loop: nothing joins it


class Outliving(Generic[T]):
    """Runs a coroutine that goes on when a task or a callback of a plugin stops its event loop."""

    def __init__(self) -> None:
        """Let each exception through until `begin`."""
        self._task: asyncio.Task[T] | None = None
        self._blame: Callable[[BaseException], object] | None = None

    def begin(self, task: asyncio.Task[T], blame: Callable[[BaseException], object]) -> None:
        """Go on from now on, since signals end the coroutine in another way than by an exception.

        Args:
            task: the coroutine's task.
            blame: called with a KeyboardInterrupt or SystemExit that has stopped the loop.
        """
        self._task, self._blame = task, blame

    def run(self, runner: asyncio.Runner, main: Coroutine[Any, Any, T]) -> T:
        """Return the result of the coroutine.

        Raises:
            BaseException: its own, or one before `begin`.
        """
        while True:
            try:
                if self._task is None:
                    return runner.run(main)
                return runner.get_loop().run_until_complete(self._task)
            except (KeyboardInterrupt, SystemExit) as error:
                if self._task is None or self._blame is None or self._task.done():
                    raise
                self._blame(error)


def blame_stop(engine: AsyncGenerator, faults: ServerFaults, error: BaseException) -> None:
    """Count and log an exception that has stopped the event loop."""
    sources, frames = _sources(engine), []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    plugin, where = _first_of_plugin(frames, sources) or ("", "a callback or a task of no plugin")
    if plugin:
        faults.count(plugin)
    _log.error(
        "%s raised %s, which stopped the event loop; the server goes on",
        where,
        type(error).__name__,
        exc_info=error,
    )


def _watch(
    loop: asyncio.AbstractEventLoop,
    thread: int,
    sources: dict[str, tuple[str, str]],
    faults: ServerFaults,
    ended: threading.Event,
) -> None:
    """Ping the loop again and again; inspect its stack if it does not respond."""
    while not ended.wait(faults.slow_seconds / 4):
        answered = threading.Event()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # it is closed
            return
        if answered.wait(faults.slow_seconds) or ended.is_set():
            continue
        frames = _stack(sys._current_frames().get(thread))
        source = _first_of_plugin(frames, sources)
        if source and not any(frame.f_code is _TURN for frame in frames):  # which names it itself
            faults.holds_loop(*source)
        del frames
        while not answered.wait(1.0) and not ended.is_set():
            pass


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _first_of_plugin(
    frames: list[FrameType], sources: dict[str, tuple[str, str]]
) -> tuple[str, str] | None:
    for frame in frames:
        module = str(frame.f_globals.get("__name__", ""))
        source = sources.get(module) or sources.get(module.partition(".")[0])
        if source is not None:
            return source[0], f"{source[1]}: its function {module}:{frame.f_code.co_qualname}"
    return None


def _sources(engine: AsyncGenerator) -> dict[str, tuple[str, str]]:
    by_module: dict[str, tuple[str, str]] = {}
    for entry in engine.plugins.manifest.entries:
        module = entry.value.partition(":")[0]
        package = module.partition(".")[0]
        if package != _OWN:
            by_module[module] = entry.name, str(entry.source)
            by_module.setdefault(package, by_module[module])
    return by_module
