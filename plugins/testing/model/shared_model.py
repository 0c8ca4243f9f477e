"""The parts of a model that its ranks have, and the rules for that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hardpoint.plugins import KVSpec
from hardpoint.plugins.parallel import Cut
from hardpoint.testing.suite import Rule, short_repr

CUTS = Rule(
    "cuts: the ranks need all of every weight together, and each its share",
    "let weight_shapes name the tensors of this stage with their whole shapes, and weight_cuts "
    "the part of each tensor for this rank: rows of a matrix with divided results, "
    "columns of a matrix with results that are summed",
)
SHARED = Rule(
    "shared: ranks that share a model compute the same as a single rank",
    "all_reduce partial sums, all_gather divided results, in all ranks in the same "
    "order; let a stage begin with batch.hidden and compute its own layers",
)
SHARED_SPECS = Rule(
    "shared specs: a rank's kv_specs are the attention layers of its stage, with its heads",
    "list the layers of `Parallel.stage_layers`, with the heads of `Parallel.share` and the key "
    "and value heads of `Parallel.share_or_copy`",
)
REFUSED = Rule(
    "refused: sizes that a model cannot be divided by are a ModelError of its constructor",
    "divide by `Parallel.share` and `Parallel.stage_layers`; their errors name the setting"
    "(parallel.tensor or parallel.pipeline), the dimension, and the valid sizes",
)
HIDDEN_SIZE = Rule(
    "hidden_size: the width of the hidden states that stages pass on",
    "define the property hidden_size of the model, if the config's hidden_size is another number",
)

_REPLICATED = 0.25  # of the weights: norms, tables of positions, heads that several ranks have


class DivisionRefusedError(Exception):
    """The model refuses to be divided in this way; the message is the model's."""


@dataclass(frozen=True)
class Division:
    """How a model is divided: the ranks of each stage, the stages, and whether by experts."""

    tensor: int = 1
    stages: int = 1
    expert: bool = False

    def __str__(self) -> str:
        settings = {"tensor": self.tensor, "pipeline": self.stages}
        parts = [f"parallel.{name} = {size}" for name, size in settings.items() if size > 1]
        return ", ".join([*parts, "parallel.expert = true"] if self.expert else parts)


@dataclass(frozen=True)
class RankResult:
    """The declarations and results of one rank.

    Attributes:
        stage, rank: which one it is.
        shapes: its `weight_shapes`.
        cuts: its `weight_cuts`.
        specs: its `kv_specs`.
        hidden: hidden states of each step.
        logits: logits of the last step; None in a stage that is not the last.
    """

    stage: int
    rank: int
    shapes: Mapping[str, tuple[int, ...]]
    cuts: Mapping[str, Cut]
    specs: Sequence[KVSpec]
    hidden: Sequence[torch.Tensor]
    logits: torch.Tensor | None

    def __str__(self) -> str:
        return f"rank {self.rank} of stage {self.stage}"


def check_cut_weights(
    rank: str, whole: Mapping[str, Sequence[int]], shapes: Any, cuts: Any
) -> None:
    """Check a rank's shapes against the whole model's, and the bounds of its cuts.

    Raises:
        Violation: they are not.
    """
    if not isinstance(shapes, Mapping):
        raise CUTS.violation(f"weight_shapes of {rank} returned {short_repr(shapes)}")
    if not isinstance(cuts, Mapping):
        raise CUTS.violation(f"weight_cuts of {rank} returned {short_repr(cuts)}")
    for name, shape in shapes.items():
        if name not in whole or tuple(shape) != tuple(whole[name]):
            raise CUTS.violation(
                f"weight_shapes of {rank} has {name!r} as {short_repr(shape)}, the whole model's "
                f"has {short_repr(tuple(whole[name])) if name in whole else 'no such tensor'}"
            )
    for name, cut in cuts.items():
        if name not in shapes or not isinstance(cut, Cut) or not cut.fits(shapes[name]):
            raise CUTS.violation(
                f"weight_cuts of {rank} has {short_repr(cut)} of {name!r}, expected a Cut inside "
                f"of {short_repr(shapes.get(name))}"
            )


def check_coverage(whole: Mapping[str, Sequence[int]], ranks: Sequence[RankResult]) -> None:
    """Check that no part of a weight is left out.

    Raises:
        Violation: one is.
    """
    for name, shape in whole.items():
        missing = torch.ones(tuple(shape), dtype=torch.bool)
        for rank in ranks:
            if name in rank.shapes:
                cut = rank.cuts.get(name)
                for part in [Cut(0, 0, shape[0])] if cut is None else cut.parts:
                    part.of(missing)[...] = False
        if missing.all():
            raise CUTS.violation(f"no rank needs {name!r}, which the whole model does")
        if missing.any():
            dim, start, stop = _hole(missing)
            raise CUTS.violation(f"no rank needs {start}:{stop} of dimension {dim} of {name!r}")


def _hole(missing: torch.Tensor) -> tuple[int, int, int]:
    places = missing.nonzero()
    for dim in range(missing.dim()):
        indices = sorted(set(places[:, dim].tolist()))
        if len(indices) < missing.shape[dim]:
            stop = next((i for i, j in enumerate(indices) if j != indices[0] + i), len(indices))
            return dim, indices[0], indices[0] + stop
    return 0, 0, missing.shape[0]


def check_sizes(
    whole: Mapping[str, Sequence[int]], ranks: Sequence[RankResult], division: Division
) -> None:
    """Check that a rank needs its share of the weights, and little besides.

    Raises:
        Violation: it needs more.
    """
    total = sum(math.prod(shape) for shape in whole.values())
    for rank in ranks:
        parts = [
            math.prod(rank.cuts[name].shape(shape) if name in rank.cuts else shape)
            for name, shape in rank.shapes.items()
        ]
        union = {
            n: s for other in ranks if other.stage == rank.stage for n, s in other.shapes.items()
        }
        of_stage = sum(math.prod(shape) for shape in union.values())
        if division.stages > 1 and total and of_stage >= total:
            raise CUTS.violation(
                f"{rank} needs tensors of all stages: {len(rank.shapes)} of {len(whole)}",
                "create the layers of `Parallel.stage_layers` alone; the embedding where "
                "`is_first`, the final norm and the head where `is_last`",
            )
        limit = 1 / division.tensor + _REPLICATED
        if division.tensor > 1 and sum(parts) > limit * of_stage:
            share = sum(parts) / of_stage
            raise CUTS.violation(
                f"{rank}, of {division.tensor}, needs {share:.0%} of the stage's weights, expected "
                f"at most {limit:.0%}"
            )


def check_specs(whole: Sequence[KVSpec], ranks: Sequence[RankResult], division: Division) -> None:
    """Check that each rank has layers of the whole, with its share of the heads.

    Raises:
        Violation: it has others.
    """
    expected = [
        replace(
            spec,
            num_heads=-(-spec.num_heads // division.tensor),
            num_kv_heads=-(-spec.num_kv_heads // division.tensor),
        )
        for spec in whole
    ]
    for rank in ranks:
        for spec in rank.specs:
            if spec not in expected:
                raise SHARED_SPECS.violation(
                    f"kv_specs of {rank} has {spec}, expected one of {short_repr(expected)}"
                )
