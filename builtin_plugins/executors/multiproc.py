"""The executor that runs a process per worker on this host."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from hardpoint.plugins import (
    Executor,
    ExecutorContext,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)
from hardpoint.plugins.executor import WorkerLaunch, WorkerProcess, first_error_or, open_worker
from hardpoint.plugins.worker_calls import WorkerServer, decode_result, encode_call

_LENGTH = struct.Struct("!Q")
_RUN = "hardpoint.builtin_plugins.executors.multiproc:run_worker"


class MultiprocExecutor(Executor):
    """Runs each rank in a process of its own, and sends all of them each call."""

    contract = 1

    def __init__(self, context: ExecutorContext) -> None:
        """Start nothing yet."""
        super().__init__(context)
        self._workers: list[WorkerProcess] = []
        self._pending: list[deque[tuple[str, Future[Any]]]] = []
        self._lock = threading.Lock()
        self._callback: Callable[[BaseException], None] | None = None
        self._failed: BaseException | None = None
        self._closing = False
        self._watcher: threading.Thread | None = None

    @property
    def max_concurrent_batches(self) -> int:
        """One per stage."""
        return self.context.parallel.pipeline

    def start(self) -> list[WorkerInfo]:
        """Start the processes and load the model."""
        for rank in range(self.context.parallel.world_size):
            launch = self.context.launch(rank)
            self._workers.append(self.context.start_process(launch, _RUN))
            self._pending.append(deque())
        self._watcher = threading.Thread(target=self._watch, name="MultiprocResults", daemon=True)
        self._watcher.start()
        return self.collective_rpc("load_model")

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache in every worker."""
        self.collective_rpc("initialize_cache", (num_blocks,))

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Run the model in every worker."""
        return first_error_or(self._call("execute_model", (plan,)), self._output_rank)

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Sample in the output rank."""
        return first_error_or(self._call("sample_tokens", (plan, bitmask)), self._output_rank)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Call a method of every worker."""
        return [future.result(timeout) for future in self._call(method, args)]

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Register the callback for the end of a worker."""
        self._callback = callback

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        for worker in self._workers:
            worker.channel.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None:
            self._watcher.join()
        for worker in self._workers:
            worker.close()
        self._workers = []

    @property
    def _output_rank(self) -> int:
        return self.context.parallel.output_rank

    def _call(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        data = encode_call(method, args)
        futures: list[Future[Any]] = []
        with self._lock:
            for worker, pending in zip(self._workers, self._pending, strict=True):
                future: Future[Any] = Future()
                futures.append(future)
                if self._failed is not None:
                    future.set_exception(self._failed)
                    continue
                pending.append((method, future))
                worker.channel.sendall(_LENGTH.pack(len(data)) + data)
        return futures

    def _watch(self) -> None:
        poller = select.poll()
        for worker in self._workers:
            poller.register(worker.channel, select.POLLIN)
        ranks = {worker.channel.fileno(): rank for rank, worker in enumerate(self._workers)}
        while True:
            for descriptor, _ in poller.poll():
                rank = ranks[descriptor]
                worker = self._workers[rank]
                try:
                    data = receive(worker.channel)
                except OSError:
                    data = None
                if data is None:
                    if not self._closing:
                        self._fail(worker.failure() or RuntimeError(f"rank {rank} ended"))
                    return
                method, future = self._pending[rank].popleft()
                try:
                    future.set_result(decode_result(method, data, f"rank {rank}"))
                except Exception as error:
                    future.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failed = error
            waiting = [item for pending in self._pending for item in pending]
        for _, future in waiting:
            future.set_exception(error)
        if self._callback is not None:
            self._callback(error)


def receive(channel: socket.socket) -> bytes | None:
    """Return the next message, None if there is no further one."""
    header = channel.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    return channel.recv(length, socket.MSG_WAITALL) if length else b""


def run_worker(launch: WorkerLaunch, channel: socket.socket, _descriptors: list[int]) -> None:
    """Serve the calls of an executor, in a process of its own."""
    worker = open_worker(launch)
    server = WorkerServer(worker)
    while (data := receive(channel)) is not None:
        result = server.run(data)
        channel.sendall(_LENGTH.pack(len(result)) + result)
    os._exit(0)
