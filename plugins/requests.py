"""Requests and outputs: what crosses the border between frontend and engine, and what users see."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from .params import SamplingParams

__all__ = [
    "CompletionOutput",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "FinishReason",
    "Logprob",
    "RequestOutput",
    "TokenLogprobs",
]


class FinishReason(IntEnum):
    """Why a request ended; `str()` gives the public word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """One sequence for the engine to continue. Field order is part of the protocol.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: never empty, all inside the vocabulary.
        params: checked; `max_tokens` and `seed` are filled in.
        eos_token_ids: the model's own end-of-sequence tokens; empty under `ignore_eos`.
        plugin_args: per logits processor that this request uses, its checked arguments as
            plain data.
        arrival_time: seconds on the engine's clock.
        priority: smaller is more important.
        child_index: which of the `n` completions this is.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    plugin_args: dict[str, dict[str, Any]] = {}
    arrival_time: float = 0.0
    priority: int = 0
    child_index: int = 0

    @property
    def stop_token_ids(self) -> list[int]:
        """Every token id that ends the request: the model's own and those asked for."""
        return [*self.eos_token_ids, *self.params.stop_token_ids]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position, best first, the chosen token in front.

    Attributes:
        token_ids: the chosen token, then the likeliest ones asked for.
        logprobs: natural logarithms, one per entry of `token_ids`.
        rank: rank of the chosen token; 1 is the likeliest.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """What one step added to one request.

    Attributes:
        new_token_ids: in order; empty while a prompt is still being computed.
        stop_reason: the stop token id that ended it, if it was one of `stop_token_ids`.
        prompt_logprobs: those of the prompt positions computed since the last output; the
            first position of a prompt has None.
        error: with FinishReason.ERROR, what failed and who is to blame.
        faulty_plugin: with FinishReason.ERROR, the name of the plugin to blame, if one is.
    """

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    faulty_plugin: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """What one step has for one client."""

    outputs: list[EngineCoreOutput] = []
    timestamp: float = msgspec.field(default_factory=time.monotonic)


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm; of the logits as the model gave them, unless the
            configuration says `sampler.logprobs = "processed"`.
        rank: 1 is the likeliest; None where it is unknown.
        decoded_token: the token's own text.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One completion of a prompt.

    Attributes:
        index: which of the `n` completions.
        text: detokenised output; empty with `detokenize=False`.
        token_ids: output tokens; the stop token, if any, is the last.
        cumulative_logprob: sum over the whole output so far; None unless logprobs were asked for.
        logprobs: per output position, token id to Logprob.
        finish_reason: "stop", "length", "abort", "error" or "repetition"; None while running.
        stop_reason: the stop string or stop token id that ended it, if one did.
        error: with "error", what failed and who is to blame.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """The completions of one prompt.

    Attributes:
        prompt: its text, where it was given as text or messages.
        prompt_logprobs: per prompt position, token id to Logprob; the first is None.
        outputs: by completion index.
        finished: whether every completion has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
