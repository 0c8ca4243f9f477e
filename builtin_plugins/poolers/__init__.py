"""Poolers: vectors of the hidden states of a prompt."""

from .one_vector import Cls, Last, Mean
from .token_vectors import All, Step

__all__ = ["All", "Cls", "Last", "Mean", "Step"]
