"""A worker's process of the executor "multiproc"."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from hardpoint.plugins.executor import WorkerLaunch, open_worker
from hardpoint.toolkit.workers.calls import LateResult, WorkerServer, has_failed

from .multiproc_calls import CallReceiver, CallsEndedError, open_receiver
from .multiproc_messages import FrameKind, LoadingProgress, Setup, receive, send

if TYPE_CHECKING:
    from hardpoint.plugins.process.executor import Worker

_log = logging.getLogger("hardpoint")

_SLACK = 0.1  # of the watchdog's limit
_STDERR = 2  # not `sys.stderr`, which a plugin may set to anything
_IDLE_S = 1.0  # without a call, after which the watchdog is stopped
_PROGRESS_INTERVAL_S = 0.05
_POLL_S = 0.0002  # between looks at tokens on their way to the host, while no call comes


def run_worker(launch: WorkerLaunch, channel: socket.socket, descriptors: list[int]) -> None:
    """Serve an executor's calls until it ends them."""
    frame = receive(channel)
    if frame is None:
        return  # the executor has ended
    setup = msgspec.msgpack.decode(frame.data, type=Setup)
    receiver = open_receiver(setup, launch.rank, descriptors)
    worker = open_worker(launch, _ProgressReports(channel))
    try:
        service = _Service(worker, channel, receiver, setup)
        threading.Thread(target=service.obey, name="WorkerControl", daemon=True).start()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
            send(channel, FrameKind.READY)
            service.serve()
    finally:
        worker.close()


class _ProgressReports:
    """Reports to the executor how far the loading is, not too often."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reported_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._reported_at < _PROGRESS_INTERVAL_S:
            return
        self._reported_at = now
        send(
            self._channel,
            FrameKind.PROGRESS,
            msgspec.msgpack.encode(LoadingProgress(stage, done, total)),
        )


class _Service:
    """Runs calls in the main thread, and obeys the executor in another one."""

    def __init__(
        self, worker: Worker, channel: socket.socket, receiver: CallReceiver, setup: Setup
    ) -> None:
        self._worker = worker
        self._server = WorkerServer(worker)
        self._channel = channel
        self._receiver = receiver
        self._samples, self._overlaps = setup.samples, setup.overlaps
        self._late: tuple[int, LateResult] | None = None  # of the call that ran last
        self._watchdog = _Watchdog(setup.watchdog_seconds)
        self._in_call = False
        self._has_ended = False
        self._is_released = threading.Event()

    def serve(self) -> None:
        """Run calls until there are no more and the executor has failed or closed.

        Calls end at once when another worker dies. This worker waits for the executor to see that:
        if it ended first, the executor would report it as the cause.
        """
        num_calls = 0
        with contextlib.suppress(CallsEndedError):
            while True:
                call = self._next_call()
                if call is not None:
                    self._run(*call)
                num_calls += 1
                if num_calls == _FREEZE_AFTER:
                    gc.collect()
                    gc.freeze()  # the model lives as long as this process
        self._watchdog.stop()
        self._is_released.wait()

    def _next_call(self) -> tuple[int, bool, memoryview] | None:
        """Return the next call; send the late result first if its tokens are there."""
        while self._late is not None:
            if self._late[1].is_ready():
                self._send_late()
            elif (call := self._receiver.receive(_POLL_S)) is not None:
                return call
        call = self._receiver.receive(_IDLE_S)
        if call is None:
            self._watchdog.stop()
            call = self._receiver.receive()
        return call

    def _run(self, number: int, all_answer: bool, data: memoryview) -> None:
        self._watchdog.start_call()
        self._in_call = True
        if self._has_ended:  # no thread would abort it
            raise CallsEndedError
        if self._late is not None and not self._server.can_overlap(data):
            self._send_late()
        result = self._server.begin(data) if self._overlaps else self._server.run(data)
        self._send_late()  # of the call before, whose answer comes first
        self._in_call = False
        if isinstance(result, LateResult):  # only the rank that samples has one
            self._late = number, result
        elif all_answer or self._samples or has_failed(result):
            send(self._channel, FrameKind.RESULT, result, number)

    def _send_late(self) -> None:
        if self._late is not None:
            (number, result), self._late = self._late, None
            send(self._channel, FrameKind.RESULT, result.read(), number)

    def obey(self) -> None:
        reason: str | None = None
        while (frame := receive(self._channel)) is not None:
            if frame.kind is FrameKind.ABORT:
                reason = frame.data.decode()
                self._worker.abort(reason)
                self._is_released.set()
        self._has_ended = True
        self._is_released.set()
        if self._in_call and reason is None:
            self._worker.abort("the executor was closed")


_FREEZE_AFTER = 4  # calls: the ones of the start, and the first step


class _Watchdog:
    """Writes the stacks of all threads to stderr when a call takes too long."""

    # Setting the timer costs more than a small step, so it is set again only once a tenth of its
    # time has passed.

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._set_at: float | None = None

    def start_call(self) -> None:
        if not self._limit_s:
            return
        now = time.monotonic()
        if self._set_at is None or now - self._set_at > self._limit_s * _SLACK:
            faulthandler.dump_traceback_later(self._limit_s * (1 + _SLACK), file=_STDERR)
            self._set_at = now

    def stop(self) -> None:
        if self._set_at is not None:
            faulthandler.cancel_dump_traceback_later()
            self._set_at = None
