"""The activity of an engine, in memory that another process can read after the engine has died.

It holds the requests that the step computes, and the plugin method that runs.
"""

from __future__ import annotations

import copy
import functools
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from hardpoint.host.registry.discovery import is_third_party
from hardpoint.host.system.plugin_settings import READ, changed
from hardpoint.plugins.component import Source

P = ParamSpec("P")
R = TypeVar("R")

FILE_NAME = "activity"
"""Of the shared file, in the folder of the sockets."""

_HEADER_BYTES = 64
_CALLS_BYTES = 1 << 16
_REQUESTS_BYTES = 1 << 18
_SIZE = _HEADER_BYTES + _CALLS_BYTES + _REQUESTS_BYTES
_REQUESTS_AT = _HEADER_BYTES + _CALLS_BYTES

# The header: numbers of 16 bits, then of 32, then floating-point numbers of 64.
_CALL, _STEP = 0, 1
_NUM_CALLS_BYTES, _NUM_REQUESTS_BYTES = 1, 2  # the first has the two cells
_WORKER_CELLS = slice(12, 16)  # bytes
_STEP_BEGAN, _WATCHDOG_S, _BEATS, _TURNS = 2, 3, 4, 5
_TOO_MANY = 2**32 - 1


class PluginCall(msgspec.Struct, frozen=True, array_like=True):
    """A method of a plugin.

    Attributes:
        kind: kind of the plugin.
        name: under which it is enabled.
        plugin: its description for messages, such as `plugin 'x' (acme 1.0, acme:X)`.
        method: name of the method.
    """

    kind: str
    name: str
    plugin: str
    method: str

    def __str__(self) -> str:
        return f"{self.method}() of {self.plugin}"


class Snapshot(msgspec.Struct, frozen=True):
    """The activity of an engine at one moment.

    Attributes:
        call: the method of a plugin that ran, the innermost of several; if both threads were in
            one, that of the engine's, which is seldom in any.
        in_step: ids of the requests of a step that had begun and not ended, empty if there was
            none; None if they were too many to be recorded.
        step_seconds: since the step began; 0 without a watchdog that ends the engine.
        watchdog_seconds: after which the watchdog ends the engine; 0 if it does not.
    """

    call: PluginCall | None = None
    in_step: frozenset[str] | None = frozenset()
    step_seconds: float = 0.0
    watchdog_seconds: float = 0.0

    @property
    def during(self) -> str:
        """Return the method that ran as the rest of a message, or nothing."""
        return f", in {self.call}" if self.call is not None else ""


