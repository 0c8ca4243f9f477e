"""Speculation: drafts of tokens that the next step verifies."""

from .part import Speculation

__all__ = ["Speculation"]
