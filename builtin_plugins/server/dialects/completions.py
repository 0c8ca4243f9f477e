"""`/v1/completions`: prompts to continue, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from hardpoint.builtin_plugins.server.config import ServerLimits
from hardpoint.builtin_plugins.server.routes.answers import (
    EncodedArrays,
    Usage,
    check_ended,
    finite,
    likeliest,
    prompt_logprobs,
    prompt_positions,
    token_text,
)
from hardpoint.builtin_plugins.server.routes.fields import (
    NO_TEMPLATE,
    TEXT_REFUSED,
    TextFields,
    renamed,
)
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import CompletionOutput, Logprob, RequestError, RequestOutput
from hardpoint.plugins.requests import WeightRun
from hardpoint.toolkit.trace import CompletionTrace

from .chat.answer import ended
from .chunks import ChunkAnswer, identity_of
from .dialect import Dialect, ParsedRequest
from .embedded_prompts import RawTensor, decoded

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMAS = [
    {"type": "string"},
    _IDS,
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    {"type": "array", "items": _IDS, "minItems": 1},
]
"""A schema that msgspec cannot derive: a union of lists."""

Given = str | list[int] | dict[str, Any]
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
        "suffix": "the model continues prompts and fills in none",
    }

    prompt: Annotated[Any, Meta(extra_json_schema={"anyOf": _PROMPT_SCHEMAS})] = msgspec.UNSET
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
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
        given, mask, ids = self.prompt_embeds, self.prompt_is_token_ids, self.prompt
        if given is None and mask is None:
            return None
        if not allowed:
            raise RequestError(
                "prompt_embeds: expected none, this server takes no embeddings "
                "(server.prompt_embeds is false)"
            )
        if given is None:
            raise RequestError("prompt_is_token_ids: expected none without prompt_embeds")
        if self.echo:
            raise RequestError("echo: expected false with prompt_embeds, which have no text")
        if mask is None and ids is not msgspec.UNSET:
            raise RequestError(
                "prompt: expected none with prompt_embeds, or token ids with prompt_is_token_ids"
            )
        if not isinstance(given, list):
            rows = decoded(given, "prompt_embeds")
            return [_mixed(rows, ids, mask, "")]
        self._check_number("prompt_embeds", len(given), limits)
        for name, value in () if mask is None else (("prompt_is_token_ids", mask), ("prompt", ids)):
            if not isinstance(value, list) or len(value) != len(given):
                raise RequestError(
                    f"{name}: expected a list of {len(given)} lists, one for each of prompt_embeds"
                )
        tables = _of_one_width(
            [decoded(one, f"prompt_embeds[{index}]") for index, one in enumerate(given)]
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
        given = self._prompts()
        self._check_number("prompt", len(given), limits)
        for index, item in enumerate(given if given is self.prompt else ()):
            is_ids = isinstance(item, list) and all(type(token) is int for token in item)
            if not isinstance(item, str) and not is_ids:
                raise RequestError(f"prompt[{index}]: expected a text or a list of token ids")
        return given

    def _check_number(self, name: str, count: int, limits: ServerLimits) -> None:
        if not count:
            raise RequestError(f"{name}: expected at least one prompt, got an empty list")
        if count > limits.prompts:
            raise RequestError(f"{name}: expected at most {limits.prompts} prompts, got {count}")
        n = self.n if isinstance(self.n, int) else 1
        limit = max(limits.prompts, limits.n)
        if 1 < n <= limits.n and count * n > limit:
            raise RequestError(
                f"{name} and n: expected at most {limit} completions on this server "
                f"(server.limits.prompts), got {count} prompts with n {n}"
            )

    def _prompts(self) -> list[str | list[int]]:
        given = self.prompt
        if given is msgspec.UNSET:
            raise RequestError("prompt: missing, and it has no default")
        if isinstance(given, str):
            return [given]
        if not isinstance(given, list):
            raise RequestError("prompt: expected a text, token ids, or a list of one of these")
        if given and all(type(item) is int for item in given):
            return [given]
        return given


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


class Logprobs(msgspec.Struct):
    """Log-probabilities of a choice, as columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: list[Any] | msgspec.UnsetType | None = msgspec.UNSET
    warning: str | msgspec.UnsetType = msgspec.UNSET
    validation_error: str | msgspec.UnsetType = msgspec.UNSET
    part_figures: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    part_arrays: EncodedArrays | msgspec.UnsetType = msgspec.UNSET
    trace: CompletionTrace | msgspec.UnsetType = msgspec.UNSET
    weight_runs: list[WeightRun] | msgspec.UnsetType = msgspec.UNSET
    num_resumes: int | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to prompts."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None


Numbered = tuple[int, RequestOutput]


