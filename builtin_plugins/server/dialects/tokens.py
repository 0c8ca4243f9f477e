"""Tokens in and out: `/inference/v1/generate`, in vLLM's shape."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from hardpoint.builtin_plugins.server.routes.answers import (
    Usage,
    check_ended,
    only,
    prompt_logprobs,
)
from hardpoint.builtin_plugins.server.routes.fields import (
    NO_TEMPLATE,
    SAMPLING_REFUSED,
    Renaming,
    SamplingFields,
    StreamOptions,
    renamed,
)
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import (
    CompletionOutput,
    Logprob,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.plugins.requests import AdapterScale
from hardpoint.typed import Strict

from .chat.logprobs import ChoiceLogprobs, choice_logprobs
from .choices import EndedChoice, ended
from .chunks import ChunkAnswer
from .dialect import Dialect, ParsedRequest

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class TokenSampling(SamplingFields):
    """How tokens are chosen.

    Attributes:
        logprobs: likeliest tokens per position.
        detokenize: ignored: answers are tokens.
    """

    logprobs: Annotated[int, Meta(ge=0)] | None = None
    detokenize: bool = False

    def check_place(self) -> None:
        """Check that no field is here that belongs to the request around it.

        Raises:
            RequestError: one is.
        """
        for name in OUTSIDE:
            if getattr(self, name):
                raise RequestError(f"{name}: expected outside of sampling_params")


OUTSIDE = (
    "model",
    "stream",
    "stream_options",
    "return_progress",
    "priority",
    "timeout",
    "tags",
    "cache_salt",
    "session",
    "retain_seconds",
    "lora_scale",
    "request_id",
    "return_token_ids",
    "kv_transfer_params",
)


_REFUSED = {**SAMPLING_REFUSED, **NO_TEMPLATE}


_INSIDE = "|".join(name for name in TokenSampling.__struct_fields__ if name not in OUTSIDE)


_NAMES: Renaming = (
    (re.compile(r"^resumed\.(?=output_token_ids)"), ""),
    (re.compile(r"^prompt(_token_ids)?(?=[\[:])"), "token_ids"),
    (re.compile(rf"^(?=(?:{_INSIDE})\b)"), "sampling_params."),
)
"""Names of fields in the engine's errors, and those of `/inference/v1/generate`."""


class GenerateRequest(Strict):
    """Tokens to continue.

    Attributes:
        token_ids: the prompt.
        output_token_ids: for each completion the tokens that another server has generated of it,
            after which this one goes on, or null for one that has ended. A stream has what is new;
            a whole answer begins with them, and its log-probabilities are of the new ones.
        sampling_params: how tokens are chosen.
        request_id: id of the answer, in place of a random one.
        stream: send the answer as it comes.
        lora_scale: factor of what the adapter changes that `model` names; 1.0 by default.
    """

    refused: ClassVar[Mapping[str, str]] = {"features": "the model reads text alone"}

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    output_token_ids: list[list[TokenId] | None] | None = None
    sampling_params: TokenSampling = TokenSampling()
    request_id: Annotated[str, Meta(pattern=r"\A[\x21-\x7e]{1,128}\Z")] | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    tags: dict[str, str] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    session: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    retain_seconds: Annotated[float, Meta(gt=0)] | None = None
    lora_scale: AdapterScale | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @staticmethod
    def prepared(fields: dict[str, Any]) -> dict[str, Any]:
        """Return a body with all sampling parameters in their place; see `RequestReader.read`.

        Raises:
            RequestError: a sampling parameter is outside of them, or is not supported.
        """
        for name in fields:
            if name in TokenSampling.__struct_fields__ and name not in OUTSIDE:
                raise RequestError(f"{name}: expected inside of sampling_params")
        params = fields.get("sampling_params")
        for name, value in params.items() if isinstance(params, dict) else ():
            if name in _REFUSED and value not in (None, False, "", [], {}):
                raise RequestError(f"sampling_params.{name}: not supported: {_REFUSED[name]}")
        return fields


class GeneratedChoice(EndedChoice, kw_only=True):
    """One completion, or the new part of it."""

    token_ids: list[int]
    logprobs: ChoiceLogprobs | None = None


