"""Requests and outputs: messages between frontend and engine, and results for users."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .engine_state import EngineLoad, KVCacheChanges
from .markers import ReasoningMarkers
from .media import MultiModalFeature
from .params import PoolingParams, SamplingParams
from .resumed import ResumedOutputs, WeightRun
from .stats import (
    EngineCoreEvent,
    PrefillStats,
    RequestMetrics,
    SchedulerStats,
)

__all__ = [
    "AdapterScale",
    "CompletionOutput",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "FinishReason",
    "LoRARequest",
    "Logprob",
    "MultiModalFeature",
    "PartArray",
    "PoolingRequestOutput",
    "Prompt",
    "RequestOutput",
    "ResumedOutputs",
    "Retention",
    "TokenLogprobs",
    "ToolCall",
    "WeightRun",
    "ids_after_embeddings",
]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, what `apply_chat_template` returns, or a mapping that a step part reads."""


def ids_after_embeddings(known_ids: Sequence[int | None]) -> list[int]:
    """Return the ids after the last None of `EngineCoreRequest.known_prompt_ids`."""
    start = len(known_ids)
    while start and known_ids[start - 1] is not None:
        start -= 1
    return list(known_ids[start:])  # type: ignore[arg-type]


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


AdapterScale = Annotated[float, Meta(ge=-100.0, le=100.0)]
"""A factor of what an adapter changes."""


class LoRARequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The LoRA adapter of a request.

    Attributes:
        name: name of the adapter, as users know it.
        id: 1 or more; identifies the adapter in workers.
        path: folder of its files, as PEFT writes them; empty for one that was added by that name.
        content_hash: hash of the adapter's weights and configuration, part of the keys of cached
            blocks; without one, name and id are, which another adapter may have later.
        scale: factor of what the adapter changes, for this request: 0.0 gives what the model gives
            without it; also part of those keys, unless it is 1.0.
    """

    name: str
    id: int
    path: str = ""
    content_hash: str = ""
    scale: AdapterScale = 1.0


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A wish that what a request computes stays in the KV cache after its end.

    Attributes:
        session: name of the conversation that the request belongs to.
        seconds: how long, from its end on.
    """

    session: str
    seconds: float


class EngineCoreRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One sequence for the engine to continue.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: never empty, all inside the vocabulary; 0 at positions of `prompt_embeds`.
        params: checked; `max_tokens` and `seed` are filled in.
        eos_token_ids: the model's own end-of-sequence tokens; empty under `ignore_eos`.
        plugin_args: per component that has arguments of this request, these as plain data,
            prepared. The key is the name of a logits processor, and `kind/name` of any other
            component.
        arrival_time: seconds on the clock of the frontend, which sets 0 to the time of the call and
            measures latencies from it. The engine sets it to its own clock's time when the request
            arrives there.
        priority: smaller is more important.
        child_index: index among the `n` completions.
        client_index: index of the frontend that gets its outputs; an engine process sets it to that
            of the connection that the request came by.
        tags: user-defined labels, such as {"tenant": "acme"}, for policies and sinks.
        timeout: seconds that are left before it ends unfinished, from now in the frontend, and from
            its arrival in the engine; None is without limit.
        cache_salt: requests with different salts never share cached blocks.
        lora: its adapter.
        features: multimodal features, by offset.
        retention: whether and how long its blocks are worth more than others after its end.
        kv_transfer_params: for the KV connector.
        external_req_id: the user's id; set by the frontend.
        data_parallel_rank: rank of the engine to run on; None lets the balancer choose.
        trace_headers: headers of the trace that it belongs to, for sinks and hooks.
        resumable: false; a prompt comes whole.
        reasoning_ended: whether the last reasoning marker in the prompt ends the reasoning; None
            without a reasoning parser.
        reasoning_markers: the token ids that enclose reasoning, by which a grammar knows where the
            answer begins; None for a request without a grammar or without a reasoning parser.
        pooling_params: parameters of a pooling request, which generates no tokens; of `params`,
            only `output_kind` is used.
        second_type_start: position, in a pair of texts, of the first token of type 1; the length of
            the prompt, if no token has that type. None: the prompt is not a pair.
        prompt_embeds: array [positions, hidden] of the positions that are no token ids, in their
            order, as float32, float16, or uint16 with the bits of bfloat16; None if all are.
        prompt_is_token_ids: for a mixed prompt, whether each position is a token id; None if all or
            none are.
        reasoning_parser_kwargs: arguments of the reasoning parser for this request.
        resumed: what another engine has sent of it, which this one continues; None of a new one.
        is_admitted: whether another engine has admitted it, so that no limit of waiting applies.
        generation: generation of the plugins that it finishes with; set by the frontend.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: Sequence[int] = ()
    plugin_args: dict[str, dict[str, Any]] = {}
    arrival_time: float = 0.0
    priority: int = 0
    child_index: int = 0
    client_index: int = 0
    tags: dict[str, str] = {}
    timeout: float | None = None
    cache_salt: str | None = None
    lora: LoRARequest | None = None
    features: Sequence[MultiModalFeature] = ()
    retention: Retention | None = None
    kv_transfer_params: dict[str, Any] | None = None
    external_req_id: str | None = None
    data_parallel_rank: int | None = None
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    reasoning_ended: bool | None = None
    reasoning_markers: ReasoningMarkers | None = None
    pooling_params: PoolingParams | None = None
    second_type_start: int | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    resumed: ResumedOutputs | None = None
    is_admitted: bool = False
    generation: int = 0

    @property
    def known_prompt_ids(self) -> list[int]:
        """The prompt as plugins see it: None, not 0, where an embedding stands."""
        if self.prompt_embeds is None:
            return self.prompt_token_ids
        is_id = self.prompt_is_token_ids
        if is_id is None:
            found: list[Any] = [None] * len(self.prompt_token_ids)
        else:
            pairs = zip(self.prompt_token_ids, is_id, strict=True)
            found = [token if known else None for token, known in pairs]
        return found

    @property
    def last_prompt_ids(self) -> list[int]:
        """The ids of the prompt after its last embedding; all of one without any."""
        ids = self.prompt_token_ids
        return ids if self.prompt_embeds is None else ids_after_embeddings(self.known_prompt_ids)

    @property
    def stop_token_ids(self) -> list[int]:
        """All token ids that end the request: the model's and the requested ones."""
        return [*self.eos_token_ids, *self.params.stop_token_ids]

    @property
    def observed_before(self) -> Sequence[float]:
        """The logprobs of its `resumed` outputs that logits processors observed; may be empty."""
        return (self.resumed and self.resumed.observed_logprobs) or ()

    def whole_prefix(self, num_tokens: int) -> int:
        """Return the length of the longest prefix, of at most so many tokens, that cuts no feature.

        Only features whose tokens see those after them are not to be cut.
        """
        for feature in self.features:
            if feature.sees_itself and feature.offset < num_tokens < feature.end:
                return feature.offset
        return num_tokens


