"""Operations that record decode steps as CUDA graphs do, and attention over padded steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.ops.cuda_graphs import RepeatedRun
from hardpoint.builtin_plugins.ops.torch import TorchOps
from hardpoint.plugins import AttentionStep
from hardpoint.testing import HistoryAttention, ScriptedModel, history_hash

SIZES_FILE = "HARDPOINT_TEST_RECORDED_SIZES"
"""Environment variable: the file that gets the sizes that a process has recorded."""


class Graph:
    """Kernels with the tensors that they were started with; no Python of models runs again."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        with _Capture(self._calls):
            self._result = run()

    def __call__(self) -> torch.Tensor:
        for function, arguments, more, results in self._calls:
            again = function(*arguments, **more)
            for new, old in zip(_tensors(again), results, strict=True):
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)
        return self._result


class _Capture(TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() == "aten::_local_scalar_dense":  # of .item()
            raise RuntimeError("operation not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, _tensors(result)))
        return result


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return (
        [tensor for tensor in result if isinstance(tensor, torch.Tensor)]
        if result is not None
        else []
    )


class GraphedOps(TorchOps):
    """Records decode steps in few sizes; counts recordings and repetitions.

    Attributes:
        recorded: sizes in their order, of all objects.
        replays: number of replays of all objects.
        fails: whether recording fails.
        graph_bytes: size of each recorded step.
    """

    contract = 1
    replayable = True
    sizes = (1, 2, 4, 8)
    recorded: list[int] = []
    replays = 0
    fails = False
    graph_bytes = 0

    @classmethod
    def reset(cls) -> None:
        GraphedOps.recorded, GraphedOps.replays = [], 0
        GraphedOps.fails, GraphedOps.graph_bytes = False, 0

    def record_sizes(self, max_num_seqs):
        return [size for size in self.sizes if size <= max_num_seqs] or [max_num_seqs]

    def record(self, run):
        if GraphedOps.fails:
            raise RuntimeError("CUDA error: out of memory")
        GraphedOps.recorded.append(len(run()))
        if name := os.environ.get(SIZES_FILE):
            with open(name, "a") as file:
                print(GraphedOps.recorded[-1], file=file)
        graph = self.graph(run)

        def replay():
            GraphedOps.replays += 1
            return graph()

        replay.num_bytes = GraphedOps.graph_bytes
        return replay

    def graph(self, run):
        return Graph(run)

    def experts(self, gate_up, down, shape):
        """Return a function that looks at no element: all experts compute all rows."""
        hidden, width = shape
        enter = [self.linear(packed, (2 * width, hidden)) for packed in gate_up]
        leave = [self.linear(packed, shape, out_dtype=torch.float32) for packed in down]

        def run(x, chosen, weights):
            total = torch.zeros(x.shape)
            for expert, (first, last) in enumerate(zip(enter, leave, strict=True)):
                share = torch.where(chosen == expert, weights, 0).sum(1, keepdim=True)
                total = total + last(self.silu_and_mul(first(x))) * share
            return total.to(x.dtype)

        return run


class RepeatingOps(GraphedOps):
    """Repeats Python, as `ops.triton` does where kernels are interpreted."""

    contract = 1
    replayable = True

    def graph(self, run):
        return RepeatedRun(run)


class CopyingOps(GraphedOps):
    """Returns the results of the recorded inputs, a mistake that no graph makes."""

    contract = 1
    replayable = True

    def graph(self, run):
        first = run().clone()
        return lambda: first


class RoundingOps(GraphedOps):
    """Gives other last bits than the operations, as libraries do that choose other kernels.

    Attributes:
        error: relative to each number.
    """

    contract = 1
    replayable = True
    error = 1e-5

    def graph(self, run):
        graph = Graph(run)
        return lambda: graph() * (1 + self.error)


class PaddedAttention(TorchAttention):
    """Attention of steps with padding, in operations that look at no element."""

    contract = 1
    kv_layout = ""
    replayable = True
    pads = True

    def allocate(self, spec, num_blocks):
        # One block more, where padding is written to.
        return super().allocate(spec, num_blocks + 1)

    def plan(self, step: AttentionStep) -> Any:
        is_decode = step.num_single == len(step.seq_lens)
        return step if is_decode else super().plan(step)

    def attend(self, spec, cache, plan, q, k, v):
        if not isinstance(plan, AttentionStep):
            return super().attend(spec, cache, plan, q, k, v)
        count = len(cache[0]) * plan.block_size
        slots = torch.where(plan.slots < 0, count - 1, plan.slots)
        heads = spec.num_heads // spec.num_kv_heads
        read = []
        for side, new in zip(cache, (k, v), strict=True):
            side.flatten(0, 1).index_copy_(0, slots, new)
            rows = side[plan.block_table].flatten(1, 2).transpose(1, 2)
            read.append(rows.repeat_interleave(heads, 1).float())
        scores = (q.float().unsqueeze(2) @ read[0].transpose(2, 3)) * spec.scale
        places, lens = torch.arange(scores.shape[-1], device=q.device), plan.lens[:, None]
        hidden = places >= lens
        if spec.window is not None:
            hidden = hidden | (places < lens - spec.window)
        scores = scores.masked_fill(hidden[:, None, None], -1e30)
        out = (scores.softmax(-1) @ read[1]).squeeze(2).to(q.dtype)
        return torch.where(lens[..., None] > 0, out, 0)


class KeepsLengths(PaddedAttention):
    """Plans with the lengths that a step has when it is recorded."""

    contract = 1
    replayable = True
    pads = True

    def plan(self, step: AttentionStep) -> Any:
        lens = step.lens.clone().clamp(min=1)
        return super().plan(dataclasses.replace(step, on_device=(step.starts, lens)))


class Derived(GraphedOps):
    """Says nothing of itself."""

    contract = 1


class NoGraphs(GraphedOps):
    """Records nothing."""

    contract = 1
    replayable = True

    def record(self, run):
        return None


class Unpadded(PaddedAttention):
    """Does not report that it takes padding."""

    contract = 1
    replayable = True
    pads = False


class PaddedHistory(HistoryAttention):
    """The attention of the scripted model, of steps with padding, too."""

    contract = 1
    replayable = True
    pads = True

    def attend(self, spec, cache, plan, q, k, v):
        if plan.num_single < len(plan.seq_lens):
            return super().attend(spec, cache, plan, q, k, v)
        result = torch.zeros_like(q)
        lens, slots = plan.lens.tolist(), plan.slots.tolist()
        for index, (length, slot) in enumerate(zip(lens, slots, strict=True)):
            assert (slot < 0) == (length == 0)
            if length:
                cache.view(-1)[slot] = k[index, 0, 0].long()
                blocks = plan.block_table[index, : -(-length // plan.block_size)]
                value = history_hash(cache[blocks].view(-1)[:length].tolist())
                result[index, 0, 0], result[index, 0, 1] = value >> 16, value & 0xFFFF
        return result


class ReplayableScript(ScriptedModel):
    """The scripted model with recordable steps."""

    contract = 1
    replayable = True


def graphed_script(extra=None):
    """Return configuration of the scripted model that lets its decode steps be recorded."""
    return {
        "ops": {"use": f"{__name__}:RepeatingOps"},
        "attention": {"use": f"{__name__}:PaddedHistory"},
        **(extra or {}),
    }
