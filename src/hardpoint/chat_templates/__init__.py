"""Chat templates, and the roles of messages that they render."""

from __future__ import annotations

from typing import Any

from hardpoint.errors import shown
from hardpoint.plugins import RequestError, Tokenizer
from hardpoint.typed import suggest

__all__ = ["named_template", "shows_tools", "with_role"]

_ROLES = ["system", "developer", "user", "assistant", "tool"]


def with_role(message: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a message with a role that the server takes.

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


def named_template(tokenizer: Tokenizer, name: Any) -> str | None:
    """Return the chat template of a name; None without a name.

    Raises:
        RequestError: the model has none of that name.
    """
    if name is None:
        return None
    known = tokenizer.chat_templates
    if not isinstance(name, str) or name not in known:
        raise RequestError(
            f"chat_template: expected the name of a template of the model "
            f"({', '.join(known) or 'it has none'}), got {shown(name)}; templates themselves come "
            f"from the operator alone"
        )
    return known[name]


def shows_tools(tokenizer: Tokenizer, template: str | None) -> bool:
    """Return whether the chat template of conversations with tools shows them to the model.

    A tokenizer without texts of templates renders them in a way of its own, and gets the tools.

    Args:
        template: text of the template that a request names; None is the tokenizer's choice.
    """
    texts = tokenizer.chat_templates.values() if template is None else [template]
    return not texts or any("tools" in text for text in texts)
