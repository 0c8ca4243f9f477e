"""Messages between engine and workers: the plan of a step and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from .outputs import TokenLogprobs
from .params import EngineCoreRequest

__all__ = [
    "CachedRequests",
    "Finish",
    "GrammarBitmask",
    "ModelRunnerOutput",
    "NewRequest",
    "RequestFault",
    "SchedulerOutput",
]


BlockIds = Sequence[Sequence[int]]
"""Block ids of a request, one sequence per group; empty if the request has none."""


class NewRequest(msgspec.Struct, frozen=True):
    """A request that a worker does not have: new, or resumed after a preemption.

    Attributes:
        output_token_ids: output so far; empty unless it was preempted, or came from another engine.
        block_ids: its whole block table, one list per group.
        num_computed_tokens: leading tokens with keys and values in these blocks.
        resumed: whether it was preempted before.
        released_columns: see `CachedRequests`.
    """

    source: EngineCoreRequest
    output_token_ids: Sequence[int]
    block_ids: BlockIds
    num_computed_tokens: int
    resumed: bool = False
    released_columns: Sequence[tuple[int, int]] = ()


class SampledTokens(msgspec.Struct, frozen=True):
    """The tokens that a step sampled, for the workers that did not sample them.

    Attributes:
        step: number of its plan.
        token_ids: per request id.
    """

    step: int
    token_ids: Mapping[str, Sequence[int]]


class CachedRequests(msgspec.Struct, frozen=True):
    """Changes of the requests of a step that the worker already has.

    Attributes:
        request_ids: in the scheduler's order.
        num_computed_tokens: one per request id, before this step.
        new_block_ids: blocks to append per group, by request id, for requests that get any.
        released_columns: by request id, columns that leave its block tables before the step, one
            range (first, last + 1) after the other: `BlockReleases.starting_at`.
    """

    request_ids: Sequence[str] = ()
    num_computed_tokens: Sequence[int] = ()
    new_block_ids: Mapping[str, BlockIds] = {}
    released_columns: Mapping[str, Sequence[tuple[int, int]]] = {}


class PartData(msgspec.Struct, frozen=True):
    """Data of a step part for its worker halves.

    Attributes:
        data: result of `begin` of the engine's half.
        request_ids: requests of the plan that use the part, in the plan's order; None is all, of a
            part with `every_plan`.
    """

    data: bytes
    request_ids: Sequence[str] | None


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one step.

    Attributes:
        step: serial number of the plan, from 1.
        new_requests: requests sent in full, including requests that resume after preemption.
        cached_requests: requests that the worker has, sent as changes.
        num_scheduled_tokens: per request id, at least 1.
        total_num_scheduled_tokens: their sum.
        draft_token_ids: per request id, drafts to verify; part of its scheduled tokens. NO_DRAFT
            stands for a draft that does not exist.
        encoder_inputs: per request id, indices of the features to encode in this step.
        freed_encoder_inputs: identifiers of embeddings to drop before the worker encodes;
            each is sent once, also to workers that never had it.
        structured_request_ids: requests with a grammar, with their index among the scheduled ones;
            set by schedulers of contract 1 only. Step parts know their requests.
        preempted_request_ids: requests that leave the batch and may resume.
        finished_request_ids: requests that ended since the last plan; each is sent once.
        sampled: results that came in since the last plan, in the order of their plans; the engine
            fills them in where there are several workers, because only one of them samples.
        kv_connector_metadata: metadata that schedulers of contract 1 get from `connector`; None
            otherwise. The data of a KV connector is in its step part.
        part_data: from the engine's half of each step part to its worker halves, by the part's
            name; the engine fills it in.
        num_common_prefix_blocks: set by schedulers of contract 1 only; nothing reads it.
    """

    NO_DRAFT: ClassVar[int] = -1
    """Placeholder for a draft that does not exist; never accepted."""

    step: int = 0
    new_requests: Sequence[NewRequest] = ()
    cached_requests: CachedRequests = msgspec.field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = {}
    total_num_scheduled_tokens: int = 0
    draft_token_ids: Mapping[str, Sequence[int]] = {}
    encoder_inputs: Mapping[str, Sequence[int]] = {}
    freed_encoder_inputs: Sequence[str] = ()
    structured_request_ids: Mapping[str, int] = {}
    preempted_request_ids: frozenset[str] = frozenset()
    finished_request_ids: frozenset[str] = frozenset()
    sampled: Sequence[SampledTokens] = ()
    kv_connector_metadata: Any = None
    part_data: Mapping[str, PartData] = {}
    num_common_prefix_blocks: Sequence[int] = ()

    def num_computed_tokens(self) -> dict[str, int]:
        """Return how many tokens of each request were computed before the step, by id."""
        cached = self.cached_requests
        computed = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        return computed | {
            new.source.request_id: new.num_computed_tokens for new in self.new_requests
        }


class GrammarBitmask(msgspec.Struct, frozen=True):
    """Tokens that the grammars of a step allow.

    Attributes:
        request_ids: request of each row. A request with drafts has consecutive rows, one per draft
            and one more; a request without a grammar has none.
        bitmask: int32 array [rows, ceil(vocab_size / 32)]; token t is allowed if bit t % 32 of
            column t // 32 is set.
    """

    request_ids: list[str]
    bitmask: Any


