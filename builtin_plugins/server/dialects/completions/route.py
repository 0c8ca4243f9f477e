"""`/v1/completions`: prompts to continue, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from hardpoint.builtin_plugins.server.dialects.dialect import Dialect, ParsedRequest
from hardpoint.builtin_plugins.server.routes.fields import (
    renamed,
)
from hardpoint.plugins import RequestError, RequestOutput

from .answer import Completion, CompletionAnswer, Numbered
from .fim import FillInFormat
from .request import CompletionRequest, PromptInput


class CompletionDialect(Dialect[CompletionRequest, Numbered]):
    """Prompts."""

    path = "/v1/completions"
    summary = "Continue prompts."
    body_type = CompletionRequest
    response_type = Completion
    id_prefix = "cmpl-"

    async def begin(
        self, parsed: ParsedRequest[CompletionRequest]
    ) -> tuple[AsyncGenerator[Numbered, None], CompletionAnswer]:
        """Return the outputs and the answer; see the base."""
        body, name = parsed.body, parsed.request_id
        settings = self._service.settings
        embedded = body.embedded_prompts(settings.limits, allowed=settings.prompt_embeds)
        prompts = embedded if embedded is not None else body.prompts(settings.limits)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        self._service.check_prompt(texts, body.suffix or "")
        ids = [name] if len(prompts) == 1 else [f"{name}-{i}" for i in range(len(prompts))]
        is_list = prompts is body.prompt or isinstance(body.prompt_embeds, list)
        places = [f"[{i}]" if is_list else "" for i in range(len(ids))]
        if body.suffix:
            body.check_suffix(prompts)
            inputs: Sequence[PromptInput] = await self._filled_in(body, texts, body.suffix)
        else:
            inputs = await self._read(body, prompts, places)
        sources = self._outputs(parsed, inputs, ids)
        outputs = numbered(sources[0], places[0]) if len(ids) == 1 else merged(sources, places)
        return outputs, CompletionAnswer(self._service, parsed, ids)

    async def _read(
        self, body: CompletionRequest, prompts: Sequence[PromptInput], places: Sequence[str]
    ) -> Sequence[PromptInput]:
        """Return the prompts as the engine takes them, texts without special tokens as ids.

        Several are read before the first one is sent: what is wrong with one of them is answered
        with an error status, and not after the beginning of another one's answer.

        Raises:
            RequestError: one is wrong; named by its place.
        """
        special, engine = body.add_special_tokens, self._service.engine
        if special and len(prompts) == 1:
            return list(prompts)
        inputs: list[PromptInput] = []
        for prompt, place in zip(prompts, places, strict=True):
            try:
                if isinstance(prompt, str):
                    ids = await engine.model.tokenize(prompt, add_special_tokens=special)
                    inputs.append({"type": "token", "prompt": prompt, "prompt_token_ids": ids})
                    continue
                if isinstance(prompt, dict):  # ids are checked when sent, before any answer
                    await engine.model.prompt_tokens(prompt)
                inputs.append(prompt)
            except RequestError as error:
                raise _with_place(error, place) from None
        return inputs

    async def _filled_in(
        self, body: CompletionRequest, prompts: Sequence[str], suffix: str
    ) -> list[PromptInput]:
        """Return the fill-in-the-middle prompts of texts.

        Raises:
            RequestError: the tokenizer has no tokens for them.
        """
        engine = self._service.engine
        form = FillInFormat.of_tokenizer(engine.tokenizer.special_tokens)
        tokenize = engine.model.tokenize
        start = await tokenize("", add_special_tokens=True) if body.add_special_tokens else []
        after = await tokenize(suffix, add_special_tokens=False)
        inputs: list[PromptInput] = []
        for prompt in prompts:
            before = await tokenize(prompt, add_special_tokens=False) if prompt else []
            ids = form.prompt(start, before, after)
            inputs.append({"type": "token", "prompt": prompt, "prompt_token_ids": ids})
        return inputs

    def _outputs(
        self,
        of: ParsedRequest[CompletionRequest],
        prompts: Sequence[PromptInput],
        ids: Sequence[str],
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        body = of.body
        fields: dict[str, Any] = {"logprobs": body.logprobs}
        if body.max_tokens is not None:
            if body.max_tokens == 0 and not body.echo:
                raise RequestError(f"{body.limit_field}: expected at least 1 without echo, got 0")
            fields["max_tokens"] = max(body.max_tokens, 1)
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            fields["prompt_logprobs"] = body.logprobs
        params = self._params(body, **fields)
        extras = self._service.extras(of.call, body, of.adapter)
        if body.kv_transfer_params is not None and len(prompts) != 1:
            raise RequestError(
                f"kv_transfer_params: expected one prompt with them, got {len(prompts)}"
            )
        generate = self._service.engine.generate
        return [
            renamed(generate(prompt, params, request_id, **extras), (), body)
            for prompt, request_id in zip(prompts, ids, strict=True)
        ]


async def numbered(
    source: AsyncGenerator[RequestOutput, None], place: str
) -> AsyncGenerator[Numbered, None]:
    """Yield the outputs of the only request, with the arguments and errors of `merged`."""
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
