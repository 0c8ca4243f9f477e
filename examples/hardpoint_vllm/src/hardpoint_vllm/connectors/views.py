"""Requests, blocks and plans with vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hardpoint.plugins import EngineCoreRequest, NewRequest, Request, SchedulerOutput
from hardpoint_vllm.objects import KeptFields, NamedFields

BlockIds = Sequence[Sequence[int]]
"""Block ids of a request, by group of layers."""

Hashes = Callable[[Request, int], Sequence[bytes]]


class RequestFields(KeptFields):
    """vLLM's Request over a live request."""

    described = "the Request given to KV connectors of vLLM"
    available = (
        "request_id, prompt_token_ids, all_token_ids, output_token_ids, num_tokens, "
        "num_prompt_tokens, num_output_tokens, num_computed_tokens, num_preemptions, priority, "
        "arrival_time, cache_salt, lora_request, kv_transfer_params, mm_features, sampling_params, "
        "pooling_params and block_hashes"
    )

    def __init__(self, request: Request, hashes: Hashes, block_size: int) -> None:
        """Copy the values that do not change."""
        self._request, self._hashes, self._block_size = request, hashes, block_size
        source = request.source
        self.request_id, self.cache_salt = source.request_id, source.cache_salt
        self.prompt_token_ids = list(source.known_prompt_ids)
        self.kv_transfer_params = source.kv_transfer_params
        self.mm_features = features_of(source)
        self.lora_request = lora_of(source)
        self.sampling_params = None if source.pooling_params else source.params
        self.pooling_params = source.pooling_params

    def is_of(self, request: Request) -> bool:
        """Return whether it is over this request."""
        return self._request is request

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_token_ids + list(self._request.output_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far."""
        return list(self._request.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Length of prompt and output."""
        return self._request.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self._request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Length of the output."""
        return len(self._request.output_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens with keys and values."""
        return self._request.num_computed_tokens

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions."""
        return self._request.num_preemptions

    @property
    def priority(self) -> int:
        """Smaller is more important."""
        return self._request.priority

    @property
    def arrival_time(self) -> float:
        """Arrival, on the engine's clock."""
        return self._request.arrival_time

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the blocks that the known tokens fill."""
        count = self._request.num_tokens // self._block_size
        return list(self._hashes(self._request, count)[:count]) if count else []


def features_of(source: EngineCoreRequest) -> list[NamedFields]:
    """Return vLLM's multimodal features."""
    return [
        NamedFields(
            "MultiModalFeatureSpec",
            identifier=feature.identifier,
            modality=feature.modality,
            mm_position=NamedFields(
                "PlaceholderRange", offset=feature.offset, length=feature.length
            ),
        )
        for feature in source.features
    ]


def lora_of(source: EngineCoreRequest) -> NamedFields | None:
    """Return vLLM's adapter of a request."""
    lora = source.lora
    if lora is None:
        return None
    return NamedFields("LoRARequest", lora_name=lora.name, lora_path=lora.path)


class Blocks(KeptFields):
    """vLLM's KVCacheBlocks over a block table."""

    described = "the KVCacheBlocks given to KV connectors of vLLM"
    available = "get_block_ids()"

    def __init__(self, block_ids: BlockIds) -> None:
        self._block_ids = block_ids

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Return the ids by group."""
        if allow_none and not any(self._block_ids):
            return None
        return tuple(list(group) for group in self._block_ids)


def plan_of(plan: SchedulerOutput, requests: Mapping[str, RequestFields]) -> NamedFields:
    """Return vLLM's SchedulerOutput.

    A request that resumes after a preemption is a cached request there, with its whole block table.
    """
    resumed = [new for new in plan.new_requests if new.resumed]
    return NamedFields(
        "SchedulerOutput",
        scheduled_new_reqs=[_new(new) for new in plan.new_requests if not new.resumed],
        scheduled_cached_reqs=_cached(plan, resumed, requests),
        num_scheduled_tokens=dict(plan.num_scheduled_tokens),
        total_num_scheduled_tokens=plan.total_num_scheduled_tokens,
        scheduled_spec_decode_tokens={k: list(v) for k, v in plan.draft_token_ids.items()},
        finished_req_ids=set(plan.finished_request_ids),
        preempted_req_ids=set(plan.preempted_request_ids),
    )


def _new(new: NewRequest) -> NamedFields:
    source = new.source
    return NamedFields(
        "NewRequestData",
        req_id=source.request_id,
        prompt_token_ids=list(source.known_prompt_ids),
        mm_features=features_of(source),
        sampling_params=None if source.pooling_params else source.params,
        pooling_params=source.pooling_params,
        block_ids=tuple(list(group) for group in new.block_ids),
        num_computed_tokens=new.num_computed_tokens,
        lora_request=lora_of(source),
    )


def _cached(
    plan: SchedulerOutput, resumed: Sequence[NewRequest], requests: Mapping[str, RequestFields]
) -> NamedFields:
    cached = plan.cached_requests
    blocks: list[tuple[list[int], ...] | None] = [
        tuple(list(group) for group in cached.new_block_ids[request_id])
        if request_id in cached.new_block_ids
        else None
        for request_id in cached.request_ids
    ]
    resumed_ids = [new.source.request_id for new in resumed]
    request_ids = [*cached.request_ids, *resumed_ids]
    views = [requests.get(request_id) for request_id in request_ids]
    return NamedFields(
        "CachedRequestData",
        req_ids=request_ids,
        resumed_req_ids=set(resumed_ids),
        new_block_ids=[
            *blocks,
            *(tuple(list(group) for group in new.block_ids) for new in resumed),
        ],
        num_computed_tokens=[
            *cached.num_computed_tokens,
            *(new.num_computed_tokens for new in resumed),
        ],
        num_output_tokens=[0 if view is None else view.num_output_tokens for view in views],
        all_token_ids={
            request_id: requests[request_id].all_token_ids
            for request_id in resumed_ids
            if request_id in requests
        },
        num_reqs=len(request_ids),
    )
