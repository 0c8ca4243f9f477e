"""Implementations of hooks: the marker, and the context of a class of hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pluggy

from hardpoint.plugins.component.base import Source

__all__ = ["HookContext", "hookimpl"]

hookimpl = pluggy.HookimplMarker("hardpoint")


@dataclass(frozen=True, kw_only=True)
class HookContext:
    """Constructor argument of a class of hooks. Fields may be added; none is ever removed.

    Attributes:
        name: under which the configuration enables the class.
        options: its own `Options`, checked.
        source: its identity in messages; None if the context was made by hand.
    """

    name: str
    options: Any
    source: Source | None = field(default=None, repr=False, compare=False)
