"""The worker half of adapters: keeps them in CPU memory and in slots, and changes products."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import torch

from hardpoint.plugins import EngineConfig, ModelError, Ops, SchedulerOutput
from hardpoint.plugins.step_part import LinearProducts, WorkerCalls, WorkerMemory, WorkerStep
from hardpoint.plugins.worker_half import WorkerHalfContext

from .files import HostAdapter, load_adapter
from .messages import AdapterSlot, Ask, Call, Drop, Keep, Progress, Read, StepAdapters

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.worker import LoadedModel
    from hardpoint.plugins.step_part.worker_data import StepRows


_NONE = -1


class _ReaderThread(threading.Thread):
    """Reads an adapter while steps run."""

    def __init__(self, read: Callable[[], HostAdapter]) -> None:
        super().__init__(name="hardpoint-adapter", daemon=True)
        self.adapter: HostAdapter | None = None
        self.error = ""
        self.has_ended = False
        self._read = read
        self.start()

    def run(self) -> None:
        try:
            self.adapter = self._read()
        except ModelError as error:
            self.error = str(error)
        except Exception as error:  # of a library, or memory
            self.error = f"cannot be read: {type(error).__name__}: {error}"
        finally:
            self.has_ended = True


class AdapterProducts(WorkerStep, LinearProducts, WorkerMemory, WorkerCalls):
    """Adds the products of adapters to the products of linear layers."""

    def __init__(
        self, engine: EngineConfig, context: WorkerHalfContext, loaded: LoadedModel
    ) -> None:
        config = engine.adapters
        self._loaded = loaded
        self._config, self._device = config, context.device
        self._dtype = self._loaded.ops.context.dtype
        self._host: dict[str, HostAdapter] = {}
        self._readings: dict[int, _ReaderThread] = {}
        self._slots = _Slots(config.max_loras, config.max_lora_rank, self._loaded, self._device)
        self._step = StepAdapters([], {}, {})
        self._rows: tuple[StepRows, _Rows] | None = None
        self._failures: dict[str, str] = {}

    def _read(self, path: str) -> HostAdapter:
        config = self._config
        return load_adapter(path, config.max_lora_rank, self._loaded.matrices, self._dtype)

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of the slots."""
        return {"slots of adapters": self._slots.num_bytes}

    def call(self, message: bytes) -> bytes:
        """Begin a reading, report its progress, or keep or forget its result."""
        call = msgspec.msgpack.decode(message, type=Call)
        match call:
            case Read(ticket, path):
                self._readings[ticket] = _ReaderThread(functools.partial(self._read, path))
            case Ask(ticket):
                return msgspec.msgpack.encode(self._progress(ticket))
            case Keep(ticket, forgotten):
                adapter = self._readings.pop(ticket).adapter
                self._forget(forgotten)
                if adapter is not None:
                    self._host[adapter.content] = adapter
            case Drop(ticket, forgotten):
                self._readings.pop(ticket, None)
                self._forget(forgotten)
        return b""

    def _forget(self, contents: Sequence[str]) -> None:
        for content in contents:
            self._host.pop(content, None)

    def _progress(self, ticket: int) -> Progress:
        reading = self._readings.get(ticket)
        if reading is None:  # the half was built again, after a sleep
            return Progress(is_lost=True)
        if not reading.has_ended:
            return Progress()
        if reading.adapter is None:
            return Progress(is_done=True, error=reading.error)
        adapter = reading.adapter
        return Progress(is_done=True, content=adapter.content, unknown=adapter.unknown)

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        """Fill the slots of a step, where they hold something else.

        The engine's half has checked that each rank has them.
        """
        self._step = msgspec.msgpack.decode(data, type=StepAdapters)
        self._rows, self._failures = None, {}
        for slot in self._step.slots:
            if self._slots.contents[slot.index] != slot.content:
                self._fill(slot)
        self._slots.use([slot.index for slot in self._step.slots])

    def _fill(self, slot: AdapterSlot) -> None:
        """Fill a slot; if its adapter cannot be copied, only the requests that have it fail."""
        try:
            self._slots.fill(slot.index, self._host[slot.content])
        except torch.OutOfMemoryError:  # of this rank alone
            raise
        except RuntimeError as error:
            self._failures[slot.content] = f"{type(error).__name__}: {error}"
            for name in [name for name, used in self._step.requests.items() if used == slot.index]:
                del self._step.requests[name]

    def report(self) -> bytes | None:
        """Return the adapters of the step that failed, with the reasons."""
        return msgspec.msgpack.encode(self._failures) if self._failures else None

    def linear(
        self, parts: Sequence[tuple[str, int]], x: torch.Tensor, y: torch.Tensor, rows: StepRows
    ) -> torch.Tensor | None:
        """Return a product with the adapters' products added to its rows."""
        if self._rows is None or self._rows[0] is not rows:
            self._rows = rows, _Rows(self._step, rows, self._device)
        start, adapters = 0, self._rows[1]
        changed = None
        for name, count in parts:
            if (slots := self._slots.of(name)) is not None:
                changed = y if changed is None else changed
                a, b, scales = slots
                product = y[:, start : start + count]
                adapters.add(self._loaded.ops, product, x, a, b, scales)
            start += count
        return changed

    def sleep(self, level: int) -> None:  # noqa: ARG002
        """Release the slots; they are filled again when steps need them."""
        self._slots.release()

    def wake_up(self) -> None:
        """Allocate the slots again."""
        self._slots.allocate()