class Generated(msgspec.Struct, kw_only=True):
    """The completions of tokens.

    Attributes:
        seed: the seed of `sampling_params`, or the one that was chosen; in a stream, the first
            chunk has it. With it and `output_token_ids`, another server goes on in the same way.
    """

    request_id: str
    choices: list[GeneratedChoice]
    usage: Usage
    seed: int
    prompt_logprobs: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class GenerateDialect(Dialect[GenerateRequest, RequestOutput]):
    """Tokens to continue with tokens."""

    path = "/inference/v1/generate"
    summary = "Continue tokens with tokens."
    body_type = GenerateRequest
    response_type = Generated
    id_prefix = ""

    async def begin(
        self, parsed: ParsedRequest[GenerateRequest]
    ) -> tuple[AsyncGenerator[RequestOutput, None], GeneratedAnswer]:
        """Return the outputs and the answer; see the base."""
        body = parsed.body
        params = self._params_of(body)
        extras = self._service.extras(parsed.call, body, parsed.adapter)
        generate = self._service.engine.generate
        prompt: list[int] | dict[str, Any] = body.token_ids
        if (output_ids := body.output_token_ids) is not None:
            prompt = {"prompt_token_ids": body.token_ids, "output_token_ids": output_ids}
        outputs = generate(prompt, params, parsed.request_id, **extras)
        outputs = renamed(renamed(outputs, (), body.sampling_params), _NAMES)
        return outputs, GeneratedAnswer(self._service, parsed)

    def _params_of(self, body: GenerateRequest) -> SamplingParams:
        sampling = body.sampling_params
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options: expected stream to be true with it")
        fields: dict[str, Any] = {"logprobs": sampling.logprobs}
        kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        try:
            sampling.check_place()
            sampling = sampling.resolved()
            if sampling.max_tokens is not None:
                fields["max_tokens"] = sampling.max_tokens
            params = self._params(sampling, output_kind=kind, **fields)
            # Stop strings and checks of the answer need its text.
            needs_text = bool(params.stop or params.bad_words) or params.structured is not None
            params = msgspec.structs.replace(params, detokenize=needs_text)
        except RequestError as error:
            raise RequestError(f"sampling_params.{error}") from None
        try:
            return params.checked()
        except RequestError as error:
            message = sampling.own_names(str(error))
            raise RequestError(f"sampling_params.{message}") from None


class GeneratedAnswer(ChunkAnswer[RequestOutput]):
    """Writes the answer to tokens."""

    def __init__(self, service: Service, parsed: ParsedRequest[GenerateRequest]) -> None:
        options = parsed.body.stream_options
        ids = [parsed.request_id] if options is not None and options.include_progress else []
        super().__init__(service, {"request_id": parsed.answer_id}, options, ids)
        self._id, self._params = parsed.answer_id, parsed.body.sampling_params
        output_ids = None if parsed.body.stream else parsed.body.output_token_ids
        self._num_given = [len(token_ids or ()) for token_ids in output_ids or ()]
        self._begun = False

    async def whole(self, outputs: AsyncGenerator[RequestOutput, None]) -> Generated:
        """Return the whole answer; see the base."""
        output = await only(outputs)
        self._usage.add(output)
        await self._measure()
        return Generated(
            request_id=self._id,
            choices=list(map(self._choice, output.outputs)),
            usage=self._usage.usage(),
            seed=_seed_of(output),
            prompt_logprobs=prompt_logprobs(output),
            kv_transfer_params=output.kv_transfer_params,
        )

    def _chunks(self, output: RequestOutput) -> bytes:
        """Return the event of an output: its completions, and at first the fields of the prompt.

        Raises:
            AnswerError: a completion ended with an error.
        """
        self._usage.add(output)
        choices = b",".join(self._encode(self._choice(choice)) for choice in output.outputs)
        parts = [self._head, choices, b"]"]
        if not self._begun:
            parts += (b',"seed":', self._encode(_seed_of(output)))
            if output.prompt_logprobs is not None:
                parts += (b',"prompt_logprobs":', self._encode(prompt_logprobs(output)))
        self._begun = True
        if output.kv_transfer_params is not None:
            parts += (b',"kv_transfer_params":', self._encode(output.kv_transfer_params))
        return b"".join([*parts, self._usage_so_far(), b"}\n\n"])

    def _choice(self, completion: CompletionOutput) -> GeneratedChoice:
        check_ended(completion)
        if completion.logprobs is not None:
            completion.logprobs = [
                {token: Logprob(other.logprob, other.rank, None) for token, other in place.items()}
                for place in completion.logprobs
            ]
        first = self._num_given[completion.index] if self._num_given else 0
        new = msgspec.structs.replace(completion, token_ids=completion.token_ids[first:])
        return GeneratedChoice(
            index=completion.index,
            token_ids=completion.token_ids,
            logprobs=choice_logprobs(
                new, self._params.logprobs or 0, self._params.logprob_token_ids or ()
            ),
            finish_reason=completion.finish_reason,
            **ended(completion),
        )


def _seed_of(output: RequestOutput) -> int:
    assert output.seed is not None, "the engine gives each request that generates one"
    return output.seed
