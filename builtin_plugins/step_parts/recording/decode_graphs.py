"""Steps of one token per sequence that are recorded in few sizes, as CUDA graphs."""

from __future__ import annotations

import bisect
import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hardpoint.errors import size_text
from hardpoint.plugins import ForwardBatch
from hardpoint.plugins.step_part import CacheObserver, ForwardWrapper, WorkerMemory
from hardpoint.plugins.worker_half import (
    WorkerHalfContext,
)

from .decode_inputs import DecodeInputs, DecodeShape

if TYPE_CHECKING:
    from hardpoint.plugins.model.forward import Forward, ForwardStep, PackedInputs
    from hardpoint.plugins.model.ops import Recorded
    from hardpoint.plugins.step_part.worker import LoadedModel
    from hardpoint.plugins.step_part.worker_data import AllocatedCache


_log = logging.getLogger("hardpoint")

_EAGER_STEPS = 4  # that need a size before it is recorded in a step
_CHECKED_GRAPHS = 4  # graphs with first steps that are compared with the model
# Of a row's length: libraries choose other kernels for other numbers of rows, and in a capture. The
# rows of another history differ by about as much as they are long.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.1
_GRAPH_BYTES = 8 << 20  # of one graph: memory of the driver for its kernels
_LIBRARY_BYTES = 64 << 20  # workspaces of CUDA's libraries on the stream that records
_POOL_SHARE = 2  # of the memory that a step needs at once: a pool of memory has gaps


@dataclass(eq=False)
class _Graph:
    """A recorded step.

    Attributes:
        recorded: repeats it.
        batch: its inputs.
        is_checked: whether it was compared with the model.
    """

    recorded: Recorded
    batch: ForwardBatch
    is_checked: bool = False


