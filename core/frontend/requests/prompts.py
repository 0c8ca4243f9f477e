"""The forms of prompts, and the checks of their tokens and texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from hardpoint import typed
from hardpoint.errors import shown
from hardpoint.plugins import RequestError, SamplingParams
from hardpoint.plugins.frontend_half import GivenPrompt
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.tokenizer import EncodedPair
from hardpoint.registry.blame import describe

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; or, tokenised elsewhere,
`{"type": "token", "prompt_token_ids": ids}` with optional `prompt`, `cache_salt` and
`arrival_time`; of what reads two texts together, `{"text": text, "text_pair": text}`; or a mapping
that a step part reads. A mapping may have `multi_modal_data`, items by modality, besides; one with
token ids also `output_token_ids`, after which its completions go on: for each a list, or None for
one that has ended."""

Params = SamplingParams | PoolingParams
"""What is to be made of a prompt: tokens that follow it, or vectors."""

Tokens = list[int] | EncodedPair
"""The tokens of a prompt given as text, or of a pair of texts."""

_KEYS = ("prompt", "prompt_token_ids")
_PAIR_KEYS = ("text", "text_pair")
_MEDIA = "multi_modal_data"
OUTPUTS = "output_token_ids"
"""Key of a prompt's outputs so far, by completion."""
_BESIDES = (_MEDIA, OUTPUTS)


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt, independent of the form that it was given in.

    Attributes:
        text: text of the prompt, if known.
        pair: a pair of texts; None if it is one prompt.
        token_ids: unchecked; None if the text is to be tokenised.
        cache_salt: used if the request has none.
        arrival_time: seconds on the frontend's clock, used if the request has none.
        fields: fields of the request that a step part has read.
        media: items by modality, for the placeholders of the prompt; unchecked. None: there are
            none, and no token is a placeholder.
        outputs: the output so far of each completion; unchecked. None: all are new.
    """

    text: str | None = None
    pair: tuple[str, str] | None = None
    token_ids: Any = None
    cache_salt: str | None = None
    arrival_time: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    media: Mapping[str, Sequence[Any]] | None = None
    outputs: Any = None

    @classmethod
    def of(cls, given: GivenPrompt) -> ReadPrompt:
        """Return a prompt that a step part has read."""
        return cls(
            text=given.text,
            token_ids=given.token_ids,
            cache_salt=given.cache_salt,
            arrival_time=given.arrival_time,
            fields=given.fields,
        )


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
        token_ids = copied(prompt, "prompt") if is_list(prompt) else prompt
        _check_one(token_ids)
        return ReadPrompt(token_ids=token_ids)
    given: dict[Any, Any] = copied(prompt, "prompt")
    if not given.keys().isdisjoint(_BESIDES):
        return _with_more(given)
    if "type" in given:
        return _tokenised(given)
    if not given.keys().isdisjoint(_PAIR_KEYS):
        return _pair(given)
    keys = [key for key in _KEYS if key in given]
    if len(keys) != 1 or len(given) != 1:
        raise RequestError(
            "prompt: expected a mapping with either 'prompt' or 'prompt_token_ids', "
            f"got the keys [{', '.join(sorted(map(shown, given)))}]"
        )
    value = given[keys[0]]
    if keys[0] == "prompt_token_ids":
        return ReadPrompt(token_ids=_listed(value))
    if not isinstance(value, str):
        raise RequestError(f"prompt: expected a string, got {type(value).__name__}")
    return ReadPrompt(text=value)


def _with_more(given: dict[Any, Any]) -> ReadPrompt:
    """Return a prompt with what it has besides its text or token ids."""
    read = read_prompt({key: value for key, value in given.items() if key not in _BESIDES})
    outputs = given.get(OUTPUTS)
    if outputs is not None and read.token_ids is None:
        raise RequestError(f"{OUTPUTS}: expected prompt_token_ids with it, got a text")
    media = _listed_media(given.get(_MEDIA)) or None
    return dataclasses.replace(read, media=media, outputs=outputs)


def _listed_media(value: Any) -> dict[str, list[Any]]:
    """Return media by modality, each as a list; one item alone is a list of it.

    Raises:
        RequestError: they are no mapping.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{_MEDIA}: expected a mapping such as {{'image': [...]}}, got {type(value).__name__}"
        )
    media: dict[str, list[Any]] = {}
    for modality, items in copied(value, _MEDIA).items():
        if not isinstance(modality, str):
            raise RequestError(f"{_MEDIA}: expected modalities as strings, got {shown(modality)}")
        media[modality] = copied(items, f"{_MEDIA}.{modality}") if is_list(items) else [items]
    return {modality: list(items) for modality, items in media.items() if items}


def _check_one(prompt: Any) -> None:
    first = prompt[0] if is_list(prompt) and prompt else None
    if isinstance(first, str | Mapping) or is_list(first):
        what = "texts" if isinstance(first, str) else "prompts"
        raise RequestError(f"prompt: expected one prompt, got a list of {what}")


def _tokenised(prompt: dict[Any, Any]) -> ReadPrompt:
    # The ids, which may be many, are checked once, with those of all other prompts.
    rest = {key: [] if key == "prompt_token_ids" else value for key, value in prompt.items()}
    checked = typed.convert(rest, _TokenInput, path="prompt", error=RequestError)
    token_ids = _listed(prompt["prompt_token_ids"])
    return ReadPrompt(checked.prompt, None, token_ids, checked.cache_salt, checked.arrival_time)


def _pair(prompt: dict[Any, Any]) -> ReadPrompt:
    if set(prompt) != set(_PAIR_KEYS):
        raise RequestError(
            "prompt: expected a mapping with either 'prompt' or 'prompt_token_ids', or a pair with "
            f"'text' and 'text_pair', got the keys [{', '.join(sorted(map(shown, prompt)))}]"
        )
    for key in _PAIR_KEYS:
        if not isinstance(prompt[key], str):
            raise RequestError(f"{key}: expected a text, got {shown(prompt[key])}")
        if not prompt[key]:
            raise RequestError(f"{key}: expected a text that is not empty")
        typed.check_text(prompt[key], key, RequestError)
    return ReadPrompt(pair=(prompt["text"], prompt["text_pair"]))


def _listed(token_ids: Any) -> Any:
    if not is_list(token_ids):
        raise RequestError(
            f"prompt_token_ids: expected a list of token ids, got {type(token_ids).__name__}"
        )
    return copied(token_ids, "prompt_token_ids")


def is_list(value: Any) -> bool:
    """Return whether a value is a sequence of items, which text and bytes are not."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def copied(value: Any, path: str) -> Any:
    """Return a caller's sequence as a list, or its mapping as a dict; one of these types as it is.

    Its own methods, which may raise anything, are called here and nowhere later.

    Raises:
        RequestError: reading it failed.
    """
    if type(value) in (list, dict):
        return value
    try:
        return dict(value) if isinstance(value, Mapping) else list(value)
    except Exception as cause:
        raise RequestError(f"{path}: reading it failed: {describe(cause)}") from cause


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
