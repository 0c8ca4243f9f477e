"""Speculation in the frontend: checks which speculator a request names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.errors import RequestError
from hardpoint.plugins import EngineCoreRequest, FrontendHalf, ReasoningMarkers

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.components import ComponentFactory

KIND = "speculators"

NONE = "none"
"""In place of a speculator's name: no drafts."""


class DraftedRequests(FrontendHalf):
    """Checks that the speculator of a request is enabled."""

    for_parameters = ("speculator",)

    def __init__(self, components: ComponentFactory) -> None:
        self._components = components

    def prepare(self, request: EngineCoreRequest, reasoning: ReasoningMarkers | None) -> None:  # noqa: ARG002
        """Check the speculator of a request.

        Raises:
            RequestError: it is not enabled.
        """
        name = request.params.speculator
        if name is None or name == NONE:
            return
        if name not in (known := self._components.enabled(KIND)):
            expected = f"an enabled speculator ({', '.join(sorted(known))})"
            raise RequestError(
                f'speculator: expected "{NONE}"{f" or {expected}" if known else ""}, got {name!r}'
                f"{self._components.hint(KIND, name)}"
            )