class DecodeGraphs(ForwardWrapper, CacheObserver, WorkerMemory):
    """Repeats decode steps without running Python, padded to the next size (`Ops.record_sizes`).

    Nothing is recorded until a request has ended, so that the first answer waits for no recording.
    Then each call of `idle` records the largest size that is missing, so that smaller ones
    find memory in the pool; and a step records its own size, if others before needed it as well.
    """

    packs = True

    def __init__(
        self,
        context: WorkerHalfContext,
        loaded: LoadedModel,
        sizes: Sequence[int],
        block_size: int,
    ) -> None:
        """Record nothing yet.

        Args:
            loaded: the model, with recordable operations.
            sizes: numbers of sequences, ascending.
            block_size: tokens per block.
        """
        self._names = f"{loaded.model.source}, {loaded.ops_source}, {loaded.attention_source}"
        self._model, self._ops = loaded.model, loaded.ops
        self._sizes = tuple(sizes)
        self._device: torch.device = context.device
        self._describe = context.describe_fault
        shape = DecodeShape(sizes[-1], loaded.max_model_len, block_size, loaded.num_groups)
        self._memory = functools.partial(_reserve, shape, len(sizes), loaded, self._device)
        self._reserve = 0
        self._checks = _CHECKED_GRAPHS
        self._has_failed = False
        self._has_answered = False
        self.cache_released()

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that inputs and recorded steps may take."""
        self._reserve = self._memory()
        return {"decode graphs": self._reserve}

    def cache_released(self) -> None:
        """Forget recordings, inputs and caches before the caches are released."""
        self._cache: AllocatedCache | None = None
        self._inputs: DecodeInputs | None = None
        self._graphs: dict[int, _Graph] = {}
        self._seen: Counter[int] = Counter()  # eager steps by size
        self._num_bytes, self._is_full = 0, False

    def cache_allocated(self, cache: AllocatedCache) -> None:
        """Allow recording, now that the caches exist."""
        self.cache_released()
        self._cache = cache

    def weights_changed(self) -> None:
        """Forget recordings, because they refer to earlier weights."""
        cache = self._cache
        self.cache_released()
        self._cache = cache

    def finished(self, request_ids: Collection[str]) -> None:  # noqa: ARG002
        """Allow recording, now that a request has got its answer."""
        self._has_answered = True

    @property
    def _can_record(self) -> bool:
        may = self._has_answered and self._cache is not None
        return may and not (self._has_failed or self._is_full)

    def around_model(self, forward: Forward) -> Forward:
        """Return a function that repeats a step if it is recorded, and calls `forward` if not."""
        return functools.partial(self._forward, forward)

    def _forward(self, forward: Forward, step: ForwardStep) -> torch.Tensor:
        packed = None if step.needs_model else step.packed
        graph = None if packed is None else self._graph_of(packed)
        if packed is None or graph is None:
            return forward(step)
        assert self._inputs is not None
        self._inputs.fill(packed)
        hidden = graph.recorded()[: len(packed.lens)]
        if graph.is_checked or not self._checks:
            return hidden
        return self._checked(graph, hidden, functools.partial(forward, step))

    def _graph_of(self, step: PackedInputs) -> _Graph | None:
        count = len(step.lens)
        if len(step.token_ids) > count or count > self._sizes[-1]:
            return None
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        if (graph := self._graphs.get(size)) is not None:
            return graph
        if not self._can_record:
            return None
        self._seen[size] += 1
        return None if self._seen[size] <= _EAGER_STEPS else self._record(size)

    def idle(self) -> bool | None:
        """Record the largest size that is missing."""
        if self._can_record and (missing := self._missing()):
            self._record(missing[-1])
        if self._has_failed or self._is_full or not self._missing():
            return None
        return self._can_record

    def _missing(self) -> list[int]:
        return [size for size in self._sizes if size not in self._graphs]

    def _record(self, size: int) -> _Graph | None:
        """Record a size, of padding alone; return None if that is not possible."""
        cache = self._cache
        assert cache is not None
        shape = DecodeShape(
            self._sizes[-1], cache.max_model_len, cache.block_size, cache.num_groups
        )
        if self._inputs is None:
            self._num_bytes += shape.num_bytes
        if self._num_bytes >= self._reserve:
            self._is_full = True
            _log.info(
                "decode graphs: the memory reserved for them, %s, is used; sizes %s are recorded",
                size_text(self._reserve),
                sorted(self._graphs) or "none",
            )
            return None
        try:
            inputs = self._inputs = self._inputs or DecodeInputs(shape, self._device)
            inputs.clear()
            token_ids, positions = inputs.tokens(size)
            batch = ForwardBatch(token_ids, positions, cache.attend(inputs.attention(size)))
            model = self._model  # a recording that kept this object would never be released
            recorded = self._ops.record(lambda: model.forward(batch))
        except Exception as error:  # without recorded steps, all goes on
            self._has_failed = True
            _log.warning(
                "decode steps of %d sequences cannot be recorded, nor will others be: %s; with "
                "executor.enforce_eager = true, a restarted engine does not try",
                size,
                self._describe(error),
            )
            return None
        if recorded is None:
            self._has_failed = True
            _log.warning(
                "decode steps of %d sequences cannot be recorded, nor will others be: "
                "the operations' record() gave None",
                size,
            )
            return None
        self._num_bytes += recorded.num_bytes
        graph = self._graphs[size] = _Graph(recorded, batch)
        if len(self._graphs) == len(self._sizes):
            _log.info(
                "decode graphs: recorded for up to %d sequences, in %d sizes, %s",
                self._sizes[-1],
                len(self._sizes),
                size_text(self._num_bytes),
            )
        return graph

    def _checked(
        self, graph: _Graph, hidden: torch.Tensor, run_eagerly: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        # Should a plugin have promised too much, no request gets wrong tokens: the step
        # is planned again, without padding, because the recorded plan may be wrong.
        self._checks -= 1
        graph.is_checked = True
        expected = run_eagerly()
        difference = float(relative_difference(hidden, expected))
        tolerance = _TOLERANCE.get(hidden.dtype, _TOLERANCE_16_BIT)
        if not difference <= tolerance:  # nor is NaN
            self._has_failed = True
            self._graphs.clear()
            _log.warning(
                "decode steps are not recorded: a recorded step gave other hidden states than "
                "forward(): they differ by %.2g of their length, expected at most %g, "
                "though the classes of model, operations and attention are marked "
                "replayable: %s",
                difference,
                tolerance,
                self._names,
            )
        return expected


def relative_difference(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest Euclidean distance of two rows [rows, size], relative to their length.

    NaN equals NaN, as of a request with weights or tokens that give them; all else does not.
    """
    rows, expected = rows.double(), expected.double()
    same = (rows == expected) | (rows.isnan() & expected.isnan())
    gaps = (rows - expected).masked_fill(same, 0.0).norm(dim=1)
    lengths = expected.masked_fill(~expected.isfinite(), 0.0).norm(dim=1)
    distances: torch.Tensor = gaps / lengths.clamp(min=torch.finfo(torch.float32).tiny)
    return distances.max()


def _reserve(shape: DecodeShape, num_sizes: int, loaded: LoadedModel, device: torch.device) -> int:
    """Return the bytes to keep free for the decode steps that are to be recorded.

    On a GPU, a step of padding of the largest size is measured, with the attention backend, which
    may need memory for the longest sequences. Steps of all sizes share that memory.
    """
    reserve = shape.num_bytes + num_sizes * _GRAPH_BYTES
    if device.type != "cuda":
        return reserve
    peak = loaded.decode_bytes(shape.max_num_seqs)
    return reserve + _LIBRARY_BYTES + _POOL_SHARE * peak
