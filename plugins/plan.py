"""What crosses the border between engine and workers: the plan of a step and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .kv_cache import BlockIds
from .requests import EngineCoreRequest, TokenLogprobs

__all__ = [
    "NO_DRAFT",
    "CachedRequests",
    "DraftTokenIds",
    "GrammarBitmask",
    "ModelRunnerOutput",
    "NewRequest",
    "RequestFault",
    "SchedulerOutput",
]

NO_DRAFT = -1
"""Stands in a plan where a draft is to be put in later, or where there is none; never accepted."""


class NewRequest(msgspec.Struct, frozen=True):
    """A request that a worker has not seen, or has forgotten when it was preempted.

    Attributes:
        output_token_ids: outputs so far; empty unless it was preempted.
        block_ids: its whole block table, one list per group.
        num_computed_tokens: leading tokens whose keys and values are in those blocks.
        resumed: whether it was preempted before.
    """

    source: EngineCoreRequest
    output_token_ids: Sequence[int]
    block_ids: BlockIds
    num_computed_tokens: int
    resumed: bool = False


class CachedRequests(msgspec.Struct, frozen=True):
    """The requests of a step that the worker has in its batch: only what is new.

    Attributes:
        request_ids: in the scheduler's order.
        num_computed_tokens: one per request id, before this step.
        new_block_ids: by request id, blocks to append per group; few requests need some.
    """

    request_ids: Sequence[str] = ()
    num_computed_tokens: Sequence[int] = ()
    new_block_ids: Mapping[str, BlockIds] = {}


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one step.

    Attributes:
        step: serial number of the plan, from 1.
        new_requests: in full, also those that come back after preemption.
        cached_requests: as differences.
        num_scheduled_tokens: per request id, at least 1.
        total_num_scheduled_tokens: their sum.
        draft_token_ids: per request id, drafts to verify; part of its scheduled tokens. Where they
            are not known yet, NO_DRAFT keeps their places: the engine puts them in once the step
            before is done, so that the plan comes back with them.
        encoder_inputs: per request id, indices of the features to encode in this step.
        freed_encoder_inputs: identifiers whose embeddings a worker forgets, before it encodes;
            each is told once, and a worker may never have had it.
        structured_request_ids: request id to its place among the scheduled ones, of those that a
            grammar constrains.
        preempted_request_ids: leave the batch and may come back.
        finished_request_ids: ended since the last plan; each is told once.
        kv_connector_metadata: what the KV connector's scheduler half tells its worker half.
    """

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
    kv_connector_metadata: Any = None


class DraftTokenIds(msgspec.Struct, array_like=True, frozen=True):
    """What a speculator expects to follow, to be verified by a later step.

    Attributes:
        request_ids: whose drafts.
        draft_token_ids: one list per request id, in order.
    """

    request_ids: list[str]
    draft_token_ids: list[list[int]]

    def by_request(self) -> dict[str, list[int]]:
        """Return the drafts by request id.

        Raises:
            ValueError: there are not as many lists as ids.
        """
        return dict(zip(self.request_ids, self.draft_token_ids, strict=True))


class GrammarBitmask(msgspec.Struct, array_like=True, frozen=True):
    """Which tokens the grammars of a step allow.

    Attributes:
        request_ids: of each row. A request with drafts has a row per draft and one more, one
            behind the other, in the order of its tokens; requests without a grammar have none.
        bitmask: int32 array [rows, ceil(vocab_size / 32)]; token t is allowed where bit t % 32 of
            column t // 32 is set.
    """

    request_ids: list[str]
    bitmask: Any


class RequestFault(msgspec.Struct, array_like=True, frozen=True):
    """Why a request cannot go on.

    Attributes:
        message: what failed and who is to blame.
        plugin: name of the guilty logits processor; None if the model is to blame.
    """

    message: str
    plugin: str | None = None


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step produced.

    Attributes:
        sampled_token_ids: per request that reached its last known token, what was sampled:
            accepted drafts, then one token more.
        logprobs: per request that asked for them, one entry per sampled token.
        prompt_logprobs: per request that asked for them, those of the prompt positions of this
            step; None stands for the first position.
        faults: requests that must end with an error; nothing was sampled for them.
        kv_loaded: requests whose keys and values came from elsewhere and are all there now.
        kv_saved: ended requests whose blocks the KV connector needs no more.
        invalid_block_ids: blocks that could not be loaded; what they should hold is computed.
        num_nans_in_logits: per request whose logits were damaged, how many were.
        pooler_output: per request that pools and is computed to its end, what came of it; it
            ends, and nothing is sampled for it.
        routed_experts: per request that asked for them, what a mixture of experts chose.
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
