"""Adapters: low-rank changes of linear layers, of which each request may have one (LoRA)."""

from __future__ import annotations

from .part import Adapters

__all__ = ["Adapters"]
