"""Parallel execution: how the ranks of an engine share a model, and how they communicate."""

from .model.cuts import (
    Cut,
    needed_part,
)
from .model.cuts import join as join
from .process.parallel import (
    Communicator,
    CommunicatorContext,
    Placement,
)
from .process.parallel import IndivisibleError as IndivisibleError
from .process.parallel import Parallel as Parallel
from .process.parallel import SingleRank as SingleRank

__all__ = [
    "Communicator",
    "CommunicatorContext",
    "Cut",
    "Placement",
    "needed_part",
]
