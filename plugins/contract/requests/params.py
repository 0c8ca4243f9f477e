"""Requests as clients send them: sampling and pooling parameters, and the message to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hardpoint.errors import RequestError, reason_of, shown
from hardpoint.typed import Strict, convert
from hardpoint.typed.convert import SuggestingMeta

from .lora import LoRARequest
from .markers import ReasoningMarkers
from .media import MultiModalFeature
from .resumed import ResumedOutputs
from .structured import StructuredOutputs

__all__ = [
    "EngineCoreRequest",
    "PoolingParams",
    "RepetitionDetection",
    "RequestOutputKind",
    "SamplingParams",
]

TokenId = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NonEmpty = Annotated[str, Meta(min_length=1)]


class RequestOutputKind(IntEnum):
    """Which part of the output each RequestOutput holds."""

    CUMULATIVE = 0
    """Each holds the whole output so far."""
    DELTA = 1
    """Each holds the new text and tokens."""
    FINAL_ONLY = 2
    """There is one, at the end."""


class RepetitionDetection(Strict):
    """When to end a request because its output loops.

    The request ends with finish reason "repetition" when its newest tokens are `min_count` copies
    of one pattern of at least `min_pattern` and at most `max_pattern` tokens.
    """

    max_pattern: Annotated[int, Meta(ge=1, le=1024)]
    min_pattern: Annotated[int, Meta(ge=1, le=1024)] = 1
    min_count: Annotated[int, Meta(ge=2)] = 4


class _DefaultCount(IntEnum):
    """A default that equals a number, and differs by identity from a caller's number."""

    MAX_TOKENS = 16

    __repr__ = int.__repr__


class SamplingParams(Strict, metaclass=SuggestingMeta, omit_defaults=True):
    """How the tokens of a request are chosen, and when it stops.

    The constructor checks nothing; the engine checks all fields when it gets the request, and never
    changes them.

    Attributes:
        n: completions per prompt.
        temperature: below 1e-5 is greedy; larger is more random.
        top_p: keep the smallest set of tokens with at least this total probability; 1 is off.
        top_k: keep the k likeliest tokens; 0 or -1 is off.
        min_p: drop tokens less likely than `min_p` times the likeliest; 0 is off.
        seed: makes sampling repeatable; None draws one per request.
        max_tokens: maximum number of output tokens; None is until the context is full. The default
            is 16, and None in calls that take messages: see `for_chat`.
        min_tokens: minimum number of output tokens before a stop token, before the token that
            completes a stop string, and before an end by `repetition_detection`.
        stop: strings that end the text; cut off unless `include_stop_str_in_output`. The string
            that is completed first counts, of several that end together the first one in the list.
        stop_token_ids: tokens that end it, in addition to the model's end-of-sequence tokens.
        ignore_eos: do not stop at the model's own end-of-sequence tokens.
        logprobs: number of likeliest tokens with log-probabilities returned at each output
            position, besides the chosen token's; -1 is the whole vocabulary.
        logprob_token_ids: tokens with log-probabilities returned at each output position, besides
            the chosen token and the likeliest ones, if `logprobs` asks for some: at most
            128; duplicates count once.
        prompt_logprobs: the same as `logprobs` for each prompt position after the first.
        presence_penalty: subtracted once from the logit of every token in the output.
        frequency_penalty: subtracted for every occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt
            or output (CTRL, arXiv:1909.05858); 1 is off.
        logit_bias: token id to a number in [-100, 100] added to its logit.
        bad_words: strings that must not be produced.
        allowed_token_ids: only these may be produced.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string (or stop token) in the text.
        detokenize: False returns token ids and no text.
        output_kind: which part of the output each RequestOutput holds.
        repetition_detection: end the request when its output loops; None never does.
        thinking_token_budget: maximum tokens between the reasoning parser's markers; then the end
            marker is forced. None is no limit.
        reasoning_parser: name of an enabled output parser that finds the reasoning; "none" finds
            none, and None is the configuration's `reasoning.parser`.
        tool_parser: the same for calls of tools, and `tools.parser`.
        speculator: name of an enabled speculator, which drafts tokens; "none" has no drafts, and
            None is the first of the configuration's `speculation.use`. It changes no output.
        routed_experts: return the experts that a mixture of experts chose for each token; see
            `CompletionOutput.routed_experts`.
        skip_reading_prefix_cache: compute all of the prompt, also tokens in the prefix cache.
        include: names of step parts that add their figures of this request to its last output, such
            as "speculation"; see `CompletionOutput.part_figures`.
        structured: constraint on the answer, such as a JSON schema. A mapping with the
            fields of `StructuredOutputs` will do.
        logits_processors: callables `(output_ids, logits)` or `(prompt_ids, output_ids, logits)`
            that return the logits [vocab] of this request; only if the engine runs in the caller's
            process. Otherwise enable a factory of such callables as a plugin.
        plugin_args: arguments of plugins by name or `kind/name`, each a mapping or an `Arguments`
            instance.
    """

    n: Annotated[int, Meta(ge=1, le=4096)] = 1
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = _DefaultCount.MAX_TOKENS
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop: NonEmpty | list[NonEmpty] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=128)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] = {}
    bad_words: list[NonEmpty] = []
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    reasoning_parser: NonEmpty | None = None
    tool_parser: NonEmpty | None = None
    speculator: NonEmpty | None = None
    routed_experts: bool = False
    skip_reading_prefix_cache: bool = False
    include: list[NonEmpty] = []
    structured: StructuredOutputs | None = None
    logits_processors: list[Any] = []
    plugin_args: dict[str, Any] = {}

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken (temperature under 1e-5)."""
        return self.temperature < 1e-5

    @property
    def wants_logprobs(self) -> bool:
        """Whether output positions have log-probabilities."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def for_chat(self) -> SamplingParams:
        """Return the parameters of a call that takes messages.

        An answer has the rest of the context if neither the caller nor the model's files state
        `max_tokens`. This is the only difference from a call that takes a prompt.
        """
        if self.max_tokens is not _DefaultCount.MAX_TOKENS:
            return self
        return msgspec.structs.replace(self, max_tokens=None)

    def checked(self) -> SamplingParams:
        """Return an equal object with every field checked.

        Raises:
            RequestError: naming the field, its value and the expectation.
        """
        structured = self.structured
        if structured is not None:  # which may hold a type
            structured = StructuredOutputs.checked(structured)
        plain = msgspec.structs.replace(  # functions are not data
            self, logits_processors=[], structured=structured
        )
        params = convert(plain, SamplingParams, path="", error=RequestError)
        callables = _callables(self.logits_processors)
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise RequestError(
                f"min_tokens: expected at most max_tokens ({params.max_tokens}), "
                f"got {params.min_tokens}"
            )
        detection = params.repetition_detection
        if detection is not None and detection.min_pattern > detection.max_pattern:
            raise RequestError(
                f"repetition_detection.min_pattern: expected at most max_pattern "
                f"({detection.max_pattern}), got {detection.min_pattern}"
            )
        if params.stop_strings and not params.detokenize:
            raise RequestError("stop: stop strings need text, but detokenize is false")
        if params.structured is not None and params.structured.lenient and not params.detokenize:
            raise RequestError(
                "structured.lenient: answers are validated as text, but detokenize is false"
            )
        return msgspec.structs.replace(params, logits_processors=callables)