class Activity:
    """The activity of one engine. The engine's main thread writes it, any process may read it.

    A worker that runs in another thread of the engine's process gets `of_worker_thread`.

    Attributes:
        cells: `cells[0]` is the number of the method that runs, 0 for none of a plugin. Where a
            call costs too much, the caller sets it to a number from `number`, and resets it.
        compares_settings: whether torch's settings are compared after each call of a plugin. In
            engines and workers, only with `debug.watch_plugins`: they restore them once per step.
    """

    def __init__(
        self, memory: mmap.mmap | bytearray | None = None, *, compares_settings: bool = True
    ) -> None:
        self.compares_settings = compares_settings
        self._use(bytearray(_SIZE) if memory is None else memory)
        self._calls: list[PluginCall] = []
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()
        self._request_ids: list[str] = []
        self._beats = self._turns = 0

    @classmethod
    def create(cls, folder: Path) -> Activity:
        """Return an idle one in a new file of a folder, for `open` in another process."""
        (folder / FILE_NAME).write_bytes(bytes(_SIZE))
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Activity:
        """Return the one in a folder."""
        with (folder / FILE_NAME).open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _SIZE))

    @classmethod
    def create_unnamed(cls) -> tuple[Activity, int]:
        """Return an idle one in a file without a name, and a descriptor for `open_unnamed`."""
        make = getattr(os, "memfd_create", None)
        if make is None:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        else:
            descriptor = make("hardpoint-activity")
        os.truncate(descriptor, _SIZE)
        return cls(mmap.mmap(descriptor, _SIZE)), descriptor

    @classmethod
    def open_unnamed(cls, descriptor: int) -> Activity:
        """Return the one of a descriptor, in another process; closes it."""
        memory = mmap.mmap(descriptor, _SIZE)
        os.close(descriptor)
        return cls(memory)

    def of_worker_thread(self) -> Activity:
        """Return one of the same memory, with cells of its own, for the thread of a worker."""
        other = copy.copy(self)
        other.cells = self._worker_cells
        return other

    def close(self) -> None:
        """Release the file; the last record stays readable. For readers."""
        self._use(bytearray(self._memory))

    def _use(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        view = memoryview(memory)
        self.cells, self._worker_cells = view[:4].cast("H"), view[_WORKER_CELLS].cast("H")
        self._lengths = view[:16].cast("I")
        self._times = view[:_HEADER_BYTES].cast("d")

    def number(self, kind: str, source: Source, method: str) -> int:
        """Return the number of a plugin's method; 0 if there are too many."""
        key = (kind, source.name, method)
        if (known := self._numbers.get(key)) is not None:
            return known
        call = PluginCall(kind, source.name, str(source), method)
        with self._lock:
            data = msgspec.json.encode([*self._calls, call])
            if len(data) > _CALLS_BYTES:
                return 0
            self._calls.append(call)
            self._memory[_HEADER_BYTES : _HEADER_BYTES + len(data)] = data
            self._lengths[_NUM_CALLS_BYTES] = len(data)
            self._numbers[key] = len(self._calls)
            return len(self._calls)

    def begin_step(self, request_ids: Sequence[str]) -> None:
        """Record the requests of a step."""
        if request_ids != self._request_ids:
            self.cells[_STEP] = 0
            self._request_ids = list(request_ids)
            data = msgspec.json.encode(self._request_ids)
            fits = len(data) <= _REQUESTS_BYTES
            if fits:
                self._memory[_REQUESTS_AT : _REQUESTS_AT + len(data)] = data
            self._lengths[_NUM_REQUESTS_BYTES] = len(data) if fits else _TOO_MANY
        self.cells[_STEP] = 1

    def end_step(self) -> None:
        """Record that no step is under way."""
        self.cells[_STEP] = 0

    def begin_call(self) -> None:
        """Record that a call of a worker is under way, which `end_step` ends."""
        self.cells[_STEP] = 1

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way, or a call of a worker."""
        return bool(self.cells[_STEP])

    def begin_watch(self, now: float, limit_s: float) -> None:
        """Record that the watchdog ends the engine if a step that begins now takes longer."""
        self._times[_STEP_BEGAN], self._times[_WATCHDOG_S] = now, limit_s

    def beat(self) -> None:
        """Record that the process runs. In a thread of its own, whatever the others do."""
        self._beats += 1
        self._times[_BEATS] = self._beats

    def turn(self) -> None:
        """Record that the engine's loop begins or ends a step."""
        self._turns += 1
        self._times[_TURNS] = self._turns

    def progress(self) -> tuple[float, float]:
        """Return the numbers of calls of `beat` and `turn`; the second is odd within a step."""
        return self._times[_BEATS], self._times[_TURNS]

    def snapshot(self) -> Snapshot:
        """Return the engine's activity now, or when it died."""
        began = self._times[_STEP_BEGAN]
        return Snapshot(
            self._call(),
            self._in_step() if self.cells[_STEP] else frozenset(),
            time.monotonic() - began if began else 0.0,
            self._times[_WATCHDOG_S],
        )

    def _call(self) -> PluginCall | None:
        number = self.cells[_CALL] or self._worker_cells[_CALL]
        if not number:
            return None
        try:
            data = self._read(_HEADER_BYTES, self._lengths[_NUM_CALLS_BYTES])
            return msgspec.json.decode(data, type=list[PluginCall])[number - 1]
        except (ValueError, IndexError):  # it died while it wrote them
            return None

    def _in_step(self) -> frozenset[str] | None:
        length = self._lengths[_NUM_REQUESTS_BYTES]
        if length == _TOO_MANY:
            return None
        try:
            return frozenset(msgspec.json.decode(self._read(_REQUESTS_AT, length), type=list[str]))
        except ValueError:
            return None

    def _read(self, start: int, length: int) -> bytes:
        return bytes(self._memory[start : start + length])


class PluginCalls:
    """Calls the methods of one plugin: records which one runs, and adds up the time.

    Where a call by `run` costs too much, the caller writes `cells` and `seconds` itself.

    Attributes:
        source: names the plugin in messages.
        kind: kind of the plugin.
        cells: the activity's.
        seconds: spent in the plugin's methods since it was last set to 0.
        settings: its item reads torch's settings, which a call must not change; None if they are
            not compared after each call.
    """

    def __init__(self, activity: Activity, kind: str, source: Source) -> None:
        self.source = source
        self.kind = kind
        self.cells = activity.cells
        self.seconds = 0.0
        # Plugins that come with Hardpoint change no settings: they need not pay for the check; but
        # a model calls others. An executor opens workers, which set the number of threads.
        is_read = kind == "models" or (is_third_party(source) and kind != "executors")
        self.settings: list[Callable[[], Any]] | None = None
        if is_read and activity.compares_settings:
            self.settings = READ
        self._activity = activity
        self._numbers: dict[str, int] = {}

    def number(self, method: str) -> int:
        """Return the number that is in `cells[0]` while a method runs."""
        number = self._numbers.get(method)
        if number is None:
            number = self._activity.number(self.kind, self.source, method)
            self._numbers[method] = number
        return number

    def run(self, method: str, function: Callable[P, R], *arguments: P.args, **more: P.kwargs) -> R:
        """Call a method of the plugin; return its result."""
        number, cells = self._numbers.get(method) or self.number(method), self.cells
        outer, cells[0] = cells[0], number
        reads = self.settings
        settings = None if reads is None else reads[0]()
        began = time.perf_counter()
        try:
            return function(*arguments, **more)
        finally:
            if reads is not None and reads[0]() != settings:
                changed(settings, self.source, method)
            self.seconds += time.perf_counter() - began
            cells[0] = outer

    def bound(self, method: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that calls a method of the plugin, as `run` does."""
        return functools.partial(self.run, method, function)
