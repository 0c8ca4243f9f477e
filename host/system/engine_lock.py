"""Who may use an engine: the process that opened it; of an LLMEngine, one thread at a time."""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from hardpoint.errors import EngineClosedError
from hardpoint.plugins import HardpointError

P = ParamSpec("P")
R = TypeVar("R")


class OwnerProcess:
    """The process that opened an engine. A fork of it has the engine's memory, but no threads.

    Attributes:
        pid: its process id.
        ending_thread: the thread that ends the interpreter, once it does; others are refused.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.ending_thread: int | None = None

    @property
    def is_other(self) -> bool:
        """Whether the current process is not the owner, but a fork of it."""
        return os.getpid() != self.pid

    def check(self) -> None:
        """Refuse a call in a fork, or in a daemon thread when the interpreter ends.

        Raises:
            HardpointError: the current process is not the owner.
            EngineClosedError: the interpreter ends.
        """
        if self.ending_thread not in (None, threading.get_ident()):
            raise EngineClosedError("the program is ending, so the engine takes no more calls")
        if os.getpid() != self.pid:
            raise HardpointError(
                f"the engine belongs to the process {self.pid}, which opened it; the process "
                f"{os.getpid()} is a fork of it and cannot use it: open an engine after the fork"
            )


class DeferringLock:
    """A reentrant lock, as a context, with calls that wait until no thread has it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._depth = 0
        self._later: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        """Wait for the lock."""
        thread = threading.get_ident()
        if self._thread != thread:
            self._lock.acquire()
            self._thread = thread
        self._depth += 1
        if self._later and self._depth == 1:
            self._run_first()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._thread = None
            self._lock.release()
            if self._later:
                self._run_later()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call under the lock without waiting for it: now if it is free, else after its release.

        The next thread that takes the lock finds the call made. For the garbage collector, which
        may run in any thread, at any time, and for functions that it may call.
        """
        self._later.append(callback)
        self._run_later()

    def _run_first(self) -> None:
        try:
            while self._later:
                self._later.popleft()()
        except BaseException:
            self.__exit__()
            raise

    def _run_later(self) -> None:
        while self._later and self._thread is None and self._lock.acquire(blocking=False):
            self._thread, self._depth = threading.get_ident(), 1
            try:
                if self._later:  # else another thread was faster
                    self._later.popleft()()
            finally:
                self._thread, self._depth = None, 0
                self._lock.release()


class EngineLock(DeferringLock):
    """A fair lock, as a context, that a fork of the process cannot take.

    The thread that has it may take it again, as a plugin's method or a signal handler does.

    Attributes:
        owner: the process that opened the engine.
    """

    # `_gate` makes it fair: a thread waits for `_lock` holding `_gate`, so that the thread that
    # has just released `_lock` queues behind it, however soon it comes again. Without a waiting
    # thread, `_gate` is not needed. Both are reentrant, for a signal handler that comes while its
    # thread waits.

    def __init__(self) -> None:
        super().__init__()
        self.owner = OwnerProcess()
        self._gate, self._users = threading.RLock(), threading.local()
        self._is_awaited = False

    def __enter__(self) -> None:
        """Wait for the lock.

        Raises:
            HardpointError: the process is a fork of the process that opened the engine.
        """
        owner = self.owner
        if owner.ending_thread is not None or os.getpid() != owner.pid:
            owner.check()
        thread = threading.get_ident()
        if self._thread != thread:
            if self._is_awaited or not self._lock.acquire(blocking=False):
                self._wait()
            self._thread = thread
            self._users.is_one = True
            if owner.ending_thread is not None:
                self._check_ending()
        self._depth += 1
        if self._later and self._depth == 1:
            self._run_first()

    def wait_at_exit(self, end_waiting: Callable[[], None]) -> None:
        """Let the end of the interpreter wait for the current step, and refuse further calls.

        Args:
            end_waiting: called first; ends the waiting for outputs in other threads.
        """
        # The interpreter ends daemon threads wherever they are; within torch, that is an abort.
        weakref.finalize(self, _end_calls, self.owner, self._lock, end_waiting)

    def _check_ending(self) -> None:
        try:
            self.owner.check()
        except EngineClosedError:
            self._thread = None
            self._lock.release()
            raise

    def _wait(self) -> None:
        with self._gate:
            self._is_awaited = True
            try:
                self._lock.acquire()
            finally:
                self._is_awaited = False

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Do as `DeferringLock.call_soon` does; in a fork do nothing.

        A thread that never took the lock leaves the call to a new thread: it may be a thread of the
        engine's client, and hold locks that the call needs.
        """
        if self.owner.is_other:
            return
        if hasattr(self._users, "is_one"):
            super().call_soon(callback)
            return
        self._later.append(callback)
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # no thread is left: the next call does it
                _thread.start_new_thread(self._run_later, ())


_EXIT_TIMEOUT_S = 10.0


def _end_calls(owner: OwnerProcess, lock: Any, end_waiting: Callable[[], None]) -> None:
    if owner.is_other:
        return
    owner.ending_thread = threading.get_ident()
    end_waiting()
    if lock.acquire(timeout=_EXIT_TIMEOUT_S):
        lock.release()


class _Locked(Protocol):
    lock: EngineLock


SelfT = TypeVar("SelfT", bound=_Locked)


def locked(method: Callable[Concatenate[SelfT, P], R]) -> Callable[Concatenate[SelfT, P], R]:
    """Let a method hold its object's lock."""

    @functools.wraps(method)
    def call(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return call
