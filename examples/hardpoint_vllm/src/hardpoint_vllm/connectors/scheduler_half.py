"""The scheduler's side of a connector of vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.plugins import EngineCoreRequest, Executor, Request, SchedulerOutput
from hardpoint.plugins.kv_connector import KVConnectorScheduler, KVSchedulerContext
from hardpoint_vllm.origin import is_overridden

from .bases import KVConnectorOutput
from .encoding import Encoding
from .views import BlockIds, Blocks, RequestFields, plan_of


class SchedulerSide(KVConnectorScheduler):
    """Runs the scheduler's side of a connector.

    After a load that is part of a step, steps save nothing until the result of that step is known:
    if the load failed, they would save keys and values that were computed from wrong ones.
    """

    def __init__(self, target: Any, encoding: Encoding, context: KVSchedulerContext) -> None:
        self._target, self._encoding, self._context = target, encoding, context
        self._requests: dict[str, RequestFields] = {}
        self._in_step: set[str] = set()  # requests with matched tokens that a step is to load
        self._loading: list[Request] = []
        self._unsure: list[tuple[Request, int, int]] = []
        self._ranks: Counter[tuple[str, str]] = Counter()  # ranks that have ended a transfer

    def check_request(self, request: EngineCoreRequest) -> None:
        """Notify the connector of a new request."""
        if is_overridden(type(self._target), "on_new_request"):
            self._target.on_new_request(self._view(Request(request)))

    def request_refused(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def set_handshakes(self, handshakes: Sequence[Any]) -> None:
        """Pass the metadata of each rank that has some."""
        metadata = {
            rank: self._encoding.decode(handshake)
            for rank, handshake in enumerate(handshakes)
            if handshake is not None
        }
        if metadata:
            self._target.set_xfer_handshake_metadata(metadata)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the connector's number, at most all whole blocks before the last token.

        Raises:
            ValueError: its tokens end within a block.
        """
        self._in_step.discard(request.request_id)
        view = self._view(request)
        count, is_asynchronous = self._target.get_num_new_matched_tokens(view, num_computed_tokens)
        if count is None:
            return None, bool(is_asynchronous)
        size = self._context.block_size
        limit = (request.num_tokens - 1) // size * size - num_computed_tokens
        count = max(0, min(count, limit))
        if (num_computed_tokens + count) % size:
            raise ValueError(
                f"get_num_new_matched_tokens: expected whole blocks of {size} tokens, got {count} "
                f"after {num_computed_tokens}"
            )
        if count and not is_asynchronous:
            self._in_step.add(request.request_id)
        return count, bool(count and is_asynchronous)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Pass the block table.

        Raises:
            ValueError: the model has several groups of layers.
        """
        if len(block_ids) > 1:
            raise ValueError(
                f"block_ids: expected one group of layers, got {len(block_ids)}; connectors of "
                f"vLLM run with models of one"
            )
        if request.request_id in self._in_step and num_external_tokens:
            self._loading.append(request)
        self._in_step.discard(request.request_id)
        blocks = Blocks(block_ids)
        self._target.update_state_after_alloc(self._view(request), blocks, num_external_tokens)

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        """Return the connector's metadata of a step as plain data."""
        metadata = self._target.build_connector_meta(plan_of(plan, self._requests))
        return {
            "metadata": self._encoding.encode(metadata, "metadata"),
            "saves": self._are_loads_right(plan.step),
            "has_tokens": bool(plan.total_num_scheduled_tokens),
            "has_preemptions": bool(plan.preempted_request_ids),
        }

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Return whether the connector keeps the blocks, and its parameters."""
        view = self._view(request)
        self._requests.pop(request.request_id, None)
        self._in_step.discard(request.request_id)
        blocks = list(block_ids[0]) if block_ids else []
        keeps, params = self._target.request_finished(view, blocks)
        return bool(keeps), params

    def receive(self, rank: int, message: Any) -> None:  # noqa: ARG002
        """Pass the result of a step; a transfer has ended when it has in all ranks."""
        metadata = message["metadata"]
        self._target.update_connector_output(
            KVConnectorOutput(
                "KVConnectorOutput",
                finished_sending=self._ended("sending", message["sending"]),
                finished_recving=self._ended("recving", message["recving"]),
                invalid_block_ids=set(message["invalid"]),
                kv_connector_worker_meta=self._encoding.decode(metadata),
                kv_connector_stats=None,
                kv_cache_events=None,
            )
        )

    def close(self) -> None:
        """Shut the connector down."""
        self._target.shutdown()

    def _view(self, request: Request) -> RequestFields:
        view = self._requests.get(request.request_id)
        if view is None or not view.is_of(request):
            context = self._context
            view = RequestFields(request, context.block_hashes, context.block_size)
            self._requests[request.request_id] = view
        return view

    def _ended(self, kind: str, request_ids: Sequence[str]) -> set[str]:
        ended = set()
        for request_id in request_ids:
            key = kind, request_id
            self._ranks[key] += 1
            if self._ranks[key] == self._context.world_size:
                del self._ranks[key]
                ended.add(request_id)
        return ended

    def _are_loads_right(self, step: int) -> bool:
        """Return whether the results of all loads in steps are known."""
        until = step + Executor.MAX_CONCURRENT_BATCHES
        are_right = not self._loading
        self._unsure += [(request, request.num_tokens, until) for request in self._loading]
        self._loading = []
        self._unsure = [u for u in self._unsure if u[0].num_tokens == u[1] and step < u[2]]
        return are_right and not self._unsure
