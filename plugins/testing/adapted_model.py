"""Low-rank changes of the matrices that a model names for step parts, such as adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hardpoint.plugins import Model
from hardpoint.plugins.model import LinearMatrix
from hardpoint.testing.suite import Rule, short_repr

__all__ = ["ADAPTERS", "AdaptedModel"]

ADAPTERS = Rule(
    "adapters: the sums of hooks.linear change the model like changed weights",
    "list the matrices of forward in context.hooks.matrices, and call hooks.linear with these "
    "names, x and the product, before anything is made of the product; Linear of "
    "hardpoint.toolkit.layers does both",
)

_RANK = 2
_SIZE = 0.1


class AdaptedModel:
    """Adds a random low-rank change to each matrix that a loaded model names.

    Attributes:
        called: names of the matrices that the model has called `hooks.linear` with.
    """

    def __init__(self, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
        """Draw the changes.

        Args:
            weights: loaded weights.

        Raises:
            Violation: a matrix is none of the weights, or of another shape.
        """
        self._model, self._weights = model, weights
        self._matrices = dict(model.context.hooks.matrices)
        self._changes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.called: set[str] = set()
        generator = torch.Generator().manual_seed(11)
        for name, matrix in sorted(self._matrices.items()):
            self._check(name, matrix)
            if matrix.stored_as not in self._changes:
                rows, columns = matrix.shape
                a = torch.randn(_RANK, columns, generator=generator) * _SIZE
                b = torch.randn(rows, _RANK, generator=generator)
                self._changes[matrix.stored_as] = a, b

    def _check(self, name: str, matrix: LinearMatrix) -> None:
        stored = self._weights.get(f"{matrix.stored_as}.weight")
        if stored is None or tuple(stored.shape) != tuple(matrix.shape):
            declared_shape = "no such weight" if stored is None else str(list(stored.shape))
            raise ADAPTERS.violation(
                f"hooks.matrices[{name!r}] is {matrix.stored_as + '.weight'!r} "
                f"{list(matrix.shape)}, and weight_shapes has {declared_shape}"
            )

    def merged(self) -> dict[str, torch.Tensor]:
        """Return the weights with the changes added."""
        changed = {
            f"{stored}.weight": self._weights[f"{stored}.weight"] + b @ a
            for stored, (a, b) in self._changes.items()
        }
        return {**self._weights, **changed}

    def linear(
        self, parts: Sequence[tuple[str, int]], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Return a product with the changes of its matrices, as `LayerHooks.linear`.

        Raises:
            Violation: the arguments are not a product of matrices that the model names.
        """
        total = sum(count for _, count in parts)
        if y.shape != (len(x), total):
            raise ADAPTERS.violation(
                f"hooks.linear got parts of {total} rows, x {list(x.shape)} and y {list(y.shape)}"
            )
        start, changed = 0, y.clone()
        for name, count in parts:
            matrix = self._matrices.get(name)
            if matrix is None or count != len(matrix.rows) or x.shape[1] != len(matrix.columns):
                raise ADAPTERS.violation(
                    f"hooks.linear got {short_repr(name)} with {count} rows and x "
                    f"{list(x.shape)}, which is no entry of hooks.matrices"
                )
            self.called.add(name)
            a, b = self._changes[matrix.stored_as]
            a = a[:, matrix.columns.start : matrix.columns.stop].to(x)
            b = b[matrix.rows.start : matrix.rows.stop].to(x)
            changed[:, start : start + count] += (x @ a.T @ b.T).to(y.dtype)
            start += count
        return changed

    def check_called(self) -> None:
        """Check that the model has called `linear` with every matrix that it names.

        Raises:
            Violation: it has not.
        """
        if missing := sorted(self._matrices.keys() - self.called):
            raise ADAPTERS.violation(
                f"forward never called hooks.linear with {missing[0]!r} of hooks.matrices"
            )
