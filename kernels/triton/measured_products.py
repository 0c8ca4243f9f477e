"""The products of few rows that this package's kernels compute faster than torch's library.

`scripts/gpu-check --only products` prints the entries of a GPU. A product that is not listed here
is left to the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

__all__ = ["FASTER", "ProductClass", "is_faster"]


class ProductClass(NamedTuple):
    """Products of similar sizes.

    Attributes:
        dtype: name of the dtype of x and W, "bfloat16" for example.
        x_rows: least and largest number of rows of x.
        rows, columns: least and largest number of those of W.
    """

    dtype: str
    x_rows: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]

    def has(self, x_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """Return whether a product with W of this shape belongs to the class."""
        sizes = (x_rows, *shape)
        limits = (self.x_rows, self.rows, self.columns)
        is_inside = all(
            least <= size <= most for size, (least, most) in zip(sizes, limits, strict=True)
        )
        return is_inside and str(dtype) == f"torch.{self.dtype}"


FASTER: Mapping[str, Sequence[ProductClass]] = {}
"""By the name that torch has for a GPU. No GPU has been measured yet."""


def is_faster(
    gpu: str,
    x_rows: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    table: Mapping[str, Sequence[ProductClass]] | None = None,
) -> bool:
    """Return whether the kernels were measured to be faster than the library.

    Args:
        gpu: name of the GPU.
        x_rows: number of rows of x.
        shape: rows and columns of W.
        dtype: dtype of x and W.
        table: `FASTER` by default.
    """
    classes = (FASTER if table is None else table).get(gpu, ())
    return any(products.has(x_rows, shape, dtype) for products in classes)
