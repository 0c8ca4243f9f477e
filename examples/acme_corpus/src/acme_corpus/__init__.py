"""Drafts from the operator's documents."""

from .speculator import Corpus

__all__ = ["Corpus"]