class CompletionDialect(Dialect[CompletionRequest, Numbered]):
    """Prompts."""

    path = "/v1/completions"
    summary = "Continue prompts."
    body_type = CompletionRequest
    response_type = Completion
    id_prefix = "cmpl-"

    async def begin(
        self, asked: ParsedRequest[CompletionRequest]
    ) -> tuple[AsyncGenerator[Numbered, None], CompletionAnswer]:
        """Return the outputs and the answer; see the base."""
        body, name = asked.body, asked.request_id
        settings = self._service.settings
        embedded = body.embedded_prompts(settings.limits, allowed=settings.prompt_embeds)
        prompts = embedded if embedded is not None else body.prompts(settings.limits)
        self._service.check_prompt([prompt for prompt in prompts if isinstance(prompt, str)])
        ids = [name] if len(prompts) == 1 else [f"{name}-{i}" for i in range(len(prompts))]
        is_list = prompts is body.prompt or isinstance(body.prompt_embeds, list)
        places = [f"[{i}]" if is_list else "" for i in range(len(ids))]
        given = await self._read(body, prompts, places)
        sources = self._outputs(asked, given, ids)
        outputs = numbered(sources[0], places[0]) if len(ids) == 1 else merged(sources, places)
        return outputs, CompletionAnswer(self._service, asked, ids)

    async def _read(
        self, asked: CompletionRequest, prompts: Sequence[Given], places: Sequence[str]
    ) -> Sequence[Given]:
        """Return the prompts as the engine takes them, texts without special tokens as ids.

        Several are read before the first one is sent: what is wrong with one of them is answered
        with an error status, and not after the beginning of another one's answer.

        Raises:
            RequestError: one is wrong; named by its place.
        """
        special, engine = asked.add_special_tokens, self._service.engine
        if special and len(prompts) == 1:
            return list(prompts)
        given: list[Given] = []
        for prompt, place in zip(prompts, places, strict=True):
            try:
                if isinstance(prompt, str):
                    ids = await engine.model.tokenize(prompt, add_special_tokens=special)
                    given.append({"type": "token", "prompt": prompt, "prompt_token_ids": ids})
                    continue
                if isinstance(prompt, dict):  # ids are checked when sent, before any answer
                    await engine.model.prompt_tokens(prompt)
                given.append(prompt)
            except RequestError as error:
                raise _with_place(error, place) from None
        return given

    def _outputs(
        self,
        of: ParsedRequest[CompletionRequest],
        prompts: Sequence[Given],
        ids: Sequence[str],
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        asked = of.body
        fields: dict[str, Any] = {"logprobs": asked.logprobs}
        if asked.max_tokens is not None:
            if asked.max_tokens == 0 and not asked.echo:
                raise RequestError(f"{asked.limit_field}: expected at least 1 without echo, got 0")
            fields["max_tokens"] = max(asked.max_tokens, 1)
        if asked.echo and asked.logprobs is not None and asked.prompt_logprobs is None:
            fields["prompt_logprobs"] = asked.logprobs
        params = self._params(asked, **fields)
        extras = self._service.extras(of.call, asked, of.adapter)
        if asked.kv_transfer_params is not None and len(prompts) != 1:
            raise RequestError(
                f"kv_transfer_params: expected one prompt with them, got {len(prompts)}"
            )
        generate = self._service.engine.generate
        return [
            renamed(generate(prompt, params, request_id, **extras), (), asked)
            for prompt, request_id in zip(prompts, ids, strict=True)
        ]


async def numbered(
    source: AsyncGenerator[RequestOutput, None], place: str
) -> AsyncGenerator[Numbered, None]:
    """Yield the outputs of the only request; arguments and errors are those of `merged`."""
    try:
        async with contextlib.aclosing(source):
            async for output in source:
                yield 0, output
    except RequestError as error:
        raise _with_place(error, place) from None


async def merged(
    sources: Sequence[AsyncGenerator[RequestOutput, None]], places: Sequence[str]
) -> AsyncGenerator[Numbered, None]:
    """Yield the outputs of several requests as they come, each with the number of its source.

    Args:
        places: indices of the prompts in their fields, for errors.

    Raises:
        Exception: raised by a source; the others are closed.
    """
    queue: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue(len(sources))

    async def run(number: int, source: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for output in source:
                    await queue.put((number, output))
            await queue.put(None)
        except RequestError as error:
            await queue.put(_with_place(error, places[number]))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(run(i, source)) for i, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_FIELDS = {"prompt_token_ids": "prompt", "prompt": "prompt"} | {
    name: name for name in ("prompt_embeds", "prompt_is_token_ids")
}
"""The fields of requests that a prompt is of, by what errors about the prompt call them."""


def _with_place(error: RequestError, place: str) -> RequestError:
    message = str(error)
    for name, field in _FIELDS.items():
        if message.startswith((f"{name}:", f"{name}[")):
            return type(error)(field + place + message.removeprefix(name))
    return error


class CompletionAnswer(ChunkAnswer[Numbered]):
    """Writes the answer to prompts."""

    def __init__(
        self, service: Service, asked: ParsedRequest[CompletionRequest], ids: Sequence[str]
    ) -> None:
        """`ids`: ids of the prompts, in the engine."""
        self._asked = asked.body
        self._identity = identity_of(asked, "text_completion")
        progress = ids if asked.body.wants_progress else ()
        super().__init__(service, self._identity, asked.body.stream_options, progress)
        self._n = 1 if self._asked.n is msgspec.UNSET else self._asked.n
        self._offsets: dict[int, int] = {}

    async def whole(self, outputs: AsyncGenerator[Numbered, None]) -> Completion:
        """Return the whole answer; see the base."""
        choices: list[CompletionChoice] = []
        async with contextlib.aclosing(outputs):
            async for number, output in outputs:
                choices += self._choices(number, output)
        for choice in choices:  # of a whole answer, clients read them even if they are null
            if choice.prompt_token_ids is msgspec.UNSET:
                choice.prompt_token_ids = None
            if choice.prompt_logprobs is msgspec.UNSET:
                choice.prompt_logprobs = None
        await self._measure()
        return Completion(
            **self._identity,
            choices=sorted(choices, key=lambda choice: choice.index),
            usage=self._usage.usage(),
            kv_transfer_params=self._transfer,
        )

    def _chunks(self, output: Numbered) -> bytes:
        parts: list[bytes] = []
        choices = list(self._choices(*output))
        tail = b"]" + self._usage_so_far() + b"}\n\n"
        for choice in choices:
            parts += (self._head, self._encode(choice), tail)
        return b"".join(parts)

    def _choices(self, number: int, output: RequestOutput) -> Iterator[CompletionChoice]:
        """Count an output; yield its choices."""
        self._usage.add(output, number)
        if self._asked.max_tokens == 0:
            self._usage.completion_tokens = 0
        self._transfer = output.kv_transfer_params or self._transfer
        for completion in output.outputs:
            check_ended(completion)
            yield self._choice(number, output, completion)

    def _choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        asked = self._asked
        index = number * self._n + completion.index
        is_first = index not in self._offsets
        offset = self._offsets.get(index, 0)
        text, token_ids = completion.text, completion.token_ids
        if asked.max_tokens == 0:  # one token was generated, for the engine makes no fewer
            text, token_ids = "", []
        columns = Logprobs([], [], [], [])
        if asked.echo and is_first:
            before, offset = self._echo(output, columns)
            text = before + text
        if completion.logprobs is not None:
            offset = self._add(columns, completion.logprobs, token_ids, offset)
        self._offsets[index] = offset
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=columns if asked.wants_logprobs else None,
            finish_reason="length" if asked.max_tokens == 0 else completion.finish_reason,
            **ended(completion, self._service.engine.tokenizer),
        )
        if asked.return_token_ids:
            choice.token_ids = token_ids
            if is_first:
                choice.prompt_token_ids = output.prompt_token_ids
        if asked.prompt_logprobs is not None and output.prompt_logprobs is not None and is_first:
            choice.prompt_logprobs = prompt_logprobs(output) or []
        return choice

    def _echo(self, output: RequestOutput, columns: Logprobs) -> tuple[str, int]:
        """Return the text of a prompt, and where it ends by the offsets of its tokens.

        The log-probabilities of its tokens are added to the columns.
        """
        tokenizer = self._service.engine.tokenizer
        text = output.prompt
        if text is None:
            text = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        if self._asked.logprobs is None or output.prompt_logprobs is None:
            return text, len(text)
        return text, self._add_prompt(columns, output, text)

    def _add(
        self,
        columns: Logprobs,
        positions: Sequence[Mapping[int, Logprob]],
        token_ids: Sequence[int],
        offset: int,
    ) -> int:
        as_ids, given = self._asked.return_tokens_as_token_ids, self._asked.logprob_token_ids or ()
        for position, token in zip(positions, token_ids, strict=False):
            chosen, shown = position[token], (token, *given)
            columns.tokens.append(token_text(chosen, token, as_id=as_ids))
            columns.token_logprobs.append(finite(chosen.logprob))
            top: dict[str, float] = {}
            for other, logprob in likeliest(position, self._asked.logprobs or 0, shown):
                # Of several tokens with one text, such as parts of characters, the likeliest
                # counts.
                text = token_text(logprob, other, as_id=as_ids)
                top.setdefault(text, finite(logprob.logprob))
            columns.top_logprobs.append(top)
            columns.text_offset.append(offset)
            offset += len(token_text(chosen, token))
        return offset

    def _add_prompt(self, columns: Logprobs, output: RequestOutput, prompt: str) -> int:
        """Add the positions of a prompt, the first of which has no log-probability.

        Returns:
            Where the text of the next token begins.
        """
        tokenizer, offset = self._service.engine.tokenizer, 0
        for position, token in zip(prompt_positions(output), output.prompt_token_ids, strict=False):
            if position is None:
                text = tokenizer.decode([token], skip_special_tokens=False)
                as_ids = self._asked.return_tokens_as_token_ids
                columns.tokens.append(f"token_id:{token}" if as_ids else text)
                columns.token_logprobs.append(None)
                columns.top_logprobs.append(None)
                columns.text_offset.append(offset)
            else:
                text = token_text(position[token], token)
                self._add(columns, [position], [token], offset)
            # The tokenizer adds some, such as the one at the beginning, which the text does not
            # have.
            if text not in tokenizer.special_tokens or prompt.startswith(text, offset):
                offset += len(text)
        return offset
