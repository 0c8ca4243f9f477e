"""Checks of the suite: arguments of requests, and padding in recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hardpoint.plugins import AttentionBackend, AttentionStep, KVSpec
from hardpoint.testing.model.sequences import SequenceBlocks, WholeHistory
from hardpoint.testing.suite import Rule, short_repr

from .cases import PADDING, RESULT, check_output

__all__ = ["ARGUMENTS", "LENGTH", "NAMES", "check_arguments", "check_padding"]

ARGUMENTS = Rule(
    "arguments: each sequence of a step has the result of its own arguments",
    "read the arguments of sequence i in step.arguments[i], in plan; where step.arguments is "
    "empty, all sequences have the defaults",
)
NAMES = "abcd"
_ENDS = 6, 7, 10
"""Positions at which steps end: a prompt, a single token, and several tokens."""
LENGTH = _ENDS[-1]


@torch.inference_mode()
def check_arguments(
    backend: AttentionBackend[Any, Any],
    spec: KVSpec,
    tensors: Sequence[torch.Tensor],
    arguments: Sequence[Any],
    defaults: Any,
    limit: float,
) -> None:
    """Compare sequences with arguments, alone and in one step, and without any.

    Args:
        tensors: queries, keys and values, [sequences, LENGTH, heads, elements].
        arguments: arguments of each sequence.
        defaults: arguments of a request that gives none.
        limit: largest difference.

    Raises:
        Violation: a sequence has another result in a step with others, or the defaults give
            another one than no arguments.
    """
    together = _results(backend, spec, tensors, arguments)
    for index, own in enumerate(arguments):
        alone = _results(backend, spec, [part[index : index + 1] for part in tensors], [own])
        if (difference := _difference(alone, together[index : index + 1])) > limit:
            raise ARGUMENTS.violation(
                f"sequence {index} with {short_repr(own)}, in a step of sequences with "
                f"{short_repr(list(arguments))}, differs by {difference:.3g} from the same alone; "
                f"at most {limit:.3g} is accepted"
            )
    stated = _results(backend, spec, tensors, [defaults] * len(arguments))
    if (difference := _difference(_results(backend, spec, tensors, ()), stated)) > limit:
        raise ARGUMENTS.violation(
            f"a step without arguments differs by {difference:.3g} from one with the defaults, "
            f"{short_repr(defaults)}; at most {limit:.3g} is accepted"
        )


def _results(
    backend: AttentionBackend[Any, Any],
    spec: KVSpec,
    tensors: Sequence[torch.Tensor],
    arguments: Sequence[Any],
) -> torch.Tensor:
    """Return the results of all tokens, [sequences, LENGTH, heads, elements]."""
    names, size = NAMES[: len(tensors[0])], backend.context.block_size
    num_blocks = len(names) * -(-LENGTH // size)
    blocks = SequenceBlocks(num_blocks, size, tensors[0].device, shuffled=True)
    cache, results = backend.allocate(spec, num_blocks), []
    for start, end in zip((0, *_ENDS), _ENDS, strict=False):
        step = blocks.step([(name, end - start) for name in names])
        plan = backend.plan(replace(step, arguments=arguments))
        parts = [part[:, start:end].flatten(0, 1) for part in tensors]
        result = backend.attend(spec, cache, plan, *parts)
        results.append(result.view(len(names), end - start, *result.shape[1:]))
    return torch.cat(results, 1)


def _difference(first: torch.Tensor, other: torch.Tensor) -> float:
    return float((first.double() - other.double()).abs().nan_to_num(torch.inf).max())


@torch.inference_mode()
def check_padding(
    backend: AttentionBackend[Any, Any],
    spec: KVSpec,
    inputs: Callable[[int], list[torch.Tensor]],
    history: WholeHistory,
    limit: float,
) -> None:
    """Run a prompt of a block, then a recorded step: two sequences, the rest is padding.

    Args:
        inputs: returns queries, keys and values of so many tokens.
        history: history of the layer, empty.
        limit: largest difference.

    Raises:
        Violation: the recorded step has another result.
    """
    block_size, device = backend.context.block_size, backend.context.device
    cache = backend.allocate(spec, 4)
    # The last slot, which is that of index -1, is in the first block of a.
    tables = torch.tensor([[3, 0], [1, 2]], device=device)
    places = tables[:, :1] * block_size + torch.arange(block_size, device=device)
    prompt = AttentionStep(
        query_starts=np.arange(3) * block_size,
        seq_lens=np.full(2, block_size),
        num_single=2 if block_size == 1 else 0,
        block_table=tables[:, :1].contiguous(),
        slots=places.flatten(),
        block_size=block_size,
    )
    q, k, v = inputs(2 * block_size)
    backend.attend(spec, cache, backend.plan(prompt), q.clone(), k.clone(), v.clone())
    history.append([("a", block_size), ("b", block_size)], k, v)
    size, counts = 5, [("a", 1), ("b", 1)]
    table = torch.zeros(size, 3, dtype=torch.int64, device=device)
    slots, lens = torch.full_like(table[:, 0], -1), torch.zeros_like(table[:, 0])
    recorded = AttentionStep(
        query_starts=np.arange(size + 1),
        seq_lens=np.full(size, 3 * block_size),
        num_single=size,
        block_table=table,
        slots=slots,
        block_size=block_size,
        on_device=(torch.arange(size + 1, device=device), lens),
    )
    plan = backend.plan(recorded)
    table[:2, :2], slots[:2], lens[:2] = tables, tables[:, 1] * block_size, block_size + 1
    q, k, v = inputs(size)
    out = backend.attend(spec, cache, plan, q.clone(), k.clone(), v.clone())
    history.append(counts, k[:2], v[:2])
    if not isinstance(out, torch.Tensor) or out.shape != q.shape:
        raise RESULT.violation(f"attend returned {short_repr(out)}, q is {list(q.shape)}")
    check_output(PADDING, out[:2], q[:2], history, counts, limit)
