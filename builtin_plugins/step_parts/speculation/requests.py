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
    """Checks that the speculator of a request is enabled, and has figures to include."""

    for_parameters = ("speculator", "include")

    def __init__(self, part: str, components: ComponentFactory) -> None:
        """`part`: name of the step part in `include`."""
        self._part, self._components = part, components

    def prepare(self, request: EngineCoreRequest, reasoning: ReasoningMarkers | None) -> None:  # noqa: ARG002
        """Check the speculator of a request.

        Raises:
            RequestError: it is not enabled, or the request includes figures without drafts.
        """
        name, included = request.params.speculator, request.params.include
        known = self._components.enabled(KIND)
        if name is not None and name not in (NONE, *known):
            expected = f"an enabled speculator ({', '.join(sorted(known))})"
            alternative = f" or {expected}" if known else ", because speculation.use is empty"
            raise RequestError(
                f'speculator: expected "{NONE}"{alternative}, got {name!r}'
                f"{self._components.hint(KIND, name)}"
            )
        if self._part in included and (not known or name == NONE):
            why = f'its speculator is "{NONE}"' if known else "speculation.use is empty"
            raise RequestError(
                f"include: expected no {self._part!r} in a request without drafts ({why}), "
                f"got {included!r}"
            )
