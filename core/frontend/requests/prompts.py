"""The forms of prompts, and the checks of their tokens and texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from hardpoint import typed
from hardpoint.errors import shown
from hardpoint.plugins import RequestError, SamplingParams
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import Prompt as Prompt
from hardpoint.plugins.step_part.part import GivenPrompt
from hardpoint.typed import copied, is_list

Params = SamplingParams | PoolingParams
"""What is to be made of a prompt: tokens that follow it, or vectors."""

_KEYS = ("prompt", "prompt_token_ids")
OUTPUTS = "output_token_ids"
"""Key of a prompt's outputs so far, by completion: for each a list, or None for one that has ended;
with token ids alone."""


class _TokenInput(typed.Strict):
    """A prompt that was tokenised elsewhere."""

    type: Literal["token"]
    prompt_token_ids: list[int]
    prompt: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    arrival_time: float | None = None


def read_prompt(prompt: Prompt) -> GivenPrompt:
    """Return a prompt of a form that no part has for its own, independent of it.

    These are text, token ids, `{"prompt": text}` and `{"prompt_token_ids": ids}`; or, tokenised
    elsewhere, `{"type": "token", "prompt_token_ids": ids}` with optional `prompt`, `cache_salt` and
    `arrival_time`.

    Returns:
        Its `token_ids` are unchecked; None if the text is to be tokenised.

    Raises:
        RequestError: a mapping of another form, or a list of prompts.
    """
    if isinstance(prompt, str):
        return GivenPrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        token_ids = copied(prompt, "prompt") if is_list(prompt) else prompt
        _check_one(token_ids)
        return GivenPrompt(token_ids=token_ids)
    given: dict[Any, Any] = copied(prompt, "prompt")
    if OUTPUTS in given:
        return _with_outputs(given)
    if "type" in given:
        return _tokenised(given)
    keys = [key for key in _KEYS if key in given]
    if len(keys) != 1 or len(given) != 1:
        raise RequestError(
            "prompt: expected a mapping with either 'prompt' or 'prompt_token_ids', "
            f"got the keys [{', '.join(sorted(map(shown, given)))}]"
        )
    value = given[keys[0]]
    if keys[0] == "prompt_token_ids":
        return GivenPrompt(token_ids=_listed(value))
    if not isinstance(value, str):
        raise RequestError(f"prompt: expected a string, got {type(value).__name__}")
    return GivenPrompt(text=value)


def _with_outputs(given: dict[Any, Any]) -> GivenPrompt:
    read = read_prompt({key: value for key, value in given.items() if key != OUTPUTS})
    if given[OUTPUTS] is not None and read.token_ids is None:
        raise RequestError(f"{OUTPUTS}: expected prompt_token_ids with it, got a text")
    return read


def _check_one(prompt: Any) -> None:
    first = prompt[0] if is_list(prompt) and prompt else None
    if isinstance(first, str | Mapping) or is_list(first):
        what = "texts" if isinstance(first, str) else "prompts"
        raise RequestError(f"prompt: expected one prompt, got a list of {what}")


def _tokenised(prompt: dict[Any, Any]) -> GivenPrompt:
    # The ids, which may be many, are checked once, with those of all other prompts.
    rest = {key: [] if key == "prompt_token_ids" else value for key, value in prompt.items()}
    checked = typed.convert(rest, _TokenInput, path="prompt", error=RequestError)
    token_ids = _listed(prompt["prompt_token_ids"])
    return GivenPrompt(
        token_ids=token_ids,
        text=checked.prompt,
        cache_salt=checked.cache_salt,
        arrival_time=checked.arrival_time,
    )


def _listed(token_ids: Any) -> Any:
    if not is_list(token_ids):
        raise RequestError(
            f"prompt_token_ids: expected a list of token ids, got {type(token_ids).__name__}"
        )
    return copied(token_ids, "prompt_token_ids")


def checked_ids(token_ids: Any, vocab_size: int) -> list[int]:
    """Return checked token ids as a new list.

    Raises:
        RequestError: naming the item that is no token id.
    """
    if not is_list(token_ids):
        raise RequestError(
            f"prompt: expected text or a list of token ids, got {type(token_ids).__name__}"
        )
    for index, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt_token_ids[{index}]: expected a whole number from 0 to "
                f"{vocab_size - 1}, got {shown(token)}"
            )
    return list(token_ids)
