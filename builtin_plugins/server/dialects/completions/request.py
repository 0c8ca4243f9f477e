"""The body of `/v1/completions`: prompts, embeddings of prompts and suffixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from hardpoint.builtin_plugins.server.config import ServerLimits
from hardpoint.builtin_plugins.server.requests.limit_errors import too_many_prompts
from hardpoint.builtin_plugins.server.routes.fields import (
    NO_TEMPLATE,
    TEXT_REFUSED,
    TextFields,
)
from hardpoint.plugins import RequestError

from .embedded_prompts import RawTensor, decoded

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


_PROMPT_SCHEMAS = [
    {"type": "string"},
    _IDS,
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    {"type": "array", "items": _IDS, "minItems": 1},
]
"""A schema that msgspec cannot derive: a union of lists."""


PromptInput = str | list[int] | dict[str, Any]
"""A prompt as the engine takes it."""


class CompletionRequest(TextFields):
    """Prompts to continue.

    Attributes:
        prompt: a text, token ids, or a list of texts or of lists of token ids. With
            `prompt_embeds`: none, or token ids with `prompt_is_token_ids`.
        max_tokens: 16 unless the model has a default; 0 with `echo` computes the prompt alone.
        logprobs: likeliest tokens per position.
        echo: whether answers begin with the prompt, and its log-probabilities with `logprobs`.
        add_special_tokens: whether those of the tokenizer are put before texts.
        suffix: text after the completion, for tokenizers with fill-in-the-middle tokens; prompts
            are texts then.
        prompt_embeds: embeddings in place of token ids, where `server.prompt_embeds` lets requests
            have some: base64 of safetensors with one tensor, "prompt_embeds", or an object of
            base64 numbers, dtype and shape; or a list of these, one per prompt.
        prompt_is_token_ids: for each of the token ids of `prompt` whether it is one; an embedding
            stands for each of the others, which are 0. Of several prompts, a list for each.
    """

    refused: ClassVar[Mapping[str, str]] = {
        **TEXT_REFUSED,
        **NO_TEMPLATE,
        "messages": "send them to /v1/chat/completions",
    }

    prompt: Annotated[Any, Meta(extra_json_schema={"anyOf": _PROMPT_SCHEMAS})] = msgspec.UNSET
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    suffix: str | None = None
    prompt_embeds: str | RawTensor | list[str | RawTensor] | None = None
    prompt_is_token_ids: list[bool | list[bool]] | None = None

    def embedded_prompts(
        self, limits: ServerLimits, *, allowed: bool
    ) -> list[dict[str, Any]] | None:
        """Return the prompts with their embeddings; None for prompts without any.

        Args:
            limits: limits of the server.
            allowed: whether the server lets requests have some.

        Raises:
            RequestError: it does not, or they are wrong, too many, or together with what needs ids.
        """
        embeds, mask, ids = self.prompt_embeds, self.prompt_is_token_ids, self.prompt
        if embeds is None and mask is None:
            return None
        if not allowed:
            raise RequestError(
                "prompt_embeds: expected none, this server takes no embeddings "
                "(server.prompt_embeds is false)"
            )
        if embeds is None:
            raise RequestError("prompt_is_token_ids: expected none without prompt_embeds")
        if self.echo:
            raise RequestError("echo: expected false with prompt_embeds, which have no text")
        if mask is None and ids is not msgspec.UNSET:
            raise RequestError(
                "prompt: expected none with prompt_embeds, or token ids with prompt_is_token_ids"
            )
        if not isinstance(embeds, list):
            rows = decoded(embeds, "prompt_embeds")
            return [_mixed(rows, ids, mask, "")]
        self._check_number("prompt_embeds", len(embeds), limits)
        for name, value in () if mask is None else (("prompt_is_token_ids", mask), ("prompt", ids)):
            if not isinstance(value, list) or len(value) != len(embeds):
                raise RequestError(
                    f"{name}: expected a list of {len(embeds)} lists, one for each of prompt_embeds"
                )
        tables = _of_one_width(
            [
                decoded(embedding, f"prompt_embeds[{index}]")
                for index, embedding in enumerate(embeds)
            ]
        )
        return [
            _mixed(
                table,
                ids if mask is None else ids[index],
                None if mask is None else mask[index],
                f"[{index}]",
            )
            for index, table in enumerate(tables)
        ]

    def prompts(self, limits: ServerLimits) -> list[str | list[int]]:
        """Return the prompts.

        Args:
            limits: limits of the server.

        Raises:
            RequestError: there are none, or too many, also together with `n`.
        """
        prompts = self._prompts()
        self._check_number("prompt", len(prompts), limits)
        for index, item in enumerate(prompts if prompts is self.prompt else ()):
            is_ids = isinstance(item, list) and all(type(token) is int for token in item)
            if not isinstance(item, str) and not is_ids:
                raise RequestError(f"prompt[{index}]: expected a text or a list of token ids")
        return prompts

    def check_suffix(self, prompts: Sequence[PromptInput]) -> None:
        """Check that prompts can be filled in before a suffix.

        Raises:
            RequestError: a prompt is no text, or the answer would begin with the prompt.
        """
        if self.echo:
            raise RequestError("echo: expected false with suffix, got true")
        if self.prompt_embeds is not None:
            raise RequestError("prompt_embeds: expected none with suffix")
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                place = f"[{index}]" if prompts is self.prompt else ""
                raise RequestError(f"prompt{place}: expected a text with suffix, got token ids")

    def _check_number(self, name: str, count: int, limits: ServerLimits) -> None:
        if not count:
            raise RequestError(f"{name}: expected at least one prompt, got an empty list")
        if count > limits.prompts:
            raise too_many_prompts(name, limits.prompts, count)
        n = self.n if isinstance(self.n, int) else 1
        limit = max(limits.prompts, limits.n)
        if 1 < n <= limits.n and count * n > limit:
            raise RequestError(
                f"{name} and n: expected at most {limit} completions on this server "
                f"(server.limits.prompts), got {count} prompts with n {n}"
            )

    def _prompts(self) -> list[str | list[int]]:
        prompts = self.prompt
        if prompts is msgspec.UNSET:
            raise RequestError("prompt: missing, and it has no default")
        if isinstance(prompts, str):
            return [prompts]
        if not isinstance(prompts, list):
            raise RequestError("prompt: expected a text, token ids, or a list of one of these")
        if prompts and all(type(item) is int for item in prompts):
            return [prompts]
        return prompts


def _of_one_width(tables: list[Any]) -> list[Any]:
    """Return embeddings of several prompts; refuse them before the first one begins.

    Raises:
        RequestError: one is of another width than the first one.
    """
    width = tables[0].shape[-1]
    for index, table in enumerate(tables):
        if table.shape[-1] != width:
            raise RequestError(
                f"prompt_embeds[{index}]: expected rows of {width} numbers, as prompt_embeds[0] "
                f"has, got {list(table.shape)}"
            )
    return tables


def _mixed(rows: Any, ids: Any, mask: Any, place: str) -> dict[str, Any]:
    """Return the prompt of embeddings, mixed with token ids if there is a mask.

    Args:
        place: the index of the prompt, as its fields have it in messages.

    Raises:
        RequestError: ids or mask are something else.
    """
    if mask is None:
        return {"prompt_embeds": rows}
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RequestError(f"prompt{place}: expected token ids with prompt_is_token_ids")
    if not isinstance(mask, list) or not all(type(item) is bool for item in mask):
        raise RequestError(f"prompt_is_token_ids{place}: expected a list of booleans")
    return {"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": mask}
