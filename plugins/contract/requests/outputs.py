"""Outputs of requests: messages from the engine to the frontend, and results for users."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from .engine_state import EngineLoad, KVCacheChanges
from .lora import LoRARequest
from .resumed import WeightRun
from .stats import EngineCoreEvent, PrefillStats, RequestMetrics, SchedulerStats

__all__ = [
    "CompletionOutput",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "FinishReason",
    "Logprob",
    "PartArray",
    "RequestOutput",
    "ToolCall",
]


class FinishReason(IntEnum):
    """Why a request ended; `str()` returns the public name."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4
    TIMEOUT = 5

    def __str__(self) -> str:
        return self.name.lower()


class TokenLogprobs(msgspec.Struct, gc=False):
    """Log-probabilities at one position: of the chosen token, then of the requested ones.

    Attributes:
        token_ids: the chosen token, the requested number of likeliest ones, then the tokens in
            `SamplingParams.logprob_token_ids`.
        logprobs: natural logarithms, one per entry of `token_ids`.
        rank: rank of the chosen token; 1 is the likeliest.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class PartArray(msgspec.Struct):
    """Numbers that a step part gives for positions of a request.

    Attributes:
        positions: int64 array [positions], ascending, from 0, see `OutputFigures.arrays`.
        values: array [positions, ...].
    """

    positions: Any
    values: Any


class EngineCoreOutput(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """Output of one step for one request.

    Attributes:
        new_token_ids: empty while the prompt is being computed.
        stop_reason: the stop token id that ended it, if in `stop_token_ids`; the stop string if the
            engine matches stop strings; a mapping if a plugin returned a `Finish`.
        prompt_logprobs: logprobs of the prompt positions computed since the last output; None at
            the prompt's first position.
        error: with FinishReason.ERROR, the reason, and the responsible plugin or model.
        faulty_plugin: with FinishReason.ERROR, the name of the responsible plugin, if any.
        events: since the last output; only with statistics.
        num_cached_tokens: in the first output, prompt tokens that were not computed.
        kv_transfer_params: in the last output, from the KV connector.
        error_kind: name of the error's class, if the engine rejected the request with `error`, or
            died.
        pooling_output: result of a pooling request.
        num_nans_in_logits: NaN logits that the executor counted, which no built-in one does.
        prefill_stats: in the output of the step that completed the prompt.
        routed_experts: experts of the positions computed since the last output, as in
            CompletionOutput; they follow one another from the first position of the prompt.
        trace_headers: in the last output, the trace headers of the request.
        part_figures: figures so far, by the step part, for the parts in `SamplingParams.include`.
        part_arrays: numbers of positions since the last output, by part and name.
        num_resumes: in the last output, how often the request went on at another engine; the
            client of several engines sets it.
        weight_runs: versions of all output tokens, once there are several versions; in the first
            output, and in the first one after a change.
        observed_logprobs: per new token, its logprob as logits processors of the request observe
            it, for `ResumedOutputs`; None if none does.
    """

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | dict[str, Any] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    faulty_plugin: str | None = None
    events: Sequence[EngineCoreEvent] = ()
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error_kind: str | None = None
    pooling_output: Any = None
    num_nans_in_logits: int = 0
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    trace_headers: dict[str, str] | None = None
    part_figures: dict[str, dict[str, Any]] | None = None
    part_arrays: dict[str, dict[str, list[PartArray]]] | None = None
    weight_runs: list[WeightRun] | None = None
    num_resumes: int = 0
    observed_logprobs: list[float] | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class EngineCoreOutputs(msgspec.Struct, omit_defaults=True, kw_only=True, tag=True, gc=False):
    """Outputs of one step for one client.

    Attributes:
        timestamp: seconds on the engine's clock; 0.0 becomes now on construction.
        finished_requests: ids that ended since the last step; unless `report_finished` is set, only
            requests that the engine aborted or rejected. None stands for an empty set.
        engine_index: index of the engine that sends them.
        scheduler_stats: state of its scheduler; None unless statistics are collected.
        load: its load, if it has changed; None unless clients divide requests among engines.
        cache_changes: changes of its KV cache; None unless clients choose engines by their cached
            blocks.
        start_wave: the wave that the engine has started; None unless engines share experts.
        wave_complete: the wave that all engines have ended.
    """

    outputs: list[EngineCoreOutput] = []
    timestamp: float = 0.0
    finished_requests: set[str] | None = None
    engine_index: int = 0
    scheduler_stats: SchedulerStats | None = None
    load: EngineLoad | None = None
    cache_changes: KVCacheChanges | None = None
    start_wave: int | None = None
    wave_complete: int | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm; of the model's logits, unless configured with
            `sampler.logprobs = "processed"`.
        rank: 1 is the likeliest; None if unknown, as of a token that `logprob_token_ids` names and
            that is neither chosen nor among the likeliest asked for.
        decoded_token: text of the token.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool; in a stream, its new part.

    Attributes:
        index: among the calls of the completion.
        id: id of the call; None in later parts of a streamed one.
        name: name of the tool; None in later parts.
        arguments: JSON text of an object.
        content_before: characters of the output's `content` that come before it.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str
    content_before: int = 0


class CompletionOutput(msgspec.Struct, kw_only=True, gc=False):
    """One completion of a prompt.

    Attributes:
        index: among the `n` completions.
        text: detokenized output; empty with `detokenize=False`.
        token_ids: output tokens; the stop token, if any, is the last.
        reasoning: part of the text that an output parser finds to be reasoning; None without any.
        content: part of the text that is the answer; None without any, or without an output parser.
        tool_calls: tool calls in the text; None or at least one.
        void_calls: indexes of calls whose parts earlier outputs of a stream have, and which turned
            out to be malformed: their text is content.
        warning: problem that an output parser found: a malformed call, or reasoning without an end.
        validation_error: mistake in an answer that is JSON of a `lenient` schema.
        cumulative_logprob: sum over the whole output so far; None unless logprobs were asked for.
        logprobs: per output position, token id to Logprob; of outputs that came with the prompt,
            there are none, here and in the sum.
        finish_reason: "stop", "tool_calls", "length", "abort", "error", "repetition" or "timeout";
            None while running.
        stop_reason: the stop string or stop token id that ended it; of a plugin that ended it, a
            mapping with its name as "plugin" and its "reason".
        error: with "error", the reason, and the responsible plugin or model.
        error_kind: with "error", the name of the error's class, if the engine rejected the request
            or died.
        metrics: in the last output; None unless `stats.request_metrics` is on.
        routed_experts: in the last output, if `SamplingParams.routed_experts` asks for them: the
            experts that each token of the prompt and the output chose, the likeliest first, int32
            array [positions, layers, experts per token]. The last token has none, as it was not
            computed. -1 stands for none: in layers without experts, and in positions with keys
            and values came from the prefix cache.
        part_figures: in the last output, figures of the parts that `SamplingParams.include` names.
        part_arrays: in the last output, numbers of positions, by step part and name.
        num_resumes: in its last output, how often it went on at another engine (`parallel.data`,
            `engine.restart`).
        weight_runs: versions of the weights that the output tokens were sampled with, by the first
            token of each; None while the engine has had only one version.
    """

    index: int
    text: str
    token_ids: list[int]
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    void_calls: Sequence[int] = ()
    warning: str | None = None
    validation_error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | dict[str, Any] | None = None
    error: str | None = None
    error_kind: str | None = None
    metrics: RequestMetrics | None = None
    routed_experts: Any = None
    part_figures: dict[str, dict[str, Any]] | None = None
    part_arrays: dict[str, dict[str, PartArray]] | None = None
    weight_runs: list[WeightRun] | None = None
    num_resumes: int = 0


class RequestOutput(msgspec.Struct, kw_only=True, gc=False):
    """The completions of one prompt.

    Attributes:
        request_id: the user's.
        prompt: its text, if it was given as text or messages.
        prompt_token_ids: None at positions of embeddings.
        prompt_logprobs: per prompt position, token id to Logprob; the first is None.
        outputs: by completion index.
        finished: whether every completion has ended.
        num_cached_tokens: prompt tokens that were not computed; None until known.
        kv_transfer_params: in the last output, from the KV connector.
        lora_request: its adapter, with the hash of the content that it has; None is the model
            itself.
        turn: number of its turn in a conversation, from 0; None outside of any.
        seed: the seed that its tokens are drawn with, which the engine chose if the request has
            none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: LoRARequest | None = None
    turn: int | None = None
    seed: int | None = None

    @property
    def metrics(self) -> RequestMetrics | None:
        """Metrics of its first completion; see `CompletionOutput.metrics`."""
        return self.outputs[0].metrics if self.outputs else None

    @property
    def num_resumes(self) -> int:
        """Number of migrations of its finished completions to another engine."""
        return sum(completion.num_resumes for completion in self.outputs)


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """The result of a pooling request.

    Attributes:
        request_id: the user's.
        outputs: result of the task of `PoolingParams`; None before it is known.
        prompt_token_ids: None at positions of embeddings.
        finished: whether it has ended.
        finish_reason: as of a CompletionOutput.
        error: with "error", the reason, and the responsible plugin or model.
        error_kind: with "error", the name of the error's class, if the engine rejected the request
            or died.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool
    finish_reason: str | None = None
    error: str | None = None
    error_kind: str | None = None
