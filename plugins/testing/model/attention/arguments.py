"""The rule of arguments of requests for an attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hardpoint.plugins import AttentionBackend, KVSpec
from hardpoint.testing.model.sequences import SequenceBlocks
from hardpoint.testing.suite import Rule, short_repr

__all__ = ["ARGUMENTS", "LENGTH", "NAMES", "check_arguments"]

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
