"""LoRA adapters: low-rank changes of linear layers, at most one per request."""

from __future__ import annotations

from .part import Adapters

__all__ = ["Adapters"]
