"""Compiles grammars with xgrammar in processes that can be ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hardpoint.plugins import HardpointError

from . import compile_program
from .compile_program import CompilerAnswer, Job, Start, memory_error, read_frame, write_frame

_START_SECONDS = 60.0


class CompileProcess:
    """One process, which starts with the first grammar; used by one thread at a time."""

    def __init__(self, start: Start, seconds: float, program: Path) -> None:
        """Start nothing.

        Args:
            start: what the process is sent first.
            seconds: time limit for compiling a grammar.
            program: what the process runs.
        """
        self._start_message = start
        self._seconds = seconds
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it; a fork of it starts another one
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Id of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def compile(self, job: Job, seconds: float) -> CompilerAnswer:
        """Return the answer to a request.

        Args:
            job: the request.
            seconds: its time limit. A process that has to start first may need up to
                `_START_SECONDS` for that; half of `seconds`, at least, are left for the request.

        Raises:
            ValueError: none came, because of its limits.
            HardpointError: no process can be started.
        """
        if self._owner != os.getpid():
            self._process = None
        called = time.monotonic()
        if self._process is None or self._process.poll() is not None:
            self._start()
        begin = time.monotonic()
        seconds = max(seconds - (begin - called), seconds / 2)
        answer = self._exchange(msgspec.msgpack.encode(job), seconds)
        if answer is not None:
            return answer
        if self._is_closed:
            raise ValueError("the engine is closed")
        if time.monotonic() - begin >= seconds:
            raise ValueError(
                f"compiling it with xgrammar took {self._seconds:g} s, and was not done; "
                f"grammar.compile_seconds is the limit"
            )
        raise ValueError(memory_error(self._start_message.max_bytes))  # or a fault of the library

    def close(self) -> None:
        """End the process, from any thread."""
        self._is_closed = True
        process = self._process
        if process is not None and self._owner == os.getpid():
            process.kill()

    def end(self) -> None:
        """End the process and wait for that, in the thread that uses it."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            with contextlib.suppress(OSError):  # what it did not read is lost
                process.communicate()

    def _start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            HardpointError: it cannot be started.
        """
        if not sys.executable:
            raise HardpointError(
                "sys.executable: expected the path of a Python interpreter to compile grammars "
                "with, got none"
            )
        settings = {"path": sys.path, "seconds": self._seconds}
        command = [sys.executable, "-I", str(self._program), json.dumps(settings)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
            )
        except (OSError, ValueError) as cause:
            raise HardpointError(f"xgrammar: {command[0]} did not start: {cause}") from cause
        self._owner = os.getpid()
        start = msgspec.msgpack.encode(self._start_message)
        answer = None
        try:
            if not self._is_closed:
                answer = self._exchange(start, _START_SECONDS)
        finally:
            if answer is None:  # no thread for the time limit, too: it waits for the start
                self.end()
        if answer is None:
            raise HardpointError(
                f"xgrammar: {command[0]} cannot compile grammars; does 'import xgrammar' work "
                f"there?"
            )

    def _exchange(self, request: bytes, seconds: float) -> CompilerAnswer | None:
        """Send a request and return the answer; None, and the process is ended, if none came."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        answer = b""
        try:
            write_frame(process.stdin, request)
            answer = read_frame(process.stdout)
        except OSError:  # it has ended
            return None
        finally:
            timer.cancel()
            if not answer:  # an interrupt leaves half an answer, too
                self.end()
        return msgspec.msgpack.decode(answer, type=CompilerAnswer) if answer else None


class GrammarCompiler:
    """Several processes, used by any number of threads at once.

    A thread that finds all of them busy waits, within its own time.
    """

    def __init__(
        self,
        start: Start,
        seconds: float,
        processes: int,
        program: Path = Path(compile_program.__file__),
    ) -> None:
        """Start nothing.

        Args:
            start: what each process is sent first.
            seconds: time limit for compiling a grammar.
            processes: maximum number of them.
            program: what they run.
        """
        self._seconds = seconds
        self._processes = [CompileProcess(start, seconds, program) for _ in range(processes)]
        # The one that was used last comes first, so that few start.
        self._idle: queue.LifoQueue[CompileProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)
        self._is_closed = False

    @property
    def pids(self) -> Sequence[int]:
        """Of the processes there are."""
        return [process.pid for process in self._processes if process.pid is not None]

    def compile(self, job: Job) -> CompilerAnswer:
        """Return a compiled grammar, or its error.

        Raises:
            ValueError: it needs too much time or memory.
            HardpointError: no process can be started.
        """
        end = time.monotonic() + self._seconds
        try:
            process = self._idle.get(timeout=self._seconds)
        except queue.Empty:
            raise ValueError(
                f"all {len(self._processes)} processes of xgrammar were busy for "
                f"{self._seconds:g} s (grammar.compile_seconds)"
            ) from None
        try:
            if self._is_closed:
                raise ValueError("the engine is closed")
            return process.compile(job, max(end - time.monotonic(), 0.001))
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for process in self._processes:
            process.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()
