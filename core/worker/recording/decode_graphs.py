"""Steps of one token per sequence that are recorded in few sizes, as CUDA graphs."""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hardpoint.boundary.checked_attention import CheckedAttention
from hardpoint.boundary.checked_model import CheckedModel
from hardpoint.plugins import AttentionStep, ForwardBatch, Ops, Recorded
from hardpoint.plugins.model import Attend
from hardpoint.registry.blame import describe
from hardpoint.system.memory import size_text

from .decode_inputs import DecodeInputs, DecodeShape
from .packed_step import PackedStep
from .padded_trial import PaddedTrial

_log = logging.getLogger("hardpoint")

StepAttention = Callable[[Sequence[AttentionStep]], Attend]
"""Returns the attention of a step, of its layouts by group."""

_EAGER_STEPS = 4  # that need a size before it is recorded in a step
_CHECKED_GRAPHS = 4  # whose first steps are compared with what the model computes
# Of a row's length: libraries choose other kernels for other numbers of rows, and in a capture. The
# rows of another history differ by about as much as they are long.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.1
_GRAPH_BYTES = 8 << 20  # of one graph: what the driver keeps of its kernels
_LIBRARY_BYTES = 64 << 20  # workspaces of CUDA's libraries on the stream that records
_POOL_SHARE = 2  # of what a step needs at once: a pool of memory has gaps


@dataclass(eq=False)
class _Graph:
    """A recorded step.

    Attributes:
        recorded: repeats it.
        batch: its inputs.
        is_checked: whether it was compared with what the model computes.
    """

    recorded: Recorded
    batch: ForwardBatch
    is_checked: bool = False


