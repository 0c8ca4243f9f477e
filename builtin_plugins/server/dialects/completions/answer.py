"""The answers of `/v1/completions`: whole ones, and the chunks of a stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.builtin_plugins.server.dialects.choices import EndedChoice, ended
from hardpoint.builtin_plugins.server.dialects.chunks import ChunkAnswer, identity_of
from hardpoint.builtin_plugins.server.dialects.dialect import ParsedRequest
from hardpoint.builtin_plugins.server.routes.answers import (
    Usage,
    check_ended,
    finite,
    likeliest,
    prompt_logprobs,
    prompt_positions,
    token_text,
)
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import CompletionOutput, Logprob, RequestOutput

from .request import CompletionRequest


class Logprobs(msgspec.Struct):
    """Log-probabilities of a choice, as columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(EndedChoice, kw_only=True):
    """One completion, or the new part of it."""

    text: str
    logprobs: Logprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: list[Any] | msgspec.UnsetType | None = msgspec.UNSET


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


class CompletionAnswer(ChunkAnswer[Numbered]):
    """Writes the answer to prompts."""

    def __init__(
        self, service: Service, parsed: ParsedRequest[CompletionRequest], ids: Sequence[str]
    ) -> None:
        """`ids`: ids of the prompts, in the engine."""
        self._asked = parsed.body
        self._identity = identity_of(parsed, "text_completion")
        progress = ids if parsed.body.wants_progress else ()
        super().__init__(service, self._identity, parsed.body.stream_options, progress)
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
        body = self._asked
        index = number * self._n + completion.index
        is_first = index not in self._offsets
        offset = self._offsets.get(index, 0)
        text, token_ids = completion.text, completion.token_ids
        if body.max_tokens == 0:  # one token was generated, for the engine makes no fewer
            text, token_ids = "", []
        columns = Logprobs([], [], [], [])
        if body.echo and is_first:
            before, offset = self._echo(output, columns)
            text = before + text
        if completion.logprobs is not None:
            offset = self._add(columns, completion.logprobs, token_ids, offset)
        self._offsets[index] = offset
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=columns if body.wants_logprobs else None,
            finish_reason="length" if body.max_tokens == 0 else completion.finish_reason,
            **ended(completion, self._service.engine.tokenizer),
        )
        if body.return_token_ids:
            choice.token_ids = token_ids
            if is_first:
                choice.prompt_token_ids = output.prompt_token_ids
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None and is_first:
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
        as_ids, extra_ids = (
            self._asked.return_tokens_as_token_ids,
            self._asked.logprob_token_ids or (),
        )
        for position, token in zip(positions, token_ids, strict=False):
            chosen, shown = position[token], (token, *extra_ids)
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
        """Add the positions of a prompt; the first one has no log-probability.

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
