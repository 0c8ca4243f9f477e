"""Building a rank's share of a model; where it cannot be divided, which sizes would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hardpoint.plugins import Model, ModelError
from hardpoint.plugins.parallel import IndivisibleError, Parallel, SingleRank

_MAX_SIZE = 64  # ranks of a stage that are tried


class _FirstOf(SingleRank):
    """Rank 0 of so many, which a model is built for and never run."""

    def __init__(self, size: int) -> None:
        """There is nobody to find."""
        self.size = size


def build_share(create: Callable[[Parallel], Model], parallel: Parallel) -> Model:
    """Build what a rank computes of a model.

    Args:
        create: builds the model without weights.
        parallel: this rank's share.

    Raises:
        ModelError: the model cannot be divided in this way; names the sizes that all of it can be
            divided by.
    """
    try:
        return create(parallel)
    except IndivisibleError as cause:
        sizes = [str(size) for size in range(2, _MAX_SIZE + 1) if _fits(create, parallel, size)]
        others = f"{', '.join(sizes)} would do" if sizes else f"no size up to {_MAX_SIZE} would do"
        raise ModelError(f"{cause.problem}; {others}") from cause


def _fits(create: Callable[[Parallel], Model], parallel: Parallel, size: int) -> bool:
    """Return whether a model can be divided among so many ranks."""
    try:
        create(dataclasses.replace(parallel, tensor=_FirstOf(size))).close()
    except ModelError:
        return False
    return True
