"""Messages and variables of chat templates in the forms that vLLM takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint_vllm.tokenizers import used_variables

from hardpoint.errors import RequestError

_log = logging.getLogger("hardpoint.vllm")


def is_single(messages: Any) -> bool:
    """Return whether this is one conversation, not a list of conversations."""
    return bool(messages) and not isinstance(messages[0], Sequence)


def plain_messages(messages: Any) -> Any:
    """Return conversations with messages as tables and a content that is not None.

    vLLM takes objects of OpenAI's client, and messages with calls of tools alone.
    """
    if not messages:
        return messages
    if not is_single(messages):
        return [plain_messages(conversation) for conversation in messages]
    return [_plain(message) for message in messages]


def _plain(message: Any) -> Any:
    if hasattr(message, "model_dump"):
        message = message.model_dump(exclude_none=True)
    if not isinstance(message, Mapping) or message.get("content", "") is not None:
        return message
    return {**message, "content": ""}


def plain_texts(data: Any) -> Any:
    """Return texts to score, which vLLM also takes as content parts: `{"content": [...]}`.

    Raises:
        RequestError: a part is no text.
    """
    if isinstance(data, list | tuple):
        return [plain_texts(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    texts: list[str] = []
    for part in data.get("content", ()):
        if not isinstance(part, Mapping) or "text" not in part:
            raise RequestError(f"content: expected parts of text to score, got {part!r}")
        texts.append(str(part["text"]))
    return "\n".join(texts)


def checked_variables(template: str | None, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables that a chat template has; log others, which vLLM drops, too."""
    named = dict(variables or {})
    if template is None:
        return named
    used = used_variables(template, named)
    if unused := sorted(named.keys() - used.keys()):
        _log.warning("chat_template_kwargs: the template has no %s", ", ".join(unused))
    return used
