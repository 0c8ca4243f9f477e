"""Parts of answers that several families share."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from hardpoint.builtin_plugins.server.errors import (
    AnswerError,
    answer_error,
    for_clients,
    unavailable,
)
from hardpoint.builtin_plugins.server.field_names import is_of_grammar
from hardpoint.builtin_plugins.server.operations.traffic import count_tokens_of
from hardpoint.plugins import CompletionOutput, Logprob, RequestError, RequestOutput, Tokenizer
from hardpoint.plugins.requests import PartArray
from hardpoint.plugins.server import Call
from hardpoint.typed import shown

T = TypeVar("T")

_ANSWER_ID = re.compile(r"[A-Za-z0-9_.-]{1,80}")
"""Ids of HTTP requests that may be a part of the id of an answer, and so of a path."""

DONE = b"data: [DONE]\n\n"
"""The end marker of OpenAI's streams."""


async def only(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """Return the one output of a request that is not streamed."""
    async with contextlib.aclosing(outputs):
        (output,) = [output async for output in outputs]
    return output


class EncodedArray(msgspec.Struct):
    """Numbers of positions, as `CompletionOutput.part_arrays` has them.

    Attributes:
        positions: positions of the rows.
        dtype: dtype of numpy.
        shape: [positions, ...].
        data: content, in base64.
    """

    positions: list[int]
    dtype: str
    shape: list[int]
    data: str


EncodedArrays = dict[str, dict[str, EncodedArray]]


def encoded_arrays(parts: Mapping[str, Mapping[str, PartArray]]) -> EncodedArrays:
    """Return the arrays of step parts for an answer."""
    return {
        part: {
            name: EncodedArray(
                array.positions.tolist(),
                array.values.dtype.str,
                list(array.values.shape),
                base64.b64encode(array.values.tobytes()).decode(),
            )
            for name, array in arrays.items()
        }
        for part, arrays in parts.items()
    }


class PromptDetails(msgspec.Struct):
    """The cached tokens of a prompt."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """The reasoning tokens of a completion."""

    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


Encode = Callable[..., Awaitable[Sequence[int]]]


class UsageCount:
    """Counts the tokens of a request as its outputs come.

    Attributes:
        prompt_tokens: number of tokens of all prompts.
        completion_tokens: number of tokens of all completions.
        finish_reasons: finish reasons of the completions that ended.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.finish_reasons: list[str] = []
        self._cached: dict[int, int] = {}  # tokens by prompt
        self._cached_tokens = 0
        self._reasoning_tokens = 0
        self._reasoning: list[str] = []  # whose tokens are not counted yet
        count_tokens_of(self)

    def add(self, output: RequestOutput, prompt: int = 0) -> None:
        """Count an output with the new part of one of several prompts."""
        known = self._cached.get(prompt)
        cached = output.num_cached_tokens
        if known is None:
            self.prompt_tokens += len(output.prompt_token_ids)
            self._cached[prompt] = known = 0
        if cached is not None and cached != known:
            self._cached[prompt] = cached
            self._cached_tokens += cached - known
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)
            if completion.reasoning:
                self._reasoning.append(completion.reasoning)
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)

    async def measure(self, encode: Encode) -> None:
        """Count the tokens of the reasoning, before `usage`.

        An output's text may lag behind its tokens, so they are those of the text.

        Args:
            encode: returns the tokens of a text without holding up the event loop; the engine's
                `tokenise`.
        """
        text, self._reasoning = "".join(self._reasoning), []
        if text:
            self._reasoning_tokens += len(await encode(text, add_special_tokens=False))

    def usage(self, *, whole: bool = True) -> Usage:
        """Return the counts.

        Args:
            whole: with details, which are counted at the end alone.
        """
        usage = Usage(
            self.prompt_tokens, self.completion_tokens, self.prompt_tokens + self.completion_tokens
        )
        if whole:
            usage.prompt_tokens_details = PromptDetails(self._cached_tokens)
            if self._reasoning:  # `measure` was not called
                text, self._reasoning = "".join(self._reasoning), []
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                self._reasoning_tokens += len(ids)
            if self._reasoning_tokens:
                # Encoding a text may give more tokens than the model wrote it with.
                tokens = min(self._reasoning_tokens, self.completion_tokens)
                usage.completion_tokens_details = CompletionDetails(tokens)
        return usage


LOAD_FAILED = "kv_connector: the keys and values of its prompt could not be loaded"
"""How the error of a request begins whose blocks did not come; the next one may compute them."""

_LOAD_RETRY_SECONDS = 1


def check_ended(completion: CompletionOutput) -> None:
    """Raise the error of a completion that ended with one.

    Raises:
        AnswerError: it names the plugin or the model, or the grammar that is wrong.
    """
    if completion.finish_reason != "error":
        return
    message = completion.error or "the engine gave no reason"
    if is_of_grammar(message):  # which is compiled while the request waits
        raise answer_error(RequestError(message))
    if message.startswith(LOAD_FAILED):
        error = unavailable(for_clients(message), _LOAD_RETRY_SECONDS, code="kv_load_failed")
        error.headers["x-should-retry"] = "true"
        raise error
    raise AnswerError(
        500,
        for_clients(message),
        kind="generation_error",
        headers={"x-should-retry": "false"},
    )


