"""Options of conversations that stay open, and the parts of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from hardpoint import typed
from hardpoint.core.frontend.requests.input_processor import checked_ids, read_prompt
from hardpoint.plugins import RequestError, SamplingParams
from hardpoint.plugins.request_options import RequestOptions
from hardpoint.plugins.requests import Prompt

__all__ = ["ConversationOptions", "PromptPart", "check_options", "read_part"]

_PARTS = "parts of a conversation that stays open are texts and token ids"


class ConversationOptions(RequestOptions, total=False):
    """RequestOptions of each turn of a conversation that stays open, and its tools.

    Attributes:
        tools, tool_choice, parallel_tool_calls: as in ChatOptions; the parts have to show the tools
            to the model, as no chat template does.
    """

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, str]
    parallel_tool_calls: bool


class PromptPart(msgspec.Struct, frozen=True):
    """A part of a prompt that goes on.

    Attributes:
        prompt: a prompt as for `generate`; without tokens, it begins no turn.
        sampling_params: parameters of this turn and later ones; None keeps those of the turn
            before.
        commit: whether it begins a turn; if not, it is computed with the parts after it.
    """

    prompt: Prompt
    sampling_params: SamplingParams | None = None
    commit: bool = True


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a conversation's turns.

    Raises:
        RequestError: one would change the prompt of earlier turns.
    """
    if (last := options.get("truncate_prompt_tokens")) is not None:
        raise RequestError(
            "truncate_prompt_tokens: expected none in a conversation, which keeps all its tokens, "
            f"got {last!r}"
        )


def read_part(prompt: Prompt, vocab_size: int) -> str | list[int]:
    """Return a part's text, or its checked token ids.

    Raises:
        RequestError: it is no prompt, has more than text or token ids, or options of its own.
    """
    try:
        parsed = read_prompt(prompt)
    except RequestError as error:
        if isinstance(prompt, Mapping):
            raise type(error)(f"{error}; {_PARTS}") from error
        raise
    options = {name: getattr(parsed, name) for name in ("cache_salt", "arrival_time")}
    if isinstance(prompt, Mapping):
        options["output_token_ids"] = dict(prompt).get("output_token_ids")
    for name, value in options.items():
        if value is not None:
            raise RequestError(
                f"prompt.{name}: expected none in a part, because the conversation has its own, "
                f"got {value!r}"
            )
    if parsed.token_ids is not None or parsed.text is None:
        return checked_ids(parsed.token_ids, vocab_size)
    typed.check_text(parsed.text, "prompt", RequestError)
    return parsed.text
