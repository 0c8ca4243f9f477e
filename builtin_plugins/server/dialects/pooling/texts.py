"""The texts of a request and the results of the engine for them."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.builtin_plugins.server.dialects.chat.request import plain_messages
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.routes.answers import answer_ids
from hardpoint.builtin_plugins.server.routes.compatibility_fields import check_truncation_side
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import RequestError
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.server import Call

if TYPE_CHECKING:
    from hardpoint.plugins.requests.outputs import PoolingRequestOutput

from .request import MAX_INPUTS, EmbeddingsRequest, PooledFields, PooledUsage

_SPECIAL_TOKENS = 8
"""Most special tokens that a tokenizer adds to a text."""


class TextPooler:
    """Pools the texts of requests, and puts the prompts of the model before them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._prompts: dict[tuple[str, str | None], str] = {}

    async def results(
        self, call: Call, body: PooledFields, inputs: Any, params: PoolingParams
    ) -> list[PoolingRequestOutput]:
        """Return the results of a request's `input`, in its order, for a route of another file.

        Raises:
            RequestError: a text is wrong or refused; the message has its place.
            AnswerError: one ended without a result.
        """
        return await self.pool(call, body, places_of(inputs, "input"), params)

    async def conversation(self, body: EmbeddingsRequest) -> list[int]:
        """Return the token ids of a conversation by the chat template.

        Raises:
            RequestError: the model has no template, or the conversation is malformed.
        """
        model, messages = self._service.engine.model, plain_messages(body.messages or ())
        self._service.check_prompt(messages, name="messages")
        rendered = await model.apply_chat_template(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template or None,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        if "multi_modal_data" in rendered:
            raise RequestError("messages: expected texts, because images cannot be embedded")
        return await model.prompt_tokens(rendered)

    @property
    def reads_pairs(self) -> bool:
        """Whether the model scores pairs of texts, and embeds no texts."""
        return "embed" not in self._service.engine.model.supported_tasks

    async def pair_scores(
        self,
        call: Call,
        body: PooledFields,
        first: dict[str, Any],
        second: dict[str, Any],
        **fields: Any,
    ) -> tuple[list[float], list[PoolingRequestOutput]]:
        """Return how well texts match that are read in pairs; one with all others, if it is one.

        Raises:
            RequestError: one is no text; or as `pool`.
        """
        for place, text in (first | second).items():
            if not isinstance(text, str):
                raise RequestError(
                    f"{place}: expected a text, for the model reads texts in pairs, got token ids"
                )
        await self.add_prefix(first, "name", None)
        before = list(first.values())
        pairs = {
            place: {"text": before[index % len(before)], "text_pair": text}
            for index, (place, text) in enumerate(second.items())
        }
        params = pooling_params(body, "score", **fields)
        outputs = await self.pool(call, body, pairs, params, originals=first | second)
        return [float(output.outputs) for output in outputs], outputs

    async def add_prefix(self, texts: dict[str, Any], kind: str, name: str | None) -> None:
        """Put the model's prompt before texts; token ids are left as they are.

        Raises:
            RequestError: the model has no prompt of that name.
        """
        if not {"embed", "score"}.intersection(self._service.engine.model.supported_tasks):
            return  # which is the error of the request itself
        key = "purpose" if kind == "purpose" else "name"
        if (key, name) not in self._prompts:
            prompt = await self._service.engine.plugins.call_part("pooling", "prompt", {key: name})
            self._prompts[key, name] = prompt
        if prefix := self._prompts[key, name]:
            for place, text in texts.items():
                if isinstance(text, str):
                    texts[place] = prefix + text

    async def without_ends(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return texts, and the first token ids of texts that are longer than the context.

        Special tokens that the tokenizer adds at the end of a text stay there.
        """
        engine = self._service.engine
        limit = engine.config.max_model_len
        inputs: dict[str, Any] = dict(texts)
        for place, text in texts.items():
            # A token has at least one byte, except special ones.
            if isinstance(limit, int) and len(text.encode()) > limit - _SPECIAL_TOKENS:
                ids = await engine.model.tokenize(text)
                content = await engine.model.tokenize(text, add_special_tokens=False)
                if len(ids) > limit:
                    end = _num_after(ids, content)
                    inputs[place] = ids[: limit - end] + ids[len(ids) - end :]
        return inputs

    async def pool(
        self,
        call: Call,
        body: PooledFields,
        texts: Mapping[str, Any],
        params: PoolingParams,
        originals: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the results of texts, by the name of their place in the request, in their order.

        Args:
            originals: texts of the request, where those have some of them several times.

        Raises:
            RequestError: one is refused; the message has its place. None runs.
            AnswerError: one ended without a result.
        """
        has_pairs = any(isinstance(text, Mapping) for text in texts.values())
        limit = body.truncate_prompt_tokens
        check_truncation_side(body.truncation_side, limit, of_pairs=has_pairs)
        parts = list((originals or texts).values())
        self._service.check_prompt(parts, name=next(iter(texts)).partition("[")[0])
        extras = self._service.extras(call, body)
        outputs = await self._service.engine.encode_batch(
            list(texts.values()),
            params,
            request_id=answer_ids("pool-", call, body.request_id)[1],
            names=list(texts),
            **extras,
        )
        for place, output in zip(texts, outputs, strict=True):
            if output.finish_reason == "error":
                raise PluginFaultError(f"{place}: {output.error}")
            if output.finish_reason != "stop":
                raise AnswerError(
                    408 if output.finish_reason == "timeout" else 503,
                    f'{place}: it ended by "{output.finish_reason}", without a result',
                    code=output.finish_reason,
                )
        return outputs


def _num_after(ids: Sequence[int], content: Sequence[int]) -> int:
    """Return the number of special tokens after the content of a text; 0 if it is not found."""
    for start in range(len(ids) - len(content) + 1):
        if ids[start : start + len(content)] == content:
            return len(ids) - len(content) - start
    return 0


def refuse_activation(use_activation: bool | None) -> None:
    """Check that a request for cosines has no `use_activation`.

    Raises:
        RequestError: it has one.
    """
    if use_activation is not None:
        raise RequestError(
            f"use_activation: expected none, for the score is the cosine of two vectors, "
            f"got {str(use_activation).lower()}"
        )


def places_of(inputs: Any, name: str, *, takes_pairs: bool = False) -> dict[str, Any]:
    """Return texts or lists of token ids, and perhaps pairs, by the name of their place.

    Raises:
        RequestError: there are none or too many, or one is neither.
    """
    if inputs == "":
        raise RequestError(f"{name}: expected a text or token ids, not empty")
    if isinstance(inputs, str) or (takes_pairs and _is_pair(inputs, name)):
        return {name: inputs}
    if not isinstance(inputs, list):
        raise RequestError(f"{name}: expected a text, token ids, or a list of these")
    if inputs and all(type(item) is int for item in inputs):
        return {name: inputs}
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise RequestError(f"{name}: expected 1 to {MAX_INPUTS} texts, got {len(inputs)}")
    for index, item in enumerate(inputs):
        is_ids = isinstance(item, list) and all(type(token) is int for token in item)
        is_pair = takes_pairs and _is_pair(item, f"{name}[{index}]")
        if not item or not (isinstance(item, str) or is_ids or is_pair):
            pair = ", or a pair of texts" if takes_pairs else ""
            raise RequestError(
                f"{name}[{index}]: expected a text or a list of token ids, not empty{pair}"
            )
    return {f"{name}[{index}]": item for index, item in enumerate(inputs)}


def _is_pair(value: Any, place: str) -> bool:
    """Return whether an input is an object, which has to be a pair of texts.

    Raises:
        RequestError: it has other fields.
    """
    if isinstance(value, dict) and value.keys() != {"text", "text_pair"}:
        raise RequestError(
            f"{place}: expected a pair of texts with `text` and `text_pair`, got {shown(value)}"
        )
    return isinstance(value, dict)


def document_text(document: Any, place: int) -> str:
    """Return the text of a document.

    Raises:
        RequestError: it has none.
    """
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str) or not text:
        raise RequestError(
            f"documents[{place}]: expected a text that is not empty, or an object with `text`"
        )
    return text


def pooling_params(body: PooledFields, task: Any, **fields: Any) -> PoolingParams:
    """Return the parameters of a request for the engine."""
    return PoolingParams(task=task, pooler=body.pooler, plugin_args=body.plugin_args, **fields)


def cosines(
    first: Sequence[PoolingRequestOutput], second: Sequence[PoolingRequestOutput]
) -> list[float]:
    """Return the cosines of vectors, with one or as many others."""
    a = np.stack([output.outputs for output in first]).astype(np.float64)
    b = np.stack([output.outputs for output in second]).astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    similarities: list[float] = ((a * b).sum(1) / np.maximum(lengths, 1e-24)).tolist()
    return similarities


def encoded(outputs: Sequence[PoolingRequestOutput], encoding: str) -> list[Any]:
    """Return results as numbers, or as "base64" of float32 numbers, little-endian."""
    if encoding == "base64":
        data = (output.outputs.astype("<f4").tobytes() for output in outputs)
        return [base64.b64encode(vector_bytes).decode() for vector_bytes in data]
    return [output.outputs.tolist() for output in outputs]


def usage_of(outputs: Sequence[PoolingRequestOutput]) -> PooledUsage:
    """Return the tokens of the prompts."""
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return PooledUsage(count, count)


def answer_id(call: Call, body: PooledFields, prefix: str) -> str:
    """Return the id of an answer."""
    return answer_ids(f"{prefix}-", call, body.request_id)[0]


def now() -> int:
    """Return the seconds since the epoch."""
    return int(time.time())
