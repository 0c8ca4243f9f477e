"""The thread in which a worker's calls run while the engine plans the next step."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from hardpoint.errors import EngineDeadError
from hardpoint.plugins import Executor

if TYPE_CHECKING:
    from hardpoint.plugins import ModelRunnerOutput
    from hardpoint.plugins.process.executor import LateOutput

T = TypeVar("T")

_log = logging.getLogger("hardpoint")

_POLL_S = 0.0002  # between looks at tokens on their way to the host, while no call comes
_GRACE_S = 5.0  # left to a call that is under way when the thread is to end


class _WorkerCall(NamedTuple):
    """A call; it may overlap the late output of the previous call."""

    future: Future[Any]
    run: Callable[[], Any]
    overlaps: bool


class WorkerThread:
    """Runs calls in their order in one thread, which ends with this object.

    While another call waits, a result is kept until that is done, or calls `hand_out`. Else the
    thread that gets the result would take the interpreter from this one, just when it prepares the
    next step, and the device would wait for both.

    Attributes:
        hand_out: lets the results so far be known; for the call that runs.
    """

    def __init__(self) -> None:
        self._calls = _Calls()
        thread = threading.Thread(target=self._calls.run, name="HardpointWorker", daemon=True)
        thread.start()
        self.hand_out = self._calls.hand_out
        self._end = weakref.finalize(self, _end, self._calls, thread)

    def submit(self, call: Callable[[], T], *, overlaps: bool = False) -> Future[T]:
        """Run a call after the earlier ones; return the future of its result or error.

        A call that does not overlap waits for the late output of the call before.
        The error is an EngineDeadError if the thread ends before.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a call passed to a worker cannot be withdrawn
        self._calls.put(_WorkerCall(future, call, overlaps))
        if self._calls.have_ended:
            self._calls.fail()
        return future

    def submit_late(
        self, call: Callable[[], ModelRunnerOutput | LateOutput | None]
    ) -> Future[ModelRunnerOutput]:
        """Run a call that may return a late output, as `submit`."""
        return self.submit(cast("Callable[[], ModelRunnerOutput]", call))

    def close(self, last: Callable[[], object]) -> None:
        """Run a last call after the earlier ones, and end the thread.

        A call that does not end in time is left alone, with the thread; the last one follows it.
        """
        if self._calls.have_ended:
            last()
            return
        closing = self.submit(last)
        try:
            closing.result(_GRACE_S)
        except TimeoutError:
            if closing.done():  # it raised that itself
                raise
            _log.warning("a call of the worker does not end: its thread is left alone")
        finally:
            self._end()


class _Calls:
    """The calls of a thread, which refers to them alone, so that it keeps nothing else alive.

    Attributes:
        have_ended: whether no thread runs them any more. `Thread.is_alive` is wrong after a signal
            handler has raised within it (Python 3.11 and 3.12).
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_WorkerCall | None] = queue.SimpleQueue()
        self._futures: set[Future[Any]] = set()  # of calls without a known result
        self._results: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._late: tuple[Future[Any], LateOutput] | None = None  # of the call that ran last
        self.have_ended = False

    def put(self, call: _WorkerCall) -> None:
        self._futures.add(call.future)
        self._queue.put(call)

    def end(self) -> None:
        """Let the thread end after the calls so far."""
        self._queue.put(None)

    def run(self) -> None:
        """Run calls until there are no more, or the thread is ended by an exception."""
        try:
            while (call := self._next()) is not None:
                if not call.overlaps:
                    self._finish_late()
                result = _result(call.future, call.run)
                self._finish_late()
                self.hand_out()  # of the call before, unless this one did
                if isinstance(result, Executor.LateOutput):
                    self._late = call.future, result
                else:
                    self._results.append((call.future, cast("Callable[[], None]", result)))
                del call, result  # nor is a plan kept until the next call
                if self._queue.empty():
                    self.hand_out()
        finally:
            try:
                self._finish_late()
                self.hand_out()
            finally:
                self.have_ended = True  # before, since a call may come now
                self.fail()

    def _next(self) -> _WorkerCall | None:
        """Return the next call; complete the late output first if its tokens are there."""
        while self._late is not None:
            if self._late[1].is_ready():
                self._finish_late()
                if self._queue.empty():
                    self.hand_out()
                break
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=_POLL_S)
        return self._queue.get()

    def _finish_late(self) -> None:
        if self._late is not None:
            (future, output), self._late = self._late, None
            result = _result(future, output.result)
            assert not isinstance(result, Executor.LateOutput)
            self._results.append((future, cast("Callable[[], None]", result)))

    def hand_out(self) -> None:
        while self._results:
            future, set_result = self._results.popleft()
            set_result()
            self._futures.discard(future)

    def fail(self) -> None:
        """Fail the calls that no thread runs any more."""
        for future in list(self._futures):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(EngineDeadError("the thread of the worker has ended"))


def _result(future: Future[T], call: Callable[[], T]) -> LateOutput | Callable[[], None]:
    """Return the function that sets the result of a future, or a result that comes later."""
    try:
        value = call()
    except BaseException as error:
        return functools.partial(future.set_exception, error)
    return (
        value
        if isinstance(value, Executor.LateOutput)
        else functools.partial(future.set_result, value)
    )


def _end(calls: _Calls, thread: threading.Thread) -> None:
    calls.end()
    if thread is not threading.current_thread():  # where the last reference was dropped
        thread.join(_GRACE_S)
