"""The roles of messages."""

from __future__ import annotations

from typing import Any

from hardpoint.errors import shown
from hardpoint.plugins import RequestError
from hardpoint.typed import suggest

__all__ = ["with_role"]

_ROLES = ["system", "developer", "user", "assistant", "tool"]


def with_role(message: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a message whose role is one that the server takes.

    A role that is not a string is left to the tokenizer.

    Raises:
        RequestError: there is no such role.
    """
    role = message.get("role")
    if isinstance(role, str) and role not in _ROLES:
        known = ", ".join(f'"{name}"' for name in _ROLES)
        raise RequestError(
            f"{path}.role: expected one of {known}, got {shown(role)}{suggest(role, _ROLES)}"
        )
    return message
