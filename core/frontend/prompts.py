"""The forms of prompts, and the checks of their tokens and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from hardpoint.plugins import EngineCoreRequest, RequestError, SamplingParams, typed
from hardpoint.plugins.typed import join_path

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; or, tokenised elsewhere,
`{"type": "token", "prompt_token_ids": ids}` with optional `prompt`, `cache_salt` and
`arrival_time`."""

_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt, independent of the form that it was given in.

    Attributes:
        text: of the prompt, if known.
        token_ids: unchecked; None if the text is to be tokenised.
        cache_salt: used if the request has none.
        arrival_time: seconds on the frontend's clock, used if the request has none.
    """

    text: str | None = None
    token_ids: Any = None
    cache_salt: str | None = None
    arrival_time: float | None = None


class _TokenInput(typed.Strict):
    """A prompt that was tokenised elsewhere."""

    type: Literal["token"]
    prompt_token_ids: list[int]
    prompt: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    arrival_time: float | None = None


def read_prompt(prompt: Prompt) -> ReadPrompt:
    """Return a prompt in its independent form.

    Raises:
        RequestError: a mapping of another form, or a list of prompts.
    """
    if isinstance(prompt, str):
        return ReadPrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        _check_one(prompt)
        return ReadPrompt(token_ids=prompt)
    if "type" in prompt:
        return _tokenised(prompt)
    keys = [key for key in _KEYS if key in prompt]
    if len(keys) != 1 or len(prompt) != 1:
        raise RequestError(
            "prompt: expected a mapping with either 'prompt' or 'prompt_token_ids', "
            f"got the keys {sorted(map(str, prompt))}"
        )
    value = prompt[keys[0]]
    if keys[0] == "prompt_token_ids":
        return ReadPrompt(token_ids=_listed(value))
    if not isinstance(value, str):
        raise RequestError(f"prompt: expected a string, got {type(value).__name__}")
    return ReadPrompt(text=value)


def _check_one(prompt: Any) -> None:
    first = prompt[0] if _is_list(prompt) and prompt else None
    if isinstance(first, str | Mapping) or _is_list(first):
        what = "texts" if isinstance(first, str) else "prompts"
        raise RequestError(f"prompt: expected one prompt, got a list of {what}")


def _tokenised(prompt: Mapping[str, Any]) -> ReadPrompt:
    # The ids, which may be many, are checked once, with those of all other prompts.
    rest = {key: [] if key == "prompt_token_ids" else value for key, value in prompt.items()}
    checked = typed.convert(rest, _TokenInput, path="prompt", error=RequestError)
    token_ids = _listed(prompt["prompt_token_ids"])
    return ReadPrompt(checked.prompt, token_ids, checked.cache_salt, checked.arrival_time)


def _listed(token_ids: Any) -> Any:
    if not _is_list(token_ids):
        raise RequestError(
            f"prompt_token_ids: expected a list of token ids, got {type(token_ids).__name__}"
        )
    return token_ids


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def checked_ids(token_ids: Any, vocab_size: int) -> list[int]:
    """Return checked token ids as a new list.

    Raises:
        RequestError: naming the item that is no token id.
    """
    if not _is_list(token_ids):
        raise RequestError(
            f"prompt: expected text or a list of token ids, got {type(token_ids).__name__}"
        )
    for index, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt_token_ids[{index}]: expected a whole number from 0 to "
                f"{vocab_size - 1}, got {token!r}"
            )
    return list(token_ids)


def check_text(value: Any, path: str) -> None:
    r"""Check that UTF-8 can encode a text, which it cannot if half of a surrogate pair is in it.

    Args:
        value: plain data; texts in it are checked at any depth, keys too.
        path: of the field, for the error.

    Raises:
        RequestError: such as `cache_salt: expected text that UTF-8 can hold, got '\ud800' at
            character 4`.
    """
    if isinstance(value, str):
        _check_encodable(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                _check_encodable(key, f"{path}, a key")
            check_text(item, join_path(path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_text(item, f"{path}[{index}]")


def check_text_fields(struct: Any, fields: Sequence[str]) -> None:
    """Check the texts of some fields of a structure, as `check_text`.

    Raises:
        RequestError: naming the field.
    """
    for field in fields:
        if value := getattr(struct, field):
            check_text(value, field)


def check_params_text(params: SamplingParams) -> None:
    """Check the texts of sampling parameters, as `check_text`.

    Raises:
        RequestError: naming the field.
    """
    check_text_fields(params, ("stop", "bad_words", "plugin_args"))


def check_request_text(request: EngineCoreRequest) -> None:
    """Check the texts of a prebuilt request, as `check_text`.

    Raises:
        RequestError: naming the field.
    """
    check_params_text(request.params)
    fields = ("tags", "cache_salt", "plugin_args", "kv_transfer_params", "trace_headers")
    check_text_fields(request, fields)


def _check_encodable(text: str, path: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(
            f"{path}: expected text that UTF-8 can hold, got {text[cause.start]!r} at "
            f"character {cause.start}"
        ) from None