class PoolingParams(Strict, omit_defaults=True):
    """Parameters of a pooling request, which returns one result for the prompt and no tokens.

    Attributes:
        task: kind of result: a vector for the prompt ("embed") or for each of its tokens
            ("token_embed"), class probabilities ("classify"), or how well two texts match
            ("score").
        dimensions: size of a truncated vector; None is the model's own number.
        normalize: whether vectors are scaled to length 1, after they are truncated; None is the
            model's default.
        pooler: name of an enabled pooler, which makes one vector of the hidden states of the
            prompt, or one for each token; None is the model's.
        use_activation: whether logits of classes become probabilities, by sigmoid or softmax; None
            uses the setting in the model's files, mostly true.
        plugin_args: arguments of poolers by name, each a mapping or an `Arguments` instance.
    """

    task: Literal["embed", "token_embed", "classify", "score"] = "embed"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    normalize: bool | None = None
    pooler: NonEmpty | None = None
    use_activation: bool | None = None
    plugin_args: dict[str, Any] = {}


def _callables(value: Any) -> list[Any]:
    """Return `logits_processors` as a new list.

    Raises:
        RequestError: it is not a list, or an item is not a callable.
    """
    if not isinstance(value, list):
        raise RequestError(f"logits_processors: expected a list, got {type(value).__name__}")
    try:
        callables = list(value)
    except Exception as cause:  # of a subclass
        raise RequestError(f"logits_processors: {reason_of(cause)}") from cause
    for index, item in enumerate(callables):
        if not callable(item):
            raise RequestError(
                f"logits_processors[{index}]: expected a callable with exactly two positional "
                f"parameters (output_ids, logits) or three (prompt_ids, output_ids, logits), "
                f"got {shown(item)}"
            )
    return callables


Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, a result of `apply_chat_template`, or a mapping for a step part."""


def ids_after_embeddings(known_ids: Sequence[int | None]) -> list[int]:
    """Return the ids after the last None of `EngineCoreRequest.known_prompt_ids`."""
    start = len(known_ids)
    while start and known_ids[start - 1] is not None:
        start -= 1
    return list(known_ids[start:])  # type: ignore[arg-type]


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A request to retain computed blocks in the prefix cache after the request's end.

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
        prompt_embeds: array [positions, hidden] of the positions that are not token ids, in their
            order, as float32, float16, or uint16 with the bits of bfloat16; None if all are.
        prompt_is_token_ids: for a mixed prompt, whether each position is a token id; None if all or
            none are.
        reasoning_parser_kwargs: None; `plugin_args` has the arguments of parsers.
        resumed: output so far of another engine, which this one continues; None of a new one.
        is_admitted: whether another engine has admitted it, so that no limit of waiting applies.
        generation: generation of the plugins that it finishes with; set by the frontend.
        members: hidden requests that run together with it, by the step part that opened them; see
            `FrontendHalf.members`. The engine sets their ids.
        leader: id of the request that it is a member of; None of a request that callers see.
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
    members: dict[str, list[EngineCoreRequest]] = {}
    leader: str | None = None

    @property
    def known_prompt_ids(self) -> list[int]:
        """The prompt as plugins see it: None, not 0, where an embedding stands."""
        if self.prompt_embeds is None:
            return self.prompt_token_ids
        is_id = self.prompt_is_token_ids
        if is_id is None:
            ids: list[Any] = [None] * len(self.prompt_token_ids)
        else:
            pairs = zip(self.prompt_token_ids, is_id, strict=True)
            ids = [token if known else None for token, known in pairs]
        return ids

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

        Only features with tokens that see later ones must not be cut.
        """
        for feature in self.features:
            if feature.sees_itself and feature.offset < num_tokens < feature.end:
                return feature.offset
        return num_tokens
