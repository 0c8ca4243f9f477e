"""Parts of weights: how a rank's part is cut out of a checkpoint's tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hardpoint.errors import ModelError

if TYPE_CHECKING:
    pass

__all__ = ["Cut", "needed_part"]


@dataclass(frozen=True)
class Cut:
    """The part of a weight that a rank needs.

    Attributes:
        dim: the dimension that is cut.
        start, stop: the part of it, `start:stop`.
        more: further parts (start, stop), which follow each other in the result. A tensor in which
            q, k and v are stacked is cut into three.
    """

    dim: int
    start: int
    stop: int
    more: tuple[tuple[int, int], ...] = ()

    @property
    def parts(self) -> list[Cut]:
        """The same as cuts of one part each."""
        bounds = [(self.start, self.stop), *self.more]
        return [Cut(self.dim, start, stop) for start, stop in bounds]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part of a weight of shape `whole`."""
        size = sum(part.stop - part.start for part in self.parts)
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])

    def of(self, weight: Any) -> Any:
        """Return the part of a weight, a tensor or an array; of several parts, a copy."""
        before = (slice(None),) * self.dim
        slices = [weight[(*before, slice(part.start, part.stop))] for part in self.parts]
        return slices[0] if not self.more else join(slices, self.dim)

    def fits(self, whole: Sequence[int]) -> bool:
        """Return whether it is inside of a weight of shape `whole`."""
        return 0 <= self.dim < len(whole) and all(
            0 <= part.start <= part.stop <= whole[self.dim] for part in self.parts
        )


def join(parts: Sequence[Any], dim: int) -> Any:
    """Return tensors, or arrays, one after the other in a dimension."""
    import numpy as np  # noqa: PLC0415 - the contract is imported without them
    import torch  # noqa: PLC0415

    is_tensor = isinstance(parts[0], torch.Tensor)
    return torch.cat(list(parts), dim) if is_tensor else np.concatenate(parts, dim)


def needed_part(
    name: str,
    shape: Sequence[int],
    shapes: Mapping[str, Sequence[int]],
    cuts: Mapping[str, Cut],
) -> Cut | None:
    """Return the part of a weight that a rank needs; None is all of it.

    Args:
        name: name of the weight.
        shape: the shape that it has in the files.
        shapes: the shapes that the model needs, of whole weights.
        cuts: by name, as in `WeightLoader.cut_weights`.

    Raises:
        ModelError: the weight is to be cut, and has another shape than the model needs; its part
            might have the right one by chance.
    """
    cut = cuts.get(name)
    if cut is not None and tuple(shape) != tuple(shapes[name]):
        raise ModelError(
            f"model: weight {name!r} has shape {tuple(shape)}, the model needs "
            f"{tuple(shapes[name])}"
        )
    return cut
