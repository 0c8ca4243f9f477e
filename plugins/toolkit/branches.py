"""A tree of outputs of one prompt, for programs that search: each branch is a fork of a request."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import msgspec

from hardpoint.errors import RequestEndedError, RequestError
from hardpoint.plugins import RequestOutput, RequestOutputKind, SamplingParams
from hardpoint.plugins.request_options import RequestOptions
from hardpoint.plugins.requests import Prompt
from hardpoint.plugins.server import AsyncGenerator as Engine

__all__ = ["Branches"]

_FAILED = ("abort", "error", "timeout")


class Branches:
    """Outputs of a prompt that a program follows side by side; it chooses each token of them.

    The outputs after which the program asks for candidates are the branches. Requests compute them
    together: each goes on with its likeliest tokens, and a fork of it begins where the program asks
    for others. Full blocks of the KV cache are shared, and `abort` ends all by the request id.

    Attributes:
        ends: tokens that end an output.

    Example:
        params = SamplingParams(max_tokens=8)
        async with Branches(llm, "The capital of France is", params, 3) as branches:
            (first,) = await branches.candidates([[]])
            after_each = await branches.candidates([[token] for token in first])
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        params: SamplingParams,
        num_candidates: int,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Begin with no request; the first is made when candidates are asked for.

        Args:
            engine: an `AsyncLLM`, or the engine of a server.
            params: with `max_tokens`, and without stop strings. Nothing is sampled, so temperature,
                seed and `n` do not count. Other changes of logits change log-probabilities with
                `sampler.logprobs = "processed"`.
            num_candidates: how many of the likeliest tokens that do not end an output there are at
                least, if there are so many.
            request_id: id of all requests; None makes one. No other open request has it.
            options: options of `AsyncLLM.generate`; `timeout` is of all requests together.

        Raises:
            RequestError: the parameters have no `max_tokens`, or stop strings.
        """
        if params.max_tokens is None:
            raise RequestError("max_tokens: expected the most tokens of a branch, got None")
        if params.stop_strings:
            raise RequestError(f"stop: expected none for branches, got {params.stop_strings!r}")
        self._max_tokens = params.max_tokens
        self._engine, self._prompt, self._options = engine, prompt, options
        ends = () if params.ignore_eos else engine.tokenizer.eos_token_ids
        self.ends = frozenset((*params.stop_token_ids, *ends))
        self._params = msgspec.structs.replace(
            params,
            temperature=0.0,
            n=1,
            logprobs=num_candidates + len(self.ends),
            output_kind=RequestOutputKind.DELTA,
        )
        self._id = request_id or f"branches-{uuid.uuid4().hex}"
        self._legs: list[_Leg] = []
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all requests. Closing twice does nothing."""
        self._is_closed = True
        await self._close(list(self._legs))

    def has_ended(self, token_ids: Sequence[int]) -> bool:
        """Return whether an output ends with its last token, or has `max_tokens`."""
        return len(token_ids) >= self._max_tokens or not self.ends.isdisjoint(token_ids[-1:])

    async def candidates(self, branches: Iterable[Sequence[int]]) -> list[Mapping[int, float]]:
        """Return the likeliest tokens after each of some outputs, with their log-probabilities.

        No forbidden token is among them, nor one of `ends` before `min_tokens`. Requests that go on
        with none of these outputs end; to ask for their outputs later computes a part of them
        again. One call runs at a time, and a call that fails ends all.

        Args:
            branches: the output tokens of each, from the first one on.

        Raises:
            RequestError: the prompt or a token is wrong, the tokens end the request, or it was
                aborted before a fork.
            RequestEndedError: a request was aborted, failed or ran out of time; or all are closed.
            OverloadedError, EngineDeadError, EngineClosedError: as `AsyncLLM.generate`.
        """
        if self._is_closed:
            raise RequestEndedError("branches: they are closed")
        outputs = [list(tokens) for tokens in branches]
        try:
            if not self._legs:
                await self._open([]).read(0)
            legs = [self._leg(tokens) for tokens in outputs]
            lost = [leg for leg in self._legs if leg not in legs]
            # A fork is of an open request: where none goes on, one waits until the forks are open.
            waits = 0 if any(leg.has_begun for leg in legs) else 1
            await self._close(lost[waits:])
            reach: dict[_Leg, int] = {}
            for leg, tokens in zip(legs, outputs, strict=True):
                reach[leg] = max(reach.get(leg, 0), len(tokens))
            await _together(leg.read(length) for leg, length in reach.items())
            if legs:
                await self._close(lost[:waits])
        except BaseException:
            await self.aclose()
            raise
        return [
            {
                token: logprob
                for token, logprob in leg.entry(len(tokens)).items()
                if logprob > -math.inf
                and (len(tokens) >= self._params.min_tokens or token not in self.ends)
            }
            for leg, tokens in zip(legs, outputs, strict=True)
        ]

    def _leg(self, token_ids: list[int]) -> _Leg:
        matches = (leg for leg in self._legs if leg.goes_on_after(token_ids))
        return next(matches, None) or self._open(token_ids)

    def _open(self, token_ids: list[int]) -> _Leg:
        if self._legs:
            stream = self._engine.fork(self._id, token_ids)
        else:
            stream = self._engine.generate(self._prompt, self._params, self._id, **self._options)
        self._legs.append(_Leg(stream, token_ids))
        return self._legs[-1]

    async def _close(self, legs: list[_Leg]) -> None:
        for leg in legs:
            self._legs.remove(leg)
            await leg.stream.aclose()


class _Leg:
    """A request that goes on after some outputs, with the candidates at each position since.

    Attributes:
        has_begun: whether its stream is open.
    """

    def __init__(self, stream: AsyncGenerator[RequestOutput, None], token_ids: list[int]) -> None:
        self.stream, self.has_begun = stream, False
        self._start, self._token_ids = len(token_ids), list(token_ids)
        self._entries: list[Mapping[int, float]] = []
        self._has_ended = False

    def goes_on_after(self, token_ids: list[int]) -> bool:
        length, known = len(token_ids), len(self._token_ids)
        if length < self._start or (self._has_ended and length == known):
            return False
        return self._token_ids[:length] == token_ids

    def entry(self, length: int) -> Mapping[int, float]:
        return self._entries[length - self._start]

    async def read(self, length: int) -> None:
        """Wait for the candidates after so many outputs.

        Raises:
            RequestEndedError: it ended before.
        """
        while len(self._entries) <= length - self._start:
            completion = (await anext(self.stream)).outputs[0]
            self.has_begun = True
            self._token_ids += completion.token_ids
            for entry in completion.logprobs or ():
                self._entries.append(
                    {token: candidate.logprob for token, candidate in entry.items()}
                )
            reason = completion.finish_reason
            self._has_ended = reason is not None
            is_short = len(self._entries) <= length - self._start
            if reason in _FAILED or (self._has_ended and is_short):
                raise RequestEndedError(f"branches: a request ended: {completion.error or reason}")


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; if one fails, end the others before its exception is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
