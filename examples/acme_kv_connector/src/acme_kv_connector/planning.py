"""The scheduler half: which blocks of a request are there, and which a step completes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import Executor, Request, SchedulerOutput
from hardpoint.plugins.kv_connector import KVConnectorScheduler, KVSchedulerContext, block_key

from .jobs import Jobs, Move

if TYPE_CHECKING:
    from hardpoint.plugins.requests.plan import BlockIds


@dataclass
class Running:
    """A request that gets tokens.

    Attributes:
        num_saved: leading blocks that are saved, or were loaded.
    """

    request: Request
    block_ids: list[int]
    num_saved: int


@dataclass
class Unsure:
    """A request with a load that may have failed, in some rank.

    Attributes:
        num_tokens: number of tokens that it had. A further token shows that the blocks are right.
        until: step in whose plan the result of the load's step is known in any case.
    """

    request: Request
    num_tokens: int
    until: int


class FilesScheduler(KVConnectorScheduler):
    """Looks for files, and plans which to read and to write."""

    def __init__(self, folder: Path, context: KVSchedulerContext) -> None:
        """Begin without requests."""
        self._folder = folder
        self._context = context
        self._size = context.block_size
        self._identities: Sequence[bytes] = ()
        self._admitted: dict[str, Request] = {}
        self._running: dict[str, Running] = {}
        self._first: dict[str, int] = {}
        self._loads: list[Move] = []
        self._loading: list[Request] = []
        self._unsure: list[Unsure] = []

    def set_handshakes(self, handshakes: Sequence[Any]) -> None:
        """Learn the block keys of each rank."""
        self._identities = handshakes

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the blocks with files; they are loaded in the step."""
        # The last token is always computed: without it, there is nothing to sample from.
        first, end = num_computed_tokens // self._size, (request.num_tokens - 1) // self._size
        if end <= first or request.source.lora is not None or request.source.features:
            return 0, False
        self._first[request.request_id] = first
        count = 0
        for block_hash in self._context.block_hashes(request, end)[first:end]:
            keys = [block_key(identity, block_hash) for identity in self._identities]
            if not all((self._folder / key.hex()).exists() for key in keys):
                break
            count += 1
        return count * self._size, False

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Load the counted tokens into the request's blocks."""
        first = self._first.pop(request.request_id, 0)
        self._admitted[request.request_id] = request
        if num_external_tokens:
            end = first + num_external_tokens // self._size
            hashes = list(self._context.block_hashes(request, end)[first:end])
            self._loads.append(Move(request.request_id, hashes, list(block_ids[0][first:end])))
            self._loading.append(request)

    def build_connector_meta(self, plan: SchedulerOutput) -> Jobs | None:
        """Return the loads of the step, and the blocks that it completes."""
        for request_id in (*plan.preempted_request_ids, *plan.finished_request_ids):
            self._running.pop(request_id, None)
        cached, ends = plan.cached_requests, dict[str, int]()
        for new in plan.new_requests:
            request_id, computed = new.source.request_id, new.num_computed_tokens
            request = self._admitted.pop(request_id, None)
            if request is not None and request.source.lora is None and not request.source.features:
                blocks = list(new.block_ids[0])
                self._running[request_id] = Running(request, blocks, computed // self._size)
            ends[request_id] = computed
        ends |= dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        for request_id, tables in cached.new_block_ids.items():
            if request_id in self._running and tables:
                self._running[request_id].block_ids += tables[0]
        saves = []
        for request_id, computed in ends.items() if self._are_loads_right(plan.step) else ():
            scheduled = plan.num_scheduled_tokens.get(request_id, 0)
            if (save := self._completed(request_id, computed + scheduled)) is not None:
                saves.append(save)
        loads, self._loads = self._loads, []
        return Jobs(loads, saves) if loads or saves else None

    def _are_loads_right(self, step: int) -> bool:
        """Return whether no load may have failed in steps without a known result.

        Until then nothing is saved, of no request: others may share the blocks.
        """
        until = step + Executor.MAX_CONCURRENT_BATCHES
        self._unsure += [Unsure(request, request.num_tokens, until) for request in self._loading]
        self._loading = []
        self._unsure = [
            unsure
            for unsure in self._unsure
            if step < unsure.until and unsure.request.num_tokens == unsure.num_tokens
        ]
        return not self._unsure

    def _completed(self, request_id: str, num_tokens: int) -> Move | None:
        """Return the blocks that are complete once so many tokens are computed."""
        running = self._running.get(request_id)
        if running is None:
            return None
        request, first = running.request, running.num_saved
        end = min(num_tokens, request.num_tokens) // self._size  # drafts may be wrong
        if end <= first:
            return None
        running.num_saved = end
        hashes = list(self._context.block_hashes(request, end)[first:end])
        return Move(request_id, hashes, running.block_ids[first:end])

    def request_finished(
        self,
        request: Request,
        block_ids: BlockIds,  # noqa: ARG002 - what is saved was copied in its step
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Forget a request, which may never have been admitted."""
        for known in (self._first, self._admitted, self._running):
            known.pop(request.request_id, None)
        return False, None
