"""Shards of a loader's weights, also for a loader that modifies whole weights only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hardpoint.plugins import WeightLoader, Wrapper
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedWeight

if TYPE_CHECKING:
    import torch

__all__ = ["cut_weights"]


def cut_weights(
    loader: WeightLoader, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Return a loader's weights, cut.

    A class that overrides `weights` alone, of a loader or wrapper that cuts by itself, changes
    weights in a way that the inherited `cut_weights` does not: the results of `weights` are cut
    then.

    Args:
        loader: loader of the weights.
        shapes: as in `WeightLoader.cut_weights`.
        cuts: the same.
    """
    classes = type(loader).__mro__
    whole, part = (
        next(index for index, cls in enumerate(classes) if name in vars(cls))
        for name in ("weights", "cut_weights")
    )
    if whole < part:
        return WeightLoader.cut_weights(loader, dict(shapes), dict(cuts))
    if isinstance(loader, Wrapper) and Wrapper in classes[part].__bases__:  # it overrides neither
        return cut_weights(loader.wrapped, shapes, cuts)
    return loader.cut_weights(dict(shapes), dict(cuts))