def answer_ids(prefix: str, call: Call, request_id: str | None) -> tuple[str, str]:
    """Return the id of an answer, and the id of its request in the engine.

    The latter contains the id of the HTTP request, without `req-`, so that a search for it finds
    the access log, the engine's log and journals. So does the answer's, unless the body names it.

    Args:
        prefix: comes before the id of an answer.
        call: the HTTP request.
        request_id: id in the body; any number of requests may have it.
    """
    trace = call.request_id.removeprefix("req-")
    if "x-request-id" in call.headers:  # clients may repeat it
        trace = f"{trace}-{secrets.token_hex(4)}"
    if request_id is None and _ANSWER_ID.fullmatch(trace):
        return prefix + trace, prefix + trace
    answer_id = new_id(prefix, request_id)
    return answer_id, f"{answer_id}-{trace}"


def new_id(prefix: str, request_id: str | None = None) -> str:
    """Return an id: of the request, or a random one."""
    return f"{prefix}{request_id or secrets.token_hex(12)}"


def token_text(logprob: Logprob, token: int, *, as_id: bool = False) -> str:
    """Return the text of a token in log-probabilities, or its id in the shape of a text."""
    if as_id or logprob.decoded_token is None:
        return f"token_id:{token}"
    return logprob.decoded_token


async def load_token_bytes(tokenizer: Tokenizer) -> None:
    """Read the bytes of all tokens, which takes a second, in another thread.

    To be awaited before an answer with log-probabilities, so that no stream stops.
    """
    await asyncio.to_thread(_token_bytes, tokenizer)


@functools.lru_cache(maxsize=1)
def _token_bytes(tokenizer: Tokenizer) -> Sequence[bytes]:
    """Return the bytes of each token; none if the tokenizer does not know them."""
    try:
        return tokenizer.vocabulary().tokens
    except NotImplementedError:
        return ()


def token_bytes(tokenizer: Tokenizer, token: int, text: str) -> list[int]:
    """Return the bytes of a token, which may be a part of a character.

    Args:
        text: its text, whose bytes they are if the tokenizer does not know them.
    """
    known = _token_bytes(tokenizer)
    return list(known[token] if token < len(known) and known[token] else text.encode())


def prompt_positions(output: RequestOutput) -> list[Mapping[int, Logprob] | None]:
    """Return the log-probabilities of a prompt's positions; empty if the output has none.

    Where outputs of several completions were merged, each has brought its own.
    """
    return (output.prompt_logprobs or [])[: len(output.prompt_token_ids)]


def prompt_logprobs(output: RequestOutput) -> list[Any] | None:
    """Return the log-probabilities of a prompt: by position, token id to its logprob."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): msgspec.structs.replace(logprob, logprob=finite(logprob.logprob))
            for token, logprob in position.items()
        }
        for position in prompt_positions(output)
    ]


def likeliest(
    position: Mapping[int, Logprob], count: int, others: Collection[int] = ()
) -> Sequence[tuple[int, Logprob]]:
    """Return the `count` likeliest tokens of a position.

    Args:
        others: tokens that are added if they are none of them.
    """
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked[:count] + [item for item in ranked[count:] if item[0] in others]


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can hold it: OpenAI's -9999 for an impossible one."""
    return max(logprob, -9999.0)


def whole_number(text: str, largest: int) -> int:
    """Return the number that a text has; 0 if it has none, or more digits than `largest`."""
    return int(text) if text.isdecimal() and len(text) <= len(str(largest)) else 0


def page_after(
    after: str | None,
    items: Sequence[T],
    ids: Sequence[str],
    order: Literal["asc", "desc"],
    limit: str,
    max_limit: int,
    noun: str,
) -> tuple[list[T], bool, str | None, str | None]:
    """Return a page of a list: its items, whether more follow, and the first and the last id.

    Args:
        after: id of the item before the page; None begins with the first one.
        items: the oldest first.
        ids: their ids.
        order: "desc" begins with the newest.
        limit: items of a page at most, as the query has it.
        max_limit: largest one.
        noun: what has such an id, for messages.

    Raises:
        RequestError: the limit is wrong, or no item has the id `after`.
    """
    size = whole_number(limit, max_limit)
    if not 1 <= size <= max_limit:
        raise RequestError(
            f"limit: expected a whole number from 1 to {max_limit}, got {shown(limit)}"
        )
    pairs = list(zip(ids, items, strict=True))
    if order == "desc":
        pairs.reverse()
    if after is not None:
        place = next((place for place, (id_, _) in enumerate(pairs) if id_ == after), None)
        if place is None:
            raise RequestError(f"after: expected the id of {noun}, got {shown(after)}")
        pairs = pairs[place + 1 :]
    page = pairs[:size]
    first, last = (page[0][0], page[-1][0]) if page else (None, None)
    return [item for _, item in page], len(pairs) > size, first, last
