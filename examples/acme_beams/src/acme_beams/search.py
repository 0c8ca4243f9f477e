"""Beam search: the likeliest outputs, by forks of a request at the tokens that it did not take."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec

from hardpoint.errors import RequestEndedError, RequestError
from hardpoint.plugins import RequestOutput, RequestOutputKind, SamplingParams
from hardpoint.plugins.requests import Prompt
from hardpoint.plugins.server import AsyncGenerator as Engine


class Beam(msgspec.Struct, kw_only=True):
    """An output that was found.

    Attributes:
        score: its log-probability, divided by its length to the power of the length penalty.
    """

    text: str
    token_ids: list[int]
    cumulative_logprob: float
    score: float


class _Leg:
    """A request that goes on greedily, with the candidates at each of its positions."""

    def __init__(self, stream: AsyncGenerator[RequestOutput, None], start: int) -> None:
        self.stream, self._start = stream, start
        self._entries: list[Mapping[int, float]] = []

    async def candidates(self, position: int) -> Mapping[int, float]:
        """Return log-probabilities by token; the first is of the one that the leg goes on with."""
        while len(self._entries) <= position - self._start:
            completion = (await anext(self.stream)).outputs[0]
            if completion.finish_reason in ("abort", "error", "timeout"):
                reason = completion.error or completion.finish_reason
                raise RequestEndedError(f"beam search: a beam ended: {reason}")
            for entry in completion.logprobs or ():
                self._entries.append({token: one.logprob for token, one in entry.items()})
        return self._entries[position - self._start]


async def beam_search(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    num_beams: int,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    request_id: str | None = None,
    **options: Any,
) -> list[Beam]:
    """Return the `num_beams` best outputs, the best first, as `generate` of transformers does.

    Source: the section "Beam search" of Graves, "Sequence Transduction with Recurrent Neural
    Networks" (arXiv:1211.3711); candidates and ends are those of transformers.

    Args:
        engine: an `AsyncLLM`, or that of a server.
        params: with `max_tokens`; of greedy legs, so that temperature, seed and `n` do not count.
            Others that change logits count with `sampler.logprobs = "processed"`.
        length_penalty: the larger, the more longer outputs are preferred.
        early_stopping: whether `num_beams` outputs are enough, though a better one may come.
        request_id: `abort` ends the search by it.
        options: those of `AsyncLLM.generate`.

    Raises:
        RequestEndedError: a beam was aborted, failed or ran out of time.
        RequestError: as `AsyncLLM.generate`; or parameters have no limit, or stop strings.
    """
    limit, name = params.max_tokens, request_id or f"beams-{uuid.uuid4().hex}"
    if limit is None or params.stop_strings:
        raise RequestError("beam search: expected max_tokens, and no stop strings")
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else engine.tokenizer.eos_token_ids)}
    width = max(2, 1 + len(ends)) * num_beams  # enough to go on with, even if the best ones end
    params = msgspec.structs.replace(
        params, temperature=0.0, n=1, logprobs=width, output_kind=RequestOutputKind.DELTA
    )
    found: list[tuple[float, float, list[int]]] = []
    async with AsyncExitStack() as stack:

        async def leg(stream: AsyncGenerator[RequestOutput, None], start: int) -> _Leg:
            return _Leg(await stack.enter_async_context(aclosing(stream)), start)

        beams = [(0.0, [0] * 0, await leg(engine.generate(prompt, params, name, **options), 0))]
        for length in range(1, limit + 1):
            entries = await asyncio.gather(*(one.candidates(length - 1) for *_, one in beams))
            grown = [
                (total + logprob, [*tokens, token], one if token == next(iter(entry)) else None)
                for (total, tokens, one), entry in zip(beams, entries, strict=True)
                for token, logprob in entry.items()
                if math.isfinite(logprob) and (length > params.min_tokens or token not in ends)
            ]
            grown = sorted(grown, key=lambda item: -item[0])[:width]
            ended = [length == limit or tokens[-1] in ends for _, tokens, _ in grown]
            for (total, tokens, _), has_ended in zip(grown[:num_beams], ended, strict=False):
                if has_ended:
                    found.append((total / length**length_penalty, total, tokens))
            found = sorted(found, key=lambda item: -item[0])[:num_beams]
            going_on = [one for one, has_ended in zip(grown, ended, strict=True) if not has_ended]
            if not going_on:
                break
            best = going_on[0][0] / length**length_penalty
            if len(found) == num_beams and (early_stopping or best <= found[-1][0]):
                break
            before = [one for *_, one in beams]
            beams = [
                (total, tokens, one or await leg(engine.fork(name, tokens), length))
                for total, tokens, one in going_on[:num_beams]
            ]
            kept = {id(one) for *_, one in beams}
            # A fork is of an open stream: where none goes on, one waits until the forks are open.
            lost = [one for one in before if id(one) not in kept]
            for one in lost[0 if len(lost) < len(before) else 1 :]:
                await one.stream.aclose()
    decode = engine.tokenizer.decode
    return [
        Beam(
            text=decode(tokens, skip_special_tokens=True),
            token_ids=tokens,
            cumulative_logprob=total,
            score=score,
        )
        for score, total, tokens in found
    ]
