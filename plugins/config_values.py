"""Types of values that several tables of the configuration have."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

__all__ = [
    "Count",
    "Name",
    "PositiveSeconds",
    "Reference",
    "Seconds",
]

Reference = Annotated[
    str,
    Meta(
        min_length=1,
        description="An entry-point name, or an FQCN `package.module:Class`.",
    ),
]

Name = Annotated[str, Meta(min_length=1, description="The name of an enabled component.")]

Count = Annotated[int, Meta(ge=1)]


# Timers of the system take no more.
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

PositiveSeconds = Annotated[float, Meta(gt=0, le=1e9)]
