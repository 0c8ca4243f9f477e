"""Prompt embeddings in the frontend: the forms of prompts that have some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.errors import RequestError, shown
from hardpoint.plugins import EngineCoreRequest, FrontendHalf, ReasoningMarkers
from hardpoint.plugins.step_part import (
    GivenPrompt,
)
from hardpoint.toolkit.half_floats import float32_of

from .rows import Rows, check_mask, rows_of, rows_of_request

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.part import PromptReader


NAME = "prompt_embeddings"
FIELDS = ("prompt_embeds", "prompt_is_token_ids")

_OFF = f"expected token ids, this engine takes no embeddings (plugin.{NAME}.enabled is false)"
_PARTS = "prompt_parts"
_MIXED = {"prompt_token_ids", *FIELDS}


class RefusedEmbeddings(FrontendHalf):
    """Refuses prompts with embeddings, of an engine that takes none."""

    prompt_keys = (*FIELDS, _PARTS)

    def read_prompt(self, prompt: Mapping[str, Any], reader: PromptReader) -> GivenPrompt:  # noqa: ARG002
        """Refuse a prompt.

        Raises:
            RequestError: always.
        """
        raise RequestError(f"{min(prompt.keys() & set(self.prompt_keys))}: {_OFF}")


class EmbeddedRequests(FrontendHalf):
    """Reads prompts with embeddings, and checks their requests."""

    for_fields = ("prompt_embeds", "prompt_is_token_ids")
    prompt_keys = RefusedEmbeddings.prompt_keys

    def __init__(self, width: int | None, max_bytes: int) -> None:
        """Read prompts of a model.

        Args:
            width: hidden size of the model; None if its config has none, so that the engine checks.
            max_bytes: bytes of the rows of a prompt, at most.
        """
        self._width, self._max_bytes = width, max_bytes

    def read_prompt(self, prompt: Mapping[str, Any], reader: PromptReader) -> GivenPrompt:
        """Return ids and rows of a prompt.

        Raises:
            RequestError: it is of no form, or a value is wrong.
        """
        keys = set(prompt)
        if keys == {_PARTS}:
            return self._of_parts(prompt[_PARTS], reader)
        if keys not in ({"prompt_embeds"}, _MIXED):
            raise RequestError(
                "prompt: expected a mapping with 'prompt_embeds' alone, with 'prompt_embeds', "
                "'prompt_token_ids' and 'prompt_is_token_ids', or with 'prompt_parts' alone, got "
                f"the keys [{', '.join(sorted(map(shown, keys)))}]"
            )
        rows = rows_of(prompt["prompt_embeds"], "prompt_embeds", self._width, self._max_bytes)
        if keys == {"prompt_embeds"}:
            return GivenPrompt(token_ids=[0] * len(rows), fields={"prompt_embeds": rows})
        ids, mask = prompt["prompt_token_ids"], prompt["prompt_is_token_ids"]
        if not _is_list(ids):
            raise RequestError(
                f"prompt_token_ids: expected a list of token ids, got {type(ids).__name__}"
            )
        ids = list(ids)
        mask = list(mask) if _is_list(mask) else mask
        if mask is None:
            raise RequestError("prompt_is_token_ids: expected a list of booleans, got None")
        check_mask(ids, mask, len(rows))
        ids = [token if known else 0 for token, known in zip(ids, mask, strict=True)]
        return _given(ids, mask, rows)

    def _of_parts(self, parts: Any, reader: PromptReader) -> GivenPrompt:
        """Return the prompt of pieces: texts, lists of token ids, and rows."""
        if not _is_list(parts) or not parts:
            raise RequestError(f"{_PARTS}: expected a list of parts, got {shown(parts)}")
        ids: list[int] = []
        mask: list[bool] = []
        pieces: list[Rows] = []
        for index, part in enumerate(parts):
            if isinstance(part, str):
                new = reader.tokenise(part, add_special_tokens=index == 0)
            elif _is_list(part):
                new = _checked_ids(part, f"{_PARTS}[{index}]")
            else:
                left = self._max_bytes - sum(4 * rows.size for rows in pieces)
                pieces.append(rows_of(part, f"{_PARTS}[{index}]", self._width, left))
                new = [0] * len(pieces[-1])
                mask += [False] * len(new)
            ids += new
            mask += [True] * (len(ids) - len(mask))
        if not pieces:
            return GivenPrompt(token_ids=ids)
        return _given(ids, mask, self._joined(pieces))

    def _joined(self, pieces: Sequence[Rows]) -> Rows:
        if len(pieces) == 1:
            return pieces[0]
        widths = {rows.shape[1] for rows in pieces}
        if len(widths) > 1:
            raise RequestError(f"{_PARTS}: expected rows of one width, got {sorted(widths)}")
        if len({rows.dtype for rows in pieces}) > 1:
            pieces = list(map(float32_of, pieces))
        joined = np.concatenate(pieces)
        joined.flags.writeable = False
        return joined

    def prepare(self, request: EngineCoreRequest, reasoning: ReasoningMarkers | None) -> None:  # noqa: ARG002
        """Check a request with embeddings; its rows become an array of its own.

        Raises:
            RequestError: a value is wrong, or it uses a feature that needs ids.
        """
        check_together(request)
        rows = rows_of_request(request.prompt_embeds, "prompt_embeds", self._width, self._max_bytes)
        check_mask(request.prompt_token_ids, request.prompt_is_token_ids, len(rows))
        request.prompt_embeds = rows


def check_together(request: EngineCoreRequest) -> None:
    """Check that a request asks for nothing that embeddings cannot be together with.

    Raises:
        RequestError: it does; names the field.
    """
    if request.prompt_embeds is None:
        raise RequestError("prompt_is_token_ids: expected none without prompt_embeds")
    if (count := request.params.prompt_logprobs) is not None:
        raise RequestError(
            "prompt_logprobs: expected none with prompt_embeds, which are no tokens with a "
            f"log-probability, got {count}"
        )
    if request.resumable:
        raise RequestError("resumable: expected false with prompt_embeds, got true")


def _given(ids: list[int], mask: list[bool], rows: Rows) -> GivenPrompt:
    fields: dict[str, Any] = {"prompt_embeds": rows}
    if any(mask):
        fields["prompt_is_token_ids"] = mask
    return GivenPrompt(token_ids=ids, fields=fields)


def _checked_ids(part: Sequence[Any], path: str) -> list[int]:
    for index, token in enumerate(part):
        if type(token) is not int or token < 0:
            raise RequestError(f"{path}[{index}]: expected a token id, got {shown(token)}")
    return list(part)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
