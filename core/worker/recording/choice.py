"""Which steps of a model are recorded, and why none are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hardpoint.boundary.checked_attention import CheckedAttention
from hardpoint.boundary.checked_model import CheckedModel, wrong_result
from hardpoint.plugins import Ops
from hardpoint.plugins.component import is_replayable
from hardpoint.plugins.manifest import Source

from .decode_graphs import DecodeGraphs
from .repeated_steps import RepeatedSteps


@dataclass(frozen=True)
class Recording:
    """What repeats the steps of a model; at most one of both.

    Attributes:
        graphs: decode steps that are recorded in few sizes.
        repeats: steps that are recorded by their number of tokens.
        description: of the first, for the log; None where operations have no sizes.
    """

    graphs: DecodeGraphs | None = None
    repeats: RepeatedSteps | None = None
    description: str | None = None


def choose_recording(
    model: CheckedModel,
    ops: Ops,
    ops_source: Source,
    attention: CheckedAttention,
    device: torch.device,
    *,
    are_many: bool,
    max_num_seqs: int,
    enforce_eager: bool,
) -> Recording:
    """Return what repeats the steps of a model.

    Args:
        model: whose weights are loaded.
        ops: operations of its layers.
        ops_source: where they come from.
        attention: of its layers.
        device: of the model.
        are_many: whether several ranks share the model.
        max_num_seqs: the most that a step has.
        enforce_eager: whether Python runs in every step.

    Raises:
        PluginFaultError: the sizes of recorded steps are none.
    """
    sizes = ops.record_sizes(max_num_seqs)
    if not _are_sizes(sizes, max_num_seqs):
        expected = f"numbers of sequences in 1..{max_num_seqs}, ascending"
        raise wrong_result(ops_source, "record_sizes", sizes, expected)
    reason = None
    if enforce_eager:
        reason = "executor.enforce_eager is set"
    elif are_many:
        reason = "ranks share the model"
    else:
        for source, states in (
            (ops_source, is_replayable(ops)),
            (model.source, model.is_replayable),
            (attention.source, attention.is_replayable),
        ):
            if not states:
                reason = f"{source} does not state replayable = True"
                break
    if sizes and reason is None and not attention.pads:
        reason = f"{attention.source} does not state pads = True"
    if reason is not None:
        return Recording(description=f"decode graphs: off, since {reason}" if sizes else None)
    if sizes:
        names = f"{model.source}, {ops_source}, {attention.source}"
        graphs = DecodeGraphs(model, ops, sizes, device, names)
        text = f"decode graphs: up to {sizes[-1]} sequences, recorded when idle or needed"
        return Recording(graphs=graphs, description=text)
    return Recording() if attention.pads else Recording(repeats=RepeatedSteps(model, ops))


def _are_sizes(sizes: Any, limit: int) -> bool:
    return (
        isinstance(sizes, Sequence)
        and all(type(size) is int and 1 <= size <= limit for size in sizes)
        and all(size < following for size, following in pairwise(sizes))
    )
