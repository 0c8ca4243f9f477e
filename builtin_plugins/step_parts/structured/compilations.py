"""Compilations of grammars: in threads, few at a time, each with a limit of time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from hardpoint.plugins.structured import StructuredOutputs

if TYPE_CHECKING:
    from hardpoint.plugins.text.grammars import GrammarState

_MAX_RUNNING = 2
"""Compilations at a time."""

_MAX_GIVEN_UP = 4
"""Compilations that took too long and still run; with more, no other begins."""

_STACK_BYTES = 64 << 20
_STACK_BYTES_PER_BYTE = 1024
"""Stack of a compilation per byte of its source: compilers recurse into it, and end the
process if the stack overflows. Unused stack costs no memory."""


def stack_of(structured: StructuredOutputs) -> int:
    """Return the bytes of stack of a compilation."""
    size = len(msgspec.msgpack.encode(structured)) * _STACK_BYTES_PER_BYTE
    return _STACK_BYTES + -(-size // 4096) * 4096


class _Job:
    """One compilation.

    Attributes:
        waiting: ids of the requests that wait for it.
        started: when it began; None while others run.
        state: its result.
        error: exception of the compilation.
        done: whether it has ended.
    """

    def __init__(self, compile_: Callable[[], GrammarState], stack_bytes: int) -> None:
        self.compile, self.stack_bytes = compile_, stack_bytes
        self.waiting: set[str] = set()
        self.started: float | None = None
        self.state: GrammarState | None = None
        self.error: BaseException | None = None
        self.done = False


class Compilations:
    """Runs compilations in threads, each with a limit of time.

    A thread cannot be ended: a slow one is given up; it runs on, and its result is
    ignored.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._given_up: list[_Job] = []
        self._changed = threading.Condition()

    def result(
        self, key: str, request_id: str, compile_: Callable[[], GrammarState], stack_bytes: int
    ) -> GrammarState | None:
        """Return the result of a compilation, None while it is under way; begin it if it is new.

        Args:
            stack_bytes: stack size of its thread.

        Raises:
            ValueError: it failed, or took too long.
            PluginFaultError: the backend failed.
        """
        with self._changed:
            job = self._jobs.get(key)
            if job is None:
                self._give_up_late()
                if len(self._given_up) >= _MAX_GIVEN_UP:
                    raise ValueError(
                        f"no grammar is compiled, for {len(self._given_up)} compilations that "
                        f"took longer than {self._seconds:g} s still run"
                    )
                job = self._jobs[key] = _Job(compile_, stack_bytes)
                self._start_next()
            job.waiting.add(request_id)
            if job.error is not None:
                raise job.error
            return job.state

    def give_up_late(self) -> None:
        """Give up late compilations, and begin waiting ones; called once per step."""
        with self._changed:
            self._give_up_late()
            self._start_next()

    def leave(self, key: str, request_id: str) -> None:
        """Forget that a request waits; a compilation without waiting requests does not begin."""
        with self._changed:
            if (job := self._jobs.get(key)) is not None:
                job.waiting.discard(request_id)
                self._drop_if_unused(key, job)
            self._give_up_late()
            self._start_next()

    def wait(self, seconds: float) -> None:
        """Wait until a compilation is done, at most so long."""
        with self._changed:
            if any(not job.done for job in self._jobs.values()):
                self._changed.wait(seconds)

    def close(self) -> None:
        """Begin no further compilation."""
        with self._changed:
            self._jobs.clear()

    def _drop_if_unused(self, key: str, job: _Job) -> None:
        if not job.waiting and (job.done or job.started is None):
            del self._jobs[key]

    def _give_up_late(self) -> None:
        self._given_up = [job for job in self._given_up if not job.done]
        latest = self._clock() - self._seconds
        for key, job in list(self._jobs.items()):
            if job.started is None or job.done or job.error or job.started > latest:
                continue
            job.error = ValueError(
                f"compiling it took longer than {self._seconds:g} s (grammar.compile_seconds)"
            )
            self._given_up.append(job)
            if not job.waiting:
                del self._jobs[key]

    def _start_next(self) -> None:
        """Start the jobs that are first in the queue, as far as threads are free."""
        running = sum(
            job.started is not None and not job.done and job.error is None
            for job in self._jobs.values()
        )
        for key, job in self._jobs.items():
            if running >= _MAX_RUNNING:
                return
            if job.started is None:
                job.started = self._clock()
                running += 1
                name = "hardpoint-grammar"
                thread = threading.Thread(target=self._run, args=(key, job), name=name, daemon=True)
                before = threading.stack_size(job.stack_bytes)
                try:
                    thread.start()
                except RuntimeError as cause:  # no thread is left
                    job.error, job.done = ValueError(f"it cannot be compiled now: {cause}"), True
                finally:
                    threading.stack_size(before)

    def _run(self, key: str, job: _Job) -> None:
        state = error = None
        try:
            state = job.compile()
        except BaseException as raised:
            error = raised
        with self._changed:
            if job.error is None:  # it was not given up
                job.state, job.error = state, error
            job.done = True
            if self._jobs.get(key) is job:
                self._drop_if_unused(key, job)
            self._start_next()
            self._changed.notify_all()
