"""The load of an engine, in tokens."""

from __future__ import annotations

from typing import Annotated

from hardpoint import plugins
from hardpoint.plugins import Meta


class LoadOptions(plugins.Options):
    """Weights of an engine's load.

    Attributes:
        in_flight_tokens: prompt tokens that a request in flight counts as, for the work of its
            output, in addition to its own pending ones. 0 compares engines by prompts
            alone.
    """

    in_flight_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 64