class TokenLogprobs(msgspec.Struct, gc=False):
    """Log-probabilities at one position: of the chosen token, then of those asked for.

    Attributes:
        token_ids: the chosen token, the likeliest ones asked for, then those of
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
        positions: int64 array [positions], ascending, from 0: those that `EngineHalf.arrays` names.
        values: array [positions, ...].
    """

    positions: Any
    values: Any


class EngineCoreOutput(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """Output of one step for one request.

    Attributes:
        new_token_ids: empty while the prompt is being computed.
        stop_reason: the stop token id that ended it, if in `stop_token_ids`; the stop string if the
            engine matches stop strings.
        prompt_logprobs: logprobs of the prompt positions computed since the last output; None at
            the prompt's first position.
        error: with FinishReason.ERROR, what failed, and in which plugin or model.
        faulty_plugin: with FinishReason.ERROR, the name of the responsible plugin, if any.
        events: since the last output; only with statistics.
        num_cached_tokens: in the first output, prompt tokens that were not computed.
        kv_transfer_params: in the last output, from the KV connector.
        error_kind: name of the error's class, if the engine refused the request with `error`, or
            died.
        pooling_output: result of a pooling request.
        num_nans_in_logits: number of NaN logits; more than 0 means that the output is damaged.
        prefill_stats: in the output of the step that completed the prompt.
        routed_experts: experts of the positions computed since the last output, as those of
            CompletionOutput; they follow one another from the first position of the prompt.
        trace_headers: in the last output, those of the request.
        part_figures: figures so far, by the step part; those of `SamplingParams.include`.
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
    stop_reason: int | str | None = None
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
            those that the engine aborted or refused. None stands for an empty set.
        engine_index: index of the engine that sends them.
        scheduler_stats: state of its scheduler; None unless statistics are collected.
        load: its load, if it has changed; None unless clients divide requests among engines.
        cache_changes: changes of its KV cache; None unless clients choose engines by what these
            have cached.
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
    """A call of a tool; of a streamed one, what is new.

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
        text: detokenised output; empty with `detokenize=False`.
        token_ids: output tokens; the stop token, if any, is the last.
        reasoning: part of the text that an output parser finds to be reasoning; None without any.
        content: part of the text that is the answer; None without any, or without an output parser.
        tool_calls: tool calls in the text; None or at least one.
        warning: what an output parser finds wrong: a malformed call, or reasoning without an end.
        validation_error: what is wrong with an answer that is JSON of a `lenient` schema.
        cumulative_logprob: sum over the whole output so far; None unless logprobs were asked for.
        logprobs: per output position, token id to Logprob; of outputs that came with the prompt,
            there are none, here and in the sum.
        finish_reason: "stop", "tool_calls", "length", "abort", "error", "repetition" or "timeout";
            None while running.
        stop_reason: the stop string or stop token id that ended it, if one did.
        error: with "error", what failed, and in which plugin or model.
        error_kind: with "error", the name of the error's class, if the engine refused the request
            or died.
        metrics: in the last output; None unless `stats.request_metrics` is on.
        routed_experts: in the last output, if `SamplingParams.routed_experts` asks for them: the
            experts that each token of the prompt and the output chose, the likeliest first, int32
            array [positions, layers, experts per token]. The last token has none, as it was not
            computed. -1 stands for none: in layers without experts, and in positions whose keys
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
    warning: str | None = None
    validation_error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
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
        """How often its completions went on at another engine; of those that have ended."""
        return sum(completion.num_resumes for completion in self.outputs)


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """The result of a pooling request.

    Attributes:
        request_id: the user's.
        outputs: result of the task of `PoolingParams`; None before it is known.
        prompt_token_ids: None at positions of embeddings.
        finished: whether it has ended.
        finish_reason: as of a CompletionOutput.
        error: with "error", what failed, and in which plugin or model.
        error_kind: with "error", the name of the error's class, if the engine refused the request
            or died.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool
    finish_reason: str | None = None
    error: str | None = None
    error_kind: str | None = None