class DecodeGraphs:
    """Repeats decode steps without running Python, padded to the next size (`Ops.record_sizes`).

    Nothing is recorded until a request has ended, so that the first answer waits for no recording.
    Then each call of `record_ahead` records the largest size that is missing, so that smaller ones
    find memory in the pool; and a step records its own size, if others before needed it as well.

    Attributes:
        sizes: numbers of sequences, ascending.
        reserve: bytes that inputs and recorded steps may take.
    """

    def __init__(
        self,
        model: CheckedModel,
        ops: Ops,
        sizes: Sequence[int],
        device: torch.device,
        names: str,
    ) -> None:
        """Record nothing yet.

        Args:
            model: whose weights are loaded.
            ops: operations of its layers, which can be recorded.
            sizes: numbers of sequences, ascending.
            device: of the model.
            names: of model, operations and attention, for messages.
        """
        self._names = names
        self._model = model
        self._ops = ops
        self.sizes = tuple(sizes)
        self._device = device
        self.reserve = 0
        self._checks = _CHECKED_GRAPHS
        self._has_failed = False
        self._has_answered = False
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded, the inputs and the caches, which are to be released."""
        self._shape: DecodeShape | None = None
        self._attend: StepAttention | None = None
        self._inputs: DecodeInputs | None = None
        self._graphs: dict[int, _Graph] = {}
        self._seen: Counter[int] = Counter()  # eager steps by size
        self._num_bytes, self._is_full = 0, False

    def start(
        self, attend: StepAttention, max_model_len: int, block_size: int, num_groups: int
    ) -> None:
        """Allow to record, for caches are there.

        Args:
            attend: returns the attention of a step over these caches.
            max_model_len: as for `DecodeShape`, like those that follow.
            block_size: tokens per block.
            num_groups: KV cache groups.
        """
        self.clear()
        self._attend = attend
        self._shape = DecodeShape(self.sizes[-1], max_model_len, block_size, num_groups)

    def request_finished(self) -> None:
        """Allow to record, for a request has got its answer."""
        self._has_answered = True

    @property
    def can_record(self) -> bool:
        """Whether a step may be recorded now."""
        may = self._has_answered and self._shape is not None
        return may and not (self._has_failed or self._is_full)

    def forward(
        self, step: PackedStep, run_eagerly: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Return the hidden states of a step; None if no recorded one can repeat it.

        The next step overwrites them.

        Args:
            step: to compute.
            run_eagerly: computes it without what was recorded, to compare the first ones.
        """
        count = len(step.lens)
        if len(step.token_ids) > count or count > self.sizes[-1]:
            return None
        size = self.sizes[bisect.bisect_left(self.sizes, count)]
        graph = self._graphs.get(size)
        if graph is None:
            if not self.can_record:
                return None
            self._seen[size] += 1
            if self._seen[size] <= _EAGER_STEPS or (graph := self._record(size)) is None:
                return None
        assert self._inputs is not None
        self._inputs.fill(step)
        hidden = graph.recorded()[:count]
        if graph.is_checked or not self._checks:
            return hidden
        return self._checked(graph, hidden, run_eagerly)

    def record_ahead(self) -> bool | None:
        """Record the largest size that is missing.

        Returns:
            Whether more can be recorded now; None if none will be until `start`.
        """
        if self.can_record and (missing := self._missing()):
            self._record(missing[-1])
        if self._has_failed or self._is_full or not self._missing():
            return None
        return self.can_record

    def _missing(self) -> list[int]:
        return [size for size in self.sizes if size not in self._graphs]

    def _record(self, size: int) -> _Graph | None:
        """Record a size, of padding alone; return None if that is not possible."""
        assert self._shape is not None
        assert self._attend is not None
        if self._inputs is None:
            self._num_bytes += self._shape.num_bytes
        if self._num_bytes >= self.reserve:
            self._is_full = True
            _log.info(
                "decode graphs: the memory reserved for them, %s, is used; sizes %s are recorded",
                size_text(self.reserve),
                sorted(self._graphs) or "none",
            )
            return None
        try:
            inputs = self._inputs = self._inputs or DecodeInputs(self._shape, self._device)
            inputs.clear()
            token_ids, positions = inputs.tokens(size)
            batch = ForwardBatch(token_ids, positions, self._attend(inputs.attention(size)))
            model = self._model  # a recording that kept this object would never be released
            recorded = self._ops.record(lambda: model.forward(batch))
        except Exception as error:  # without recorded steps, all goes on
            self._has_failed = True
            _log.warning(
                "decode steps of %d sequences cannot be recorded, nor will others be: %s; with "
                "executor.enforce_eager = true, a restarted engine does not try",
                size,
                describe(error),
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
        if len(self._graphs) == len(self.sizes):
            _log.info(
                "decode graphs: recorded for up to %d sequences, in %d sizes, %s",
                self.sizes[-1],
                len(self.sizes),
                size_text(self._num_bytes),
            )
        return graph

    def _checked(
        self, graph: _Graph, hidden: torch.Tensor, run_eagerly: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return what the model computes, and forget what was recorded if it differs too much."""
        # Should a plugin have promised what does not hold, no request gets wrong tokens: the step
        # is planned again, without padding, since a plan that was recorded may be what is wrong.
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
                "though the classes of model, operations and attention say that they are "
                "replayable: %s",
                difference,
                tolerance,
                self._names,
            )
        return expected


def relative_difference(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest Euclidean distance of two rows [rows, size], relative to their length.

    NaN equals NaN, as those of a request whose weights or tokens give them; all else does not.
    """
    rows, expected = rows.double(), expected.double()
    same = (rows == expected) | (rows.isnan() & expected.isnan())
    gaps = (rows - expected).masked_fill(same, 0.0).norm(dim=1)
    lengths = expected.masked_fill(~expected.isfinite(), 0.0).norm(dim=1)
    distances: torch.Tensor = gaps / lengths.clamp(min=torch.finfo(torch.float32).tiny)
    return distances.max()


def graph_reserve(
    model: CheckedModel,
    attention: CheckedAttention,
    sizes: Sequence[int],
    shape: DecodeShape,
    device: torch.device,
) -> int:
    """Return the bytes to keep free for the decode steps that are to be recorded.

    On a GPU, a step of padding of the largest size is measured, with the attention backend, which
    may need memory for the longest sequences. Steps of all sizes share that memory.

    Args:
        model: whose weights are loaded.
        attention: of its layers.
        sizes: of the steps.
        shape: of their inputs.
        device: of the model.
    """
    reserve = shape.num_bytes + len(sizes) * _GRAPH_BYTES
    if device.type != "cuda":
        return reserve
    with torch.inference_mode():
        trial = PaddedTrial(model, attention, shape, device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        model.run_trial(sizes[-1], 1)
        trial.run()
    peak = torch.cuda.max_memory_allocated(device) - before
    return reserve + _LIBRARY_BYTES + _POOL_SHARE * peak
