"""Pooling: vectors and scores of prompts, instead of tokens that follow them."""

from .part import Pooling

__all__ = ["Pooling"]
