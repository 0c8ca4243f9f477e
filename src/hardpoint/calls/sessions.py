"""Sessions of LLM and AsyncLLM: conversations with retained blocks."""

from __future__ import annotations

from typing import Any, Literal

from hardpoint.errors import shown
from hardpoint.plugins import RequestError

__all__ = ["RELEASE", "Released", "release_arguments"]

Released = Literal["accepted", "missing"]

RELEASE = ("retention", "release")
"""The step part that retains blocks, and its method."""


def release_arguments(session: Any, cache_salt: Any) -> dict[str, Any]:
    """Return the arguments of the method `RELEASE`.

    Raises:
        RequestError: an argument is not a text.
    """
    for name, value in (("session", session), ("cache_salt", cache_salt)):
        if not isinstance(value, str) and not (name == "cache_salt" and value is None):
            raise RequestError(f"{name}: expected a text, got {shown(value)}")
    return {"session": session, "cache_salt": cache_salt}
