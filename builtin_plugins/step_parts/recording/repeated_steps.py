"""Steps of few tokens that are recorded, and repeated without running Python."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import TYPE_CHECKING

import torch

from hardpoint.plugins import ForwardBatch, Ops
from hardpoint.plugins.step_part import CacheObserver, ForwardWrapper

if TYPE_CHECKING:
    from hardpoint.plugins.model.forward import Forward, ForwardStep
    from hardpoint.plugins.model.ops import Recorded
    from hardpoint.plugins.step_part.worker import StepModel
    from hardpoint.plugins.step_part.worker_data import AllocatedCache


_log = logging.getLogger("hardpoint")

RECORDED_BYTES = 64 << 20
"""Memory of recorded steps; the least recently used one goes first."""

_RECORDED_TOKENS = 64  # of a step; with more, running Python takes a small part of it
_UNRECORDED_STEPS = 3  # of each number of tokens: the cost of recording comes back slowly
_CHECKED_STEPS = 4  # that are compared with the model, of different numbers of tokens


class RepeatedSteps(ForwardWrapper, CacheObserver):
    """Runs the model; steps of few tokens are recorded, and repeated without running Python.

    They differ in their number of tokens alone (`Ops.record` without sizes).
    """

    def __init__(self, model: StepModel, ops: Ops) -> None:
        """`ops`: operations of its layers, which can be recorded."""
        self._model = model
        self._ops = ops
        self._longest = _RECORDED_TOKENS  # of the steps to record, in tokens
        self._checks = _CHECKED_STEPS
        self._clear()

    def cache_allocated(self, cache: AllocatedCache) -> None:  # noqa: ARG002
        """Forget recordings, because they refer to earlier caches."""
        self._clear()

    def cache_released(self) -> None:
        """Forget recordings, because they refer to caches that are to be released."""
        self._clear()

    def weights_changed(self) -> None:
        """Forget recordings, because they refer to earlier weights."""
        self._clear()

    def _clear(self) -> None:
        self._seen: Counter[int] = Counter()  # steps by number of tokens
        self._recorded: dict[int, _RecordedReplay] = {}
        self._num_bytes = 0

    def around_model(self, forward: Forward) -> Forward:
        """Return a function that repeats a step if it is recorded, and calls `forward` if not."""
        return functools.partial(self._forward, forward)

    def _forward(self, forward: Forward, step: ForwardStep) -> torch.Tensor:
        if step.needs_model:
            return forward(step)
        batch = step.batch  # planned in each step: the repeated step reads the plan
        count = len(batch.token_ids)
        if count > self._longest:
            return forward(step)
        replay = self._recorded.pop(count, None)
        if replay is None:
            self._seen[count] += 1
            if self._seen[count] <= _UNRECORDED_STEPS + count // 2:
                return forward(step)
            return self._record(batch)
        self._recorded[count] = replay  # the most recently used one is the last
        hidden = replay.run(batch)
        if replay.is_checked or not self._checks:
            return hidden
        # Should a plugin have promised too much, no request gets wrong tokens.
        self._checks -= 1
        replay.is_checked = True
        expected = forward(step)
        if batch.needed is not None:  # the model has skipped other tokens
            hidden, read = hidden[batch.needed], expected[batch.needed]
        else:
            read = expected
        if not torch.equal(hidden, read):
            self._longest = 0
            self._clear()
            _log.warning(
                "steps are not repeated without running Python: a repeated step gave other hidden "
                "states than forward(), though the model is marked replayable"
            )
        return expected

    def _record(self, batch: ForwardBatch) -> torch.Tensor:
        inputs = ForwardBatch(batch.token_ids.clone(), batch.positions.clone(), batch.attend)
        hidden: list[torch.Tensor] = []

        def run() -> torch.Tensor:
            hidden.append(self._model.forward(inputs))
            return hidden[0]

        recorded, count = self._ops.record(run), len(inputs.token_ids)
        if recorded is None:
            self._longest = 0
        elif recorded.num_bytes > RECORDED_BYTES:
            self._longest = count - 1
        else:
            self._num_bytes += recorded.num_bytes
            while self._num_bytes > RECORDED_BYTES:
                oldest = next(iter(self._recorded))
                self._num_bytes -= self._recorded.pop(oldest).num_bytes
                self._seen[oldest] = 0
            self._recorded[count] = _RecordedReplay(recorded, inputs)
        return hidden[0].clone()


class _RecordedReplay:
    """A step that was recorded.

    Attributes:
        num_bytes: bytes of the tensors that it keeps.
        is_checked: whether it was compared with the model.
    """

    def __init__(self, recorded: Recorded, inputs: ForwardBatch) -> None:
        self._recorded = recorded
        self._inputs = inputs
        self.num_bytes = recorded.num_bytes
        self.is_checked = False

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        self._inputs.token_ids.copy_(batch.token_ids)
        self._inputs.positions.copy_(batch.positions)
        return self._recorded()
