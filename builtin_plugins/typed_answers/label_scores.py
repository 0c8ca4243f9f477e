"""Probabilities of labels after a prompt: prefill rows of one token each, which share the prompt.

A label of several tokens is teacher-forced: a row reads the logits after each proper beginning of a
label, and the probability of the label is the product of the probabilities of its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from hardpoint.errors import PluginFaultError
from hardpoint.plugins import RequestOutput, RequestOutputKind, SamplingParams
from hardpoint.plugins.server import AsyncGenerator

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class LabelledPrompt:
    """A prompt, and the labels that may follow it.

    Attributes:
        token_ids: the prompt.
        labels: tokens of each label; none is the beginning of another one.
    """

    token_ids: Sequence[int]
    labels: Sequence[Tokens]

    def followers(self) -> dict[Tokens, list[int]]:
        """Return the tokens that may follow each proper beginning of a label, without repetition.

        Beginnings and tokens are in the order of the labels.
        """
        tokens_by_start: dict[Tokens, dict[int, None]] = {}
        for label in self.labels:
            for end, token in enumerate(label):
                tokens_by_start.setdefault(label[:end], {})[token] = None
        return {beginning: list(tokens) for beginning, tokens in tokens_by_start.items()}


@dataclass(frozen=True)
class LabelScores:
    """The probabilities of the labels of one prompt.

    Attributes:
        probabilities: probability of each label, among the labels; they add up to 1.
        mass: probability of all labels, among all that the model may write.
    """

    probabilities: list[float]
    mass: float


@dataclass
class PromptTokens:
    """The tokens of prompts.

    Attributes:
        prompt: number of tokens, of all rows together.
        cached: number of tokens with keys and values in the cache.
    """

    prompt: int = 0
    cached: int = 0


async def score_labels(
    engine: AsyncGenerator,
    prompts: Sequence[LabelledPrompt],
    request_id: str,
    options: Mapping[str, Any],
) -> tuple[list[LabelScores], PromptTokens]:
    """Return the scores of each prompt's labels.

    All rows are given to the engine at once, but no more than it lets wait. Their common prompt
    is computed once, if the engine has prefix caching: a row finds the blocks of
    another one in the same step.

    Args:
        engine: runs the rows, as requests `<request_id>-0`, `-1` and so on.
        prompts: in the order of the result.
        request_id: begins the ids of the requests.
        options: `RequestOptions` of each row.

    Raises:
        RequestError, OverloadedError: the engine refuses a row; then all others end.
        PluginFaultError: a plugin or the model failed in one.
        HTTPException: a row ended before its token, by its timeout or by an administrator.
    """
    rows = list(_rows(prompts))
    room = asyncio.Semaphore(engine.config.scheduler.max_waiting or len(rows))

    async def read(number: int, token_ids: list[int], tokens: list[int]) -> RequestOutput:
        async with room:
            return await _read(engine, token_ids, tokens, f"{request_id}-{number}", options)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(read(number, token_ids, tokens))
                for number, (token_ids, tokens) in enumerate(rows)
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    counts, done = PromptTokens(), iter(tasks)
    scores: list[LabelScores] = []
    for prompt in prompts:
        after: dict[Tokens, Mapping[int, float]] = {}
        for beginning in prompt.followers():
            output = next(done).result()
            counts.prompt += len(output.prompt_token_ids)
            counts.cached += output.num_cached_tokens or 0
            (entry,) = output.outputs[0].logprobs or [{}]
            after[beginning] = {token: logprob.logprob for token, logprob in entry.items()}
        logprobs = [
            math.fsum(after[label[:end]][token] for end, token in enumerate(label))
            for label in prompt.labels
        ]
        scores.append(_normalised(logprobs))
    return scores, counts


def _rows(prompts: Sequence[LabelledPrompt]) -> Iterator[tuple[list[int], list[int]]]:
    for prompt in prompts:
        for beginning, tokens in prompt.followers().items():
            yield [*prompt.token_ids, *beginning], tokens


async def _read(
    engine: AsyncGenerator,
    token_ids: list[int],
    tokens: list[int],
    request_id: str,
    options: Mapping[str, Any],
) -> RequestOutput:
    """Return the output of a row: one token, with the log-probabilities of some.

    Raises:
        HardpointError, HTTPException: it has none.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprob_token_ids=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    outputs = engine.generate(token_ids, params, request_id, **options)
    async with contextlib.aclosing(outputs):
        output = [output async for output in outputs][-1]
    (completion,) = output.outputs
    if completion.finish_reason == "error":
        raise PluginFaultError(completion.error or "the engine gave no reason")
    if not completion.token_ids:
        ended = "the questions were not answered in time"
        if completion.finish_reason != "timeout":
            ended = "the engine has ended the questions; send them again"
        raise HTTPException(503, ended)
    return output


def _normalised(logprobs: Sequence[float]) -> LabelScores:
    """Return the scores of labels; where none is possible, all are equally likely."""
    best = max(logprobs)
    if best == -math.inf:
        return LabelScores([1 / len(logprobs)] * len(logprobs), 0.0)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    total = math.fsum(weights)
    mass = math.fsum(map(math.exp, logprobs))
    return LabelScores([weight / total for weight in weights], min(mass, 1.0))
