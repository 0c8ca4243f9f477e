"""Requests and outputs: what crosses the border between frontend and engine, and what users see."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from .params import PoolingParams, SamplingParams
from .stats import RequestMetrics, SchedulerStats

__all__ = [
    "CompletionOutput",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "FinishReason",
    "LoRARequest",
    "Logprob",
    "MultiModalFeature",
    "PoolingRequestOutput",
    "PrefillStats",
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
    TIMEOUT = 5

    def __str__(self) -> str:
        return self.name.lower()


class LoRARequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The adapter that a request runs with.

    Attributes:
        name: tells adapters apart; part of the prefix cache's keys.
        id: 1 or more; small numbers that workers know adapters by.
    """

    name: str
    id: int


class MultiModalFeature(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One image, sound or video of a prompt, which an encoder turns into embeddings.

    Attributes:
        identifier: a hash of the content; equal content is encoded once.
        offset: prompt position of its first placeholder token.
        length: placeholder tokens that it covers, which is also what encoding it costs.
    """

    identifier: str
    offset: int
    length: int


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """One sequence for the engine to continue. Field order is part of the protocol.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: never empty, all inside the vocabulary.
        params: checked; `max_tokens` and `seed` are filled in.
        eos_token_ids: the model's own end-of-sequence tokens; empty under `ignore_eos`.
        plugin_args: per logits processor that this request uses, its checked arguments as
            plain data.
        arrival_time: seconds on the engine's clock; 0 is when the frontend gets it.
        priority: smaller is more important.
        child_index: which of the `n` completions this is.
        client_index: which frontend sent it; its outputs go back there.
        tags: free words about it, such as {"tenant": "acme"}; for policies and sinks.
        timeout: seconds from `arrival_time` after which it ends unfinished; None is never.
        cache_salt: requests with different salts never share cached blocks.
        lora: its adapter.
        features: images and the like, by offset.
        kv_transfer_params: for the KV connector alone.
        external_req_id: the id by which the user knows it; the frontend gives it.
        data_parallel_rank: the engine that it shall run on; None leaves it to the balancer.
        current_wave: of data-parallel engines, when it was sent.
        trace_headers: of the trace that it belongs to.
        resumable: more of its prompt may follow.
        reasoning_ended: whether the last thing that the prompt says of thinking is that it ends;
            None where the model has no reasoning parser.
        pooling_params: it pools, and gives no tokens; of `params`, only `output_kind` counts.
        prompt_embeds: a tensor [tokens, hidden] in place of token ids.
        prompt_is_token_ids: where only some of the prompt is embeddings, whether each position is
            a token id; None where all or none are.
        reasoning_parser_kwargs: what the reasoning parser is built with for this request.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    plugin_args: dict[str, dict[str, Any]] = {}
    arrival_time: float = 0.0
    priority: int = 0
    child_index: int = 0
    client_index: int = 0
    tags: dict[str, str] = {}
    timeout: float | None = None
    cache_salt: str | None = None
    lora: LoRARequest | None = None
    features: list[MultiModalFeature] = []
    kv_transfer_params: dict[str, Any] | None = None
    external_req_id: str | None = None
    data_parallel_rank: int | None = None
    current_wave: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    reasoning_ended: bool | None = None
    pooling_params: PoolingParams | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None

    @property
    def stop_token_ids(self) -> list[int]:
        """Every token id that ends the request: the model's own and those asked for."""
        return [*self.eos_token_ids, *self.params.stop_token_ids]


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position, best first, the chosen token in front.

    Attributes:
        token_ids: the chosen token, then the likeliest ones asked for.
        logprobs: natural logarithms, one per entry of `token_ids`.
        rank: rank of the chosen token; 1 is the likeliest.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class EngineCoreEventType(IntEnum):
    """What happened to a request in the scheduler."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Something that happened to a request.

    Attributes:
        timestamp: seconds on the engine's clock, by default now; comparable within one engine
            only.
    """

    type: EngineCoreEventType
    timestamp: float = msgspec.field(default_factory=time.monotonic)


class PrefillStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a prompt was computed.

    Attributes:
        num_prompt_tokens: its length.
        num_cached_tokens: those that needed no computing.
        num_external_tokens: of these, those that a KV connector brought.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_external_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, gc=False):
    """What one step added to one request.

    Attributes:
        new_token_ids: in order; empty while a prompt is still being computed.
        stop_reason: the stop token id that ended it, if it was one of `stop_token_ids`; text where
            an engine looks for stop strings itself.
        prompt_logprobs: those of the prompt positions computed since the last output; the
            first position of a prompt has None.
        error: with FinishReason.ERROR, what failed and who is to blame.
        faulty_plugin: with FinishReason.ERROR, the name of the plugin to blame, if one is.
        events: what happened since the last output; only where statistics are on.
        num_cached_tokens: with the request's first output, prompt tokens that needed no
            computing.
        kv_transfer_params: with the last output, what the KV connector has to say.
        error_kind: the engine refused the request with `error`; the name of the error's class.
        pooling_output: of a model that pools.
        num_nans_in_logits: more than 0 marks damaged output.
        prefill_stats: with the output of the step that completed the prompt.
        routed_experts: chosen by a mixture of experts, per token and layer.
        trace_headers: with the last output, those of the request.
    """

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    faulty_plugin: str | None = None
    events: list[EngineCoreEvent] = []
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error_kind: str | None = None
    pooling_output: Any = None
    num_nans_in_logits: int = 0
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    trace_headers: dict[str, str] | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class EngineCoreOutputs(
    msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag=True, gc=False
):
    """What one step has for one client.

    Attributes:
        timestamp: seconds on the engine's clock; 0.0 becomes now on construction.
        finished_requests: ids that ended since the last step. Where nobody asked for them, only
            those that the engine aborted or refused; None is none.
        engine_index: which engine it comes from.
        scheduler_stats: how its scheduler stands; None where nobody asked.
        wave_complete: the wave of data-parallel engines that has ended.
        start_wave: the wave that idle engines shall begin.
    """

    outputs: list[EngineCoreOutput] = []
    timestamp: float = 0.0
    finished_requests: set[str] | None = None
    engine_index: int = 0
    scheduler_stats: SchedulerStats | None = None
    wave_complete: int | None = None
    start_wave: int | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


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
        finish_reason: "stop", "length", "abort", "error", "repetition" or "timeout"; None while
            running.
        stop_reason: the stop string or stop token id that ended it, if one did.
        error: with "error", what failed and who is to blame.
        error_kind: with "error", the name of the error's class, where the engine refused the
            request.
        metrics: with its last output, how it went; None unless `stats.request_metrics` is on.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_kind: str | None = None
    metrics: RequestMetrics | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """The completions of one prompt.

    Attributes:
        request_id: the user's.
        prompt: its text, where it was given as text or messages.
        prompt_logprobs: per prompt position, token id to Logprob; the first is None.
        outputs: by completion index.
        finished: whether every completion has ended.
        num_cached_tokens: prompt tokens that needed no computing; None until that is known.
        kv_transfer_params: at the end, what the KV connector has to say.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def metrics(self) -> RequestMetrics | None:
        """How its first completion went; see `CompletionOutput.metrics`."""
        return self.outputs[0].metrics if self.outputs else None


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """What a model that pools makes of one prompt.

    Attributes:
        request_id: the user's.
        outputs: the result, of the task that `PoolingParams` names; None while there is none.
        finished: whether it has ended.
        finish_reason: as of a CompletionOutput.
        error: with "error", what failed and who is to blame.
        error_kind: with "error", the name of the error's class, where the engine refused the
            request.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool
    finish_reason: str | None = None
    error: str | None = None
    error_kind: str | None = None
