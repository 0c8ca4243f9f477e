"""The Ray actor that holds a worker."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading

from hardpoint.plugins.executor import WorkerLaunch, open_worker
from hardpoint.toolkit.workers.calls import WorkerServer, encode_call, encode_failure

CONCURRENCY_GROUPS = {"watch": 1, "control": 2}
"""Threads of an actor for `wait`, and for calls during a step; one more runs the steps."""


class RayWorker:
    """A worker and its server, in an actor."""

    def __init__(self) -> None:
        # Ray repeats an actor's stdout on the program's own, where answers may be.
        sys.stdout = sys.stderr
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
        self._server: WorkerServer | None = None
        self._progress = ("", 0, 0)

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def make_folder(self) -> str:
        """Make a private folder in which ranks of one host find each other."""
        return tempfile.mkdtemp(prefix="hardpoint-ranks-")

    def remove_folder(self, folder: str) -> None:
        """Remove it."""
        shutil.rmtree(folder, ignore_errors=True)

    def free_port(self, address: str) -> int:
        """Return a port of an IP address of this node on which nothing listens."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            return int(listener.getsockname()[1])

    def open(self, launch: bytes) -> bytes:
        """Open the worker of an encoded launch; return nothing, or its error encoded."""
        try:
            self._server = WorkerServer(open_worker(WorkerLaunch.decode(launch), self._on_progress))
        except Exception as error:
            return encode_failure(error)
        return b""

    def run(self, call: bytes) -> bytes:
        """Run a call of the worker."""
        assert self._server is not None, "called after open"
        return self._server.run(call)

    def abort(self, reason: str) -> None:
        """Let a call that waits for other ranks fail, in the group "control"."""
        if self._server is not None:
            self._server.run(encode_call("abort", (reason,)))

    def progress(self) -> tuple[str, int, int]:
        """Return how far the loading is, in the group "control"."""
        return self._progress

    def wait(self) -> None:
        """Wait until the actor ends, in the group "watch"; then the call fails in the engine."""
        threading.Event().wait()

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        self._progress = (stage, done, total)