class RequestFault(msgspec.Struct, frozen=True):
    """The error that ends a request.

    Attributes:
        message: the reason, and the responsible plugin or model.
        plugin: name of the responsible logits processor; None if it is the model.
    """

    message: str
    plugin: str | None = None


class Finish(msgspec.Struct, frozen=True):
    """A graceful end of a request, returned by a plugin instead of its usual result.

    The request ends with the tokens that it has, `finish_reason` "stop" and a `stop_reason` that
    is a mapping: "plugin", "reason" and, if it is set, "stop_reason". A stop token or an error in
    the same step takes precedence.

    Attributes:
        reason: short text for programs, such as "budget".
        stop_reason: further data of the plugin: text or a number.
        num_tokens: number of output tokens at which the request ends: with fewer it goes on, and
            tokens of the step beyond it are dropped. None: the request ends with all tokens of
            the step. Logits processors and samplers, which get each token in turn, have none.
        plugin: name of the plugin; set by the engine.
    """

    reason: str
    stop_reason: int | str | None = None
    num_tokens: int | None = None
    plugin: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise TypeError(f"Finish.reason: expected text, got {self.reason!r}")
        if not isinstance(self.stop_reason, int | str | None):
            raise TypeError(
                f"Finish.stop_reason: expected text, a number or None, got {self.stop_reason!r}"
            )

    def of(self, plugin: str) -> Finish:
        """Return the end with the name of its plugin."""
        return msgspec.structs.replace(self, plugin=plugin)

    @property
    def shown(self) -> dict[str, Any]:
        """The `stop_reason` of outputs."""
        shown: dict[str, Any] = {"plugin": self.plugin, "reason": self.reason}
        return shown if self.stop_reason is None else {**shown, "stop_reason": self.stop_reason}


class FinishedError(Exception):
    """Passes a `Finish` through calls with other results."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.reason)
        self.finish = finish


@dataclass(slots=True)
class ModelRunnerOutput:
    """The result of a step.

    Attributes:
        sampled_token_ids: per request computed up to its last token: accepted drafts, then one
            sampled token.
        logprobs: per request that asked for them, one entry per sampled token.
        prompt_logprobs: per request that asked for them, log-probabilities of this step's prompt
            positions; None for the first position.
        faults: requests that must end with an error; no token was sampled for them.
        kv_loaded: requests with keys and values that a step part has now loaded; the part sets it
            and the next two in its `result`.
        kv_saved: ended requests with blocks that the part no longer needs.
        invalid_block_ids: blocks that could not be loaded; their content is computed instead.
        num_nans_in_logits: number of NaN logits, per request that had any. Built-in workers do not
            count them; an executor of another package may.
        observed_logprobs: per request with logits processors that observe, the logprob that they
            were given of each sampled token.
        pooler_output: result per completed pooling request, for which no token is sampled; a step
            part sets it in its `result`.
        routed_experts: per request that asked for them, the experts of the step's tokens, int32
            array [tokens, layers, experts per token]; -1 stands for none.
        part_reports: reports of the worker halves of step parts, by the part's name and the rank.
        part_faults: why the worker half of a step part failed, by the part's name.
        is_cache_uncertain: whether one of them failed in the layers of the step, so that keys and
            values that were written may be wrong.
        finishes: requests that plugins end gracefully with the tokens of the step. The engine ends
            them after `Scheduler.update`, which need not read it. A request that got no token is in
            `faults`, too.
        waited_for: name of the plugin that needs the tokens of the step on the host before the
            next one is launched; empty if the steps overlap.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    faults: dict[str, RequestFault] = field(default_factory=dict)
    kv_loaded: frozenset[str] = frozenset()
    kv_saved: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    num_nans_in_logits: dict[str, int] = field(default_factory=dict)
    pooler_output: dict[str, Any] = field(default_factory=dict)
    routed_experts: dict[str, Any] = field(default_factory=dict)
    part_reports: dict[str, dict[int, bytes]] = field(default_factory=dict)
    part_faults: dict[str, str] = field(default_factory=dict)
    is_cache_uncertain: bool = False
    observed_logprobs: dict[str, list[float]] = field(default_factory=dict)
    waited_for: str = ""
    finishes: dict[str, Finish] = field(default_factory=dict)

    def end(self, ends: Mapping[str, RequestFault | Finish]) -> None:
        """Add ends of requests: faults, and graceful ends after the tokens of the step."""
        for request_id, end in ends.items():
            if isinstance(end, RequestFault):
                self.faults[request_id] = end
                self.finishes.pop(request_id, None)
            elif request_id not in self.faults:
                self.finishes[request_id] = end
                if request_id not in self.sampled_token_ids:
                    self.faults[request_id] = RequestFault(f"it ends: {end.reason}", end.plugin)

    def drop_tokens(self, num_before: Mapping[str, int]) -> None:
        """Drop tokens beyond `Finish.num_tokens`, and ends of requests with fewer tokens.

        Args:
            num_before: number of output tokens before the step, by request id.
        """
        for request_id, finish in list(self.finishes.items()):
            if finish.num_tokens is None or request_id not in num_before:
                continue
            before, tokens = num_before[request_id], self.sampled_token_ids.get(request_id, [])
            if before + len(tokens) < finish.num_tokens:
                del self.finishes[request_id]
            elif len(tokens) > (room := max(finish.num_tokens - before, 1)):
                self.sampled_token_ids[request_id] = tokens[:room]
