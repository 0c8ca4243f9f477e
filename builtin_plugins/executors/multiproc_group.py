"""The worker processes of the executor "multiproc", the calls to them, and their end."""

from __future__ import annotations

import contextlib
import copy
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.errors import CommunicationAbortedError, EngineClosedError, EngineDeadError
from hardpoint.plugins import ExecutorContext
from hardpoint.toolkit.workers.calls import encode_call
from hardpoint.toolkit.workers.joining import is_joint

from .multiproc_calls import CallsEndedError, CallSender
from .multiproc_messages import Frame, FrameKind, FrameReader, LoadingProgress, Setup, send
from .multiproc_pending import PendingCall
from .multiproc_watch import StepWatchdog

if TYPE_CHECKING:
    from hardpoint.plugins.process.executor import WorkerProcess


_RUN = "hardpoint.builtin_plugins.executors.multiproc_worker:run_worker"
_SETTLE_S = 0.25  # for other ranks to fail as well, and for the end of a process to be seen
_GRACE_S, _GRACE_AFTER_FAILURE_S = 5.0, 1.0  # for workers to close, before they are killed
_TICK_S = 0.1


class RankProcesses:
    """The processes of all ranks.

    A thread reads their answers and watches for their end. Where a process ends, or a call leaves
    ranks out of step, the group fails: all calls raise that error from then on, and no rank waits
    for another.
    """

    # `_order` makes the numbers of calls the order in which they are sent; a send may wait, so
    # that nothing else is guarded by it. `_lock` guards the rest.

    def __init__(self, context: ExecutorContext, sender: CallSender) -> None:
        """`sender`: sends the calls; closed with this."""
        self._sender = sender
        self._parallel = context.parallel
        self._owner = os.getpid()
        self._workers: list[WorkerProcess] = []
        self._readers: list[FrameReader] = []
        self._all_report = context.all_report
        self._ready: set[int] = set()
        self._progress: dict[int, LoadingProgress] = {}
        self._order, self._lock = threading.Lock(), threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._calls: dict[int, PendingCall] = {}
        self._num_calls = 0
        self._settle_at: dict[int, float] = {}  # by number of a call that some ranks failed
        self._watch_step = StepWatchdog(context)
        self._failure: BaseException | None = None
        self._callback: Callable[[BaseException], None] | None = None
        self._is_reported = False  # to the callback; an error of a step is in its future
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._watcher: threading.Thread | None = None

    # Start

    def start(self, context: ExecutorContext) -> None:
        """Start the processes, and wait until all have opened their worker.

        Raises:
            Exception: the error of a rank that could not.
            EngineDeadError: they took too long.
        """
        world_size = self._parallel.world_size
        for rank in range(world_size):
            launch = context.launch(rank)
            worker = context.start_process(launch, _RUN, self._sender.descriptors(rank))
            self._workers.append(worker)
            self._readers.append(FrameReader(worker.channel))
            samples = rank == self._parallel.output_rank
            overlaps = context.num_batches > 1
            setup = Setup(self._sender.uses_ring, context.watchdog_seconds, samples, overlaps)
            with contextlib.suppress(OSError):  # it has ended, which the thread sees
                send(worker.channel, FrameKind.SETUP, msgspec.msgpack.encode(setup))
        self._sender.started()
        self._watcher = threading.Thread(target=self._watch, name="MultiprocWatch", daemon=True)
        self._watcher.start()
        seconds = self._parallel.start_seconds
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or len(self._ready) == world_size, seconds
            )
            if self._failure is not None:
                raise _again(self._failure)
            late = [rank for rank in range(world_size) if rank not in self._ready]
        if late:
            error = EngineDeadError(
                f"{', '.join(map(self.label, late))}: not ready within {seconds:g} s "
                f"(parallel.start_seconds)"
            )
            self._fail(error)
            raise error

    def label(self, rank: int) -> str:
        """Return a rank and its process id, for messages."""
        return f"rank {rank} (pid {self._workers[rank].pid})"

    # Calls

    def step(self, method: str, args: Sequence[Any]) -> PendingCall:
        """Send a call of a step, which the rank that samples answers."""
        return self._send(method, args, self._parallel.output_rank, all_answer=self._all_report)

    def call(
        self,
        method: str,
        args: Sequence[Any] = (),
        timeout: float | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> list[Any]:
        """Call a method in all ranks; return the results in rank order.

        Raises:
            TimeoutError: they did not answer in time. They go on with it, and with later calls.
        """
        call = self._send(method, args, None)
        if progress is not None:
            while not wait((call.future,), _TICK_S).done:
                self._report_progress(progress)
            self._report_progress(progress, ended=call.future.exception() is None)
        try:
            results: list[Any] = call.future.result(timeout)
        except TimeoutError:
            if call.future.done():
                raise  # of a worker
            ranks = ", ".join(self.label(rank) for rank in call.missing)
            message = f"{method}: no answer within {timeout:g} s from {ranks}"
            raise TimeoutError(message) from None
        return results

    def _send(
        self, method: str, args: Sequence[Any], output_rank: int | None, *, all_answer: bool = True
    ) -> PendingCall:
        call = PendingCall(method, self._parallel.world_size, output_rank, all_answer=all_answer)
        data = encode_call(method, args)
        with self._order:
            with self._lock:
                if self._closing:
                    raise EngineClosedError(f"{method}: the executor was closed")
                if self._failure is not None:
                    raise _again(self._failure)
                self._num_calls = number = self._num_calls + 1
                self._calls[number] = call
            try:
                self._sender.send(number, data, all_answer=all_answer)
            except CallsEndedError as cause:
                self._await_failure(call, cause)
            except BaseException as error:  # of Ctrl-C, for example
                if not self._sender.sends_to_all_or_none:
                    self._fail(EngineDeadError(f"{method}: sending it failed: {error!r}"))
                raise
        return call

    def _await_failure(self, call: PendingCall, cause: CallsEndedError) -> None:
        """Wait for the reason that a call could not be sent; set it as the result."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._closing, _SETTLE_S)
        self._fail(EngineDeadError(f"{call.method}: workers take no calls: {cause}"))

    def _report_progress(
        self, progress: Callable[[str, int, int], None], *, ended: bool = False
    ) -> None:
        with self._lock:
            reported = list(self._progress.values())
        if not reported:
            return
        missing = self._parallel.world_size - len(reported)
        total = sum(progress.total for progress in reported) + missing * max(
            progress.total for progress in reported
        )
        done = total if ended else min(sum(progress.done for progress in reported), total - 1)
        progress(reported[0].what, done, total)

    # The thread

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        owners = {}
        for rank, worker in enumerate(self._workers):
            for descriptor in (worker.channel.fileno(), *worker.sentinels()):
                owners[descriptor] = rank
                poller.register(descriptor, select.POLLIN)
        while not self._closing and self._failure is None:
            for descriptor, _ in poller.poll(self._timeout_ms()):
                if self._closing or descriptor == self._wake_read:
                    return
                rank = owners[descriptor]
                if descriptor != self._workers[rank].channel.fileno():
                    self._check_process(rank)
                elif self._take_frames(rank):
                    poller.unregister(descriptor)
            self._settle()
            self._end_late_step()

    def _timeout_ms(self) -> float | None:
        times = [*self._settle_at.values(), *self._watch_step.wakes_at()]
        return max(min(times) - time.monotonic(), 0) * 1000 + 1 if times else None

    def _check_process(self, rank: int) -> None:
        error = self._workers[rank].failure()
        if error is not None:
            if f"rank {rank}" not in str(error):
                error.add_note(f"In {self.label(rank)}")
            self._fail(error)

    def _take_frames(self, rank: int) -> bool:
        reader = self._readers[rank]
        for frame in reader.read():
            if frame.kind is FrameKind.RESULT:
                self._take_answer(rank, frame)
            elif frame.kind is FrameKind.PROGRESS:
                reported = msgspec.msgpack.decode(frame.data, type=LoadingProgress)
                with self._lock:
                    self._progress[rank] = reported
            elif frame.kind is FrameKind.READY:
                with self._changed:
                    self._ready.add(rank)
                    self._changed.notify_all()
        return reader.is_at_end

    def _take_answer(self, rank: int, frame: Frame) -> None:
        number = frame.number
        with self._lock:
            if self._failure is not None:
                return  # it is late
            call = self._calls.get(number)
        if call is None:  # a step that the output rank has completed, and this one has not
            call = PendingCall("sample_tokens", self._parallel.world_size, rank, all_answer=False)
            call.future.set_result(None)  # no caller waits for it
        call.process_answer(rank, self.label(rank), frame.data)
        if call.failures and self._watch_step.late is not None:
            return  # a rank that has left the step, see `_end_late_step`
        if call.is_answered:
            self._watch_step.answered()
            with self._lock:
                self._calls.pop(number, None)
            call.succeed()
        elif call.failures and call.left_in_step:
            with self._lock:
                self._calls.pop(number, None)
            self._settle_at.pop(number, None)
            call.fail(call.failure())
        elif call.failures and is_joint(call.method) and number not in self._settle_at:
            with self._lock:
                self._calls[number] = call
            self._settle_at[number] = time.monotonic() + _SETTLE_S

    def _settle(self) -> None:
        now = time.monotonic()
        for number in [number for number, at in self._settle_at.items() if at <= now]:
            del self._settle_at[number]
            with self._lock:
                call = self._calls.get(number)
            if call is not None and call.failures:
                is_raised = call.is_step and not call.future.done()
                self._fail(self._first_cause(call.failure()), report=not is_raised)

    def _end_late_step(self) -> None:
        """Fail for a step that takes too long, once ranks that wait for others have left it.

        Ranks that have not are named and killed: a rank that hangs does not end by itself.
        """
        with self._lock:
            calls = list(self._calls.values())
        if self._watch_step.begin(calls):
            self._abort(self._watch_step.reason)
        if not self._watch_step.is_over:
            return
        assert self._watch_step.late is not None
        doing = {rank: worker.doing() for rank, worker in enumerate(self._workers)}
        hanging = {rank: text for rank, text in doing.items() if text is not None}
        hanging = hanging or dict.fromkeys(self._watch_step.late.missing, "")
        for rank in hanging:
            self._workers[rank].close(0)
        ranks = "; ".join(f"{self.label(rank)}{text}" for rank, text in hanging.items())
        self._fail(EngineDeadError(f"{ranks or 'all ranks'}: {self._watch_step.reason}"))

    def _first_cause(self, error: Exception) -> Exception:
        """Return the error that a rank raised by itself, if `error` only follows from one."""
        if not isinstance(error, CommunicationAbortedError):
            return error
        with self._lock:
            errors = [call.failure() for call in self._calls.values() if call.failures]
        causes = (other for other in errors if not isinstance(other, CommunicationAbortedError))
        return next(causes, error)

    # End

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Register the callback for the loss of a worker; call it if one is lost already."""
        with self._lock:
            self._callback = callback
            error = self._failure if self._is_reported else None
        if error is not None:
            callback(error)

    def _fail(self, error: BaseException, *, report: bool = True) -> None:
        """Let all calls raise an error from now on, and let no rank wait for another.

        Args:
            error: the reason.
            report: whether to call the callback.
        """
        with self._changed:
            if self._failure is not None or self._closing:
                return
            self._failure, self._is_reported = error, report
            calls, self._calls = list(self._calls.values()), {}
            callback = self._callback
            self._changed.notify_all()
        for call in calls:
            call.fail(_again(error))
        self._abort(f"the engine failed: {error}")
        self._sender.end()
        if report and callback is not None:
            callback(error)

    def _abort(self, reason: str) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has ended
                send(worker.channel, FrameKind.ABORT, reason.encode()[:2000])

    def close(self) -> None:
        """End the processes. Closing twice does nothing."""
        if os.getpid() != self._owner:
            return  # a fork has neither the thread, which may have had the lock, nor the processes
        with self._changed:
            if self._closing:
                return
            self._closing = True
            calls, self._calls = list(self._calls.values()), {}
            self._changed.notify_all()
        for call in calls:
            call.fail(EngineClosedError(f"{call.method}: the executor was closed"))
        self._sender.end()
        os.write(self._wake_write, b"x")
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.shutdown(socket.SHUT_RDWR)
        grace_s = _GRACE_S if self._failure is None else _GRACE_AFTER_FAILURE_S
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            worker.close(max(deadline - time.monotonic(), 0))
        self._sender.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _again(error: BaseException) -> BaseException:
    """Return an error to raise once more: traceback and notes belong to one of them."""
    try:
        again = copy.copy(error)
    except Exception:  # of a class that takes other arguments
        return error
    if hasattr(error, "__notes__"):
        again.__notes__ = list(error.__notes__)
    return again