class _Rows:
    """The slots of a step's rows, on the device.

    Rows of a scale other than 1.0 are computed apart, so that the others keep their bits.
    """

    def __init__(self, step: StepAdapters, rows: StepRows, device: torch.device) -> None:
        """List them; a request of scale 0.0 has none."""
        slots: list[int] = []
        scaled: list[int] = []
        places: list[int] = []
        factors: list[float] = []
        for name, (start, end) in zip(rows.request_ids, pairwise(rows.starts), strict=True):
            slot, scale = step.requests.get(name, _NONE), step.scales.get(name, 1.0)
            count = end - start
            slots += [slot if scale == 1.0 else _NONE] * count
            if scale not in (0.0, 1.0):
                scaled += [slot] * count
                places += range(start, end)
                factors += [scale] * count
        self._plain = torch.tensor(slots, dtype=torch.int64).to(device)
        self._places = torch.tensor(places, dtype=torch.int64).to(device) if scaled else None
        self._scaled = torch.tensor(scaled, dtype=torch.int64).to(device)
        self._factors = torch.tensor(factors, dtype=torch.float32).unsqueeze(1).to(device)

    def add(
        self,
        ops: Ops,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Add the adapters' products to a product; arguments as in `Ops.add_lora`."""
        ops.add_lora(y, x, a, b, self._plain, scales)
        if self._places is None:
            return
        change = torch.zeros((len(self._places), y.shape[1]), dtype=torch.float32, device=y.device)
        ops.add_lora(change, x[self._places], a, b, self._scaled, scales)
        y[self._places] = (y[self._places] + self._factors * change).to(y.dtype)


class _Slots:
    """The slots of a rank: for each matrix, the A and B of some adapters on its device.

    Attributes:
        contents: hash of the adapter in each slot; None is an empty one.
        num_bytes: bytes of all slots.
    """

    def __init__(
        self, count: int, max_rank: int, loaded: LoadedModel, device: torch.device
    ) -> None:
        """Describe them; the first use allocates them."""
        self._count, self._max_rank, self._device = count, max_rank, device
        self._dtype = loaded.ops.context.dtype
        self._matrices = loaded.matrices
        self._tensors: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._ranks: list[dict[str, int]] = [{} for _ in range(count)]
        self._views: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None] = {}
        self._used: list[int] = []
        self.contents: list[str | None] = [None] * count
        size = sum(len(m.rows) + len(m.columns) for m in self._matrices.values()) * max_rank
        per_slot = size * self._dtype.itemsize + 4 * len(self._matrices)
        self.num_bytes = count * per_slot

    def allocate(self) -> None:
        count, rank = self._count, self._max_rank
        self._tensors = {
            name: (
                torch.zeros((count, rank, len(matrix.columns)), dtype=self._dtype).to(self._device),
                torch.zeros((count, len(matrix.rows), rank), dtype=self._dtype).to(self._device),
                torch.zeros(count, dtype=torch.float32).to(self._device),
            )
            for name, matrix in self._matrices.items()
        }

    def release(self) -> None:
        self._tensors, self._views = {}, {}
        self._ranks = [{} for _ in range(self._count)]
        self.contents = [None] * self._count

    def fill(self, index: int, adapter: HostAdapter) -> None:
        if not self._tensors:
            self.allocate()
        self.contents[index] = None  # until it is complete
        self._views = {}
        ranks = {name: len(change.a) for name, change in adapter.changes.items()}
        self._ranks[index] |= ranks  # if it fails half-way, the next one clears all of it
        for name in self._ranks[index]:
            a, b, scales = self._tensors[name]
            a[index], b[index], scales[index] = 0, 0, 0
            if (change := adapter.changes.get(name)) is not None:
                rank = len(change.a)
                a[index, :rank], b[index, :, :rank] = change.a, change.b
                scales[index] = change.scale
        self._ranks[index] = ranks
        self.contents[index] = adapter.content

    def use(self, indices: Sequence[int]) -> None:
        if self._used != (used := sorted(indices)):
            self._used, self._views = used, {}

    def of(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return A, B and scales of a matrix, cut to the largest rank of the slots in use.

        None if no adapter in use changes the matrix.
        """
        if name not in self._views:
            rank = max((self._ranks[index].get(name, 0) for index in self._used), default=0)
            if rank:
                a, b, scales = self._tensors[name]
                self._views[name] = a[:, :rank], b[:, :, :rank], scales
            else:
                self._views[name] = None
        return self._views[name]
