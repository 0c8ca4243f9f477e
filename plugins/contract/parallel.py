"""Parallel execution: how the ranks of an engine share a model, and how they communicate."""

from .model.cuts import (
    Cut,
    join,
    needed_part,
)
from .process.parallel import (
    Communicator,
    CommunicatorContext,
    Parallel,
    Placement,
    SingleRank,
)
from .process.parallel import IndivisibleError as IndivisibleError

__all__ = [
    "Communicator",
    "CommunicatorContext",
    "Cut",
    "Parallel",
    "Placement",
    "SingleRank",
    "join",
    "needed_part",
]
