"""Chat templates: the messages are checked, then rendered by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.plugins import RequestError


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    template: str,
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, str],
) -> str:
    """Return the prompt text for a conversation.

    Args:
        messages: mappings with `role` and `content`.
        template: Jinja source; it runs in a sandbox.
        add_generation_prompt: whether the text ends with the beginning of the assistant's message.
        variables: further variables of the template, such as `bos_token`.

    Raises:
        RequestError: the messages are malformed or the template rejects them.
    """
    checked = _check(messages)
    # Imported on use: importing transformers takes seconds, and plain prompts do not need it.
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

    try:
        rendered, _ = render_jinja_template(
            [checked],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except Exception as cause:  # a template is a program: it can raise anything
        raise RequestError(f"messages: the chat template refuses them: {cause}") from cause
    return str(rendered[0])


def _check(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f'messages: expected a list of {{"role": ..., "content": ...}}, got {messages!r}'
        )
    if not messages:
        raise RequestError("messages: expected at least one message, got an empty list")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f'{where}: expected {{"role": ..., "content": ...}}, got {message!r}'
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"{where}.role: expected a string such as 'user', got {message.get('role')!r}"
            )
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise RequestError(f"{where}.content: expected a string, got {content!r}")
    return [dict(message) for message in messages]
