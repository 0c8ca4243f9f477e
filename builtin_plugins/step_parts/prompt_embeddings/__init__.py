"""Prompt embeddings: rows of the model's input in place of token ids."""

from __future__ import annotations

from .part import PromptEmbeddings

__all__ = ["PromptEmbeddings"]
