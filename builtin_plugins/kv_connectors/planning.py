"""The scheduler half of the connector "stores": decide which blocks to look up, load and save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.plugins import (
    EngineCoreRequest,
    Executor,
    KVConnectorContext,
    Request,
    SchedulerOutput,
)
from hardpoint.plugins.kv_connector import (
    KVConnectorScheduler,
    KVSchedulerContext,
)

from .jobs import BlockLoad, Handshake, Jobs, Lookup, Renewal, Save, TransferSource, WorkerMessage
from .transfer_params import TransferParams, new_secret, offered_params, read_params

if TYPE_CHECKING:
    from hardpoint.plugins.requests.plan import BlockIds

_Matched = tuple[int | None, bool]
_NOTHING: _Matched = (0, False)
_UNKNOWN: _Matched = (None, False)
_MOST_SAVED = 1 << 16  # hashes that are remembered


@dataclass(slots=True)
class _Query:
    """A lookup.

    Attributes:
        first: index of its first block.
        ranks: ranks that have not answered.
        count: leading blocks that all ranks which have answered have.
        serial: serial number of the lookup.
        hashes: hashes of the blocks.
    """

    first: int
    ranks: set[int]
    count: int
    serial: int
    hashes: Sequence[bytes]


@dataclass(slots=True)
class _Running:
    """A request that has blocks.

    Attributes:
        block_ids: its table.
        num_saved: leading blocks that need not be saved any more.
        secret: under which its blocks are offered to another engine; None if they are stored.
        offered: hashes of the offered ones.
        offers_all: whether none was left out, without which later ones are of no use.
        renew_at: when to renew the offers.
    """

    request: Request
    block_ids: list[int]
    num_saved: int
    secret: bytes | None = None
    offered: list[bytes] = field(default_factory=list)
    offers_all: bool = True
    renew_at: float = 0.0


@dataclass(slots=True)
class _Incoming:
    """A request with a prompt computed by another engine, until its blocks are loaded.

    Attributes:
        renew_at: when to renew the offers.
    """

    source: EngineCoreRequest
    params: TransferParams
    renew_at: float


class StoresScheduler(KVConnectorScheduler):
    """Scheduler half: ask the workers for stored blocks, loads and saves; call no store itself."""

    def __init__(
        self, connector: KVConnectorContext, context: KVSchedulerContext, *, loads_in_step: bool
    ) -> None:
        """Begin without requests.

        Args:
            connector: owner of the configuration.
            loads_in_step: whether blocks that another engine offers are loaded in the step that
                needs them, layers after layers, and not before.
        """
        self._context = context
        self._lease = connector.config.lease_seconds
        self._timeout = connector.config.load_seconds
        self._engine_id = connector.config.engine_id or ""
        self._loads_in_step = loads_in_step
        self._ranks = frozenset(range(context.world_size))
        self._peers: list[str] | None = None
        self._jobs = Jobs()
        self._serial = 0
        self._queries: dict[str, _Query] = {}
        self._matched: dict[str, tuple[int, int]] = {}  # first block and the one after the last
        self._loading: dict[bytes, tuple[str, float]] = {}  # request and deadline, by hash
        self._hashes_of: dict[str, list[bytes]] = {}  # that a request loads
        self._running: dict[str, _Running] = {}
        self._incoming: dict[str, _Incoming] = {}
        self._admitted: dict[str, Request] = {}
        self._loads_in_next: set[str] = set()  # requests that load in their first step
        # A load in a step may fail in another rank, and results of this rank are wrong then,
        # also of requests that share the blocks: nothing is saved until that is certainly known.
        self._unsure_until = -1  # step
        self._saved: OrderedDict[bytes, None] = OrderedDict()

    def set_handshakes(self, handshakes: Sequence[Any]) -> None:
        """Set the peers that all workers can reach; forget the tasks of earlier workers."""
        self._queries.clear()
        self._saved.clear()
        self._jobs = Jobs()
        received = [msgspec.convert(data, Handshake) for data in handshakes]
        if all(handshake.peers is not None for handshake in received):
            self._peers = sorted(
                set.intersection(*(set(handshake.peers or ()) for handshake in received))
            )

    def check_request(self, request: EngineCoreRequest) -> None:
        """Check the parameters of a transfer; remember to renew the offers it waits for.

        Raises:
            RequestError: they are wrong.
        """
        if request.kv_transfer_params is None:
            return
        params = read_params(request, self._peers, self._engine_id)
        if params.do_remote_prefill:
            now = self._context.clock()
            self._incoming[request.request_id] = _Incoming(request, params, now + self._lease / 3)

    def request_refused(self, request_id: str) -> None:
        """Renew nothing for a request that the engine did not take."""
        self._incoming.pop(request_id, None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> _Matched:
        """Return how much of a request is stored; the first call asks the workers."""
        size = self._context.block_size
        first, end = num_computed_tokens // size, (request.num_tokens - 1) // size
        request_id = request.request_id
        self._matched.pop(request_id, None)
        if end <= first or request.source.lora is not None:
            return _NOTHING
        if (incoming := self._incoming.get(request_id)) is not None:
            end = min(end, (incoming.params.num_tokens or 0) // size)
            return self._match(request_id, first, end, asynchronous=not self._loads_in_step)
        hashes = self._context.block_hashes(request, end)[first:end]
        if self._is_loading(hashes[0], request_id):
            return _UNKNOWN  # it is in the local cache soon
        query = self._queries.get(request_id)
        if query is None or first < query.first:  # the local cache may have lost blocks
            self._ask(request_id, first, hashes)
            return _UNKNOWN
        if query.ranks:
            return _UNKNOWN
        return self._match(request_id, first, query.first + query.count, asynchronous=True)

    def _match(self, request_id: str, first: int, end: int, *, asynchronous: bool) -> _Matched:
        if end <= first:
            return _NOTHING
        self._matched[request_id] = first, end
        return (end - first) * self._context.block_size, asynchronous

    def _ask(self, request_id: str, first: int, hashes: Sequence[bytes]) -> None:
        self._serial += 1
        self._queries[request_id] = _Query(
            first, set(self._ranks), len(hashes), self._serial, hashes
        )
        self._jobs.lookups.append(Lookup(self._serial, list(hashes)))

    def _is_loading(self, block_hash: bytes, request_id: str) -> bool:
        loading = self._loading.get(block_hash)
        if loading is None or loading[0] == request_id:
            return False
        if self._context.clock() > loading[1]:
            del self._loading[block_hash]
            return False
        return True

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Load the matched prefix into the blocks."""
        request_id = request.request_id
        self._admitted[request_id] = request
        matched = self._matched.pop(request_id, None)
        self._queries.pop(request_id, None)
        incoming = self._incoming.pop(request_id, None)
        if not num_external_tokens or matched is None:
            return
        first, end = matched
        end = min(end, first + num_external_tokens // self._context.block_size)
        hashes = list(self._context.block_hashes(request, end)[first:end])
        transfer = None if incoming is None else incoming.params.transfer
        in_step = transfer is not None and self._loads_in_step
        blocks = list(block_ids[0][first:end])
        self._jobs.loads.append(BlockLoad(request_id, hashes, blocks, in_step, transfer))
        if in_step:
            self._loads_in_next.add(request_id)
        else:
            until = self._context.clock() + self._timeout
            self._hashes_of[request_id] = hashes
            for block_hash in hashes:
                self._loading[block_hash] = request_id, until

    def load_ended(self, request_id: str, failed: bool) -> None:
        """Let others look up the loaded blocks; blocks that failed may be stored again."""
        if failed and self._jobs.loads:  # which no plan has taken
            self._jobs.loads = [job for job in self._jobs.loads if job.request_id != request_id]
        for block_hash in self._hashes_of.pop(request_id, ()):
            loading = self._loading.get(block_hash)
            if loading is not None and loading[0] == request_id:
                del self._loading[block_hash]
            if failed:
                self._saved.pop(block_hash, None)
            else:
                self._remember(block_hash)

    def build_connector_meta(self, plan: SchedulerOutput) -> Jobs | None:
        """Return the lookups and loads of this step, and the blocks that it completes."""
        for request_id in (*plan.preempted_request_ids, *plan.finished_request_ids):
            self._running.pop(request_id, None)
        for new in plan.new_requests:
            self._start(new.source.request_id, new.block_ids, new.num_computed_tokens)
        if self._loads_in_next:
            self._loads_in_next.clear()
            self._unsure_until = plan.step + Executor.MAX_CONCURRENT_BATCHES
        cached = plan.cached_requests
        for request_id, new_blocks in cached.new_block_ids.items():
            if (running := self._running.get(request_id)) is not None and new_blocks:
                running.block_ids += new_blocks[0]
        if plan.step > self._unsure_until:
            self._complete_all(plan)
        if self._peers is not None:
            self._renew()
        if not self._jobs:
            return None
        jobs, self._jobs = self._jobs, Jobs()
        return jobs

    def _complete_all(self, plan: SchedulerOutput) -> None:
        cached, scheduled = plan.cached_requests, plan.num_scheduled_tokens
        for request_id, computed in zip(
            cached.request_ids, cached.num_computed_tokens, strict=True
        ):
            self._complete(request_id, computed + scheduled.get(request_id, 0))
        for new in plan.new_requests:
            request_id = new.source.request_id
            self._complete(request_id, new.num_computed_tokens + scheduled.get(request_id, 0))

    def _start(self, request_id: str, block_ids: BlockIds, num_computed: int) -> None:
        request = self._admitted.pop(request_id, None)
        if request is None or request.source.lora is not None:
            return
        params = request.source.kv_transfer_params
        secret = new_secret() if params is not None and params.get("do_remote_decode") else None
        known = 0 if secret is not None else num_computed // self._context.block_size
        self._running[request_id] = _Running(request, list(block_ids[0]), known, secret)

    def _complete(self, request_id: str, num_computed: int) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        size = self._context.block_size
        first, request = running.num_saved, running.request
        end = min(num_computed, request.num_tokens) // size  # drafts may be wrong
        if running.secret is not None:
            end = min(end, request.num_prompt_tokens // size)
        if end <= first:
            return
        running.num_saved = end
        hashes = self._context.block_hashes(request, end)[first:end]
        if 0 < first * size < request.num_prompt_tokens:  # a part of a long prompt
            self._note_use(request, first)
        pairs = zip(hashes, running.block_ids[first:end], strict=True)
        if running.secret is not None and running.offers_all:
            running.offered += hashes
            running.renew_at = self._context.clock() + self._lease / 3
            blocks = running.block_ids[first:end]
            self._jobs.saves.append(Save(list(hashes), blocks, running.secret))
        chosen = [pair for pair in pairs if pair[0] not in self._saved]
        if chosen:
            self._jobs.saves.append(Save([h for h, _ in chosen], [b for _, b in chosen]))
            for block_hash, _ in chosen:
                self._remember(block_hash)

    def _note_use(self, request: Request, num_blocks: int) -> None:
        """Let stores keep the first blocks of a request longer than the later ones.

        A block that was stored before its successors would otherwise be replaced first, and they
        are of no use without it.
        """
        if num_blocks:
            hashes = self._context.block_hashes(request, num_blocks)
            self._jobs.used.append(list(hashes[:num_blocks]))

    def _renew(self) -> None:
        """Renew offers, here and in other engines, while requests need them."""
        now = self._context.clock()
        for running in self._running.values():
            if running.secret is not None and running.offered and now > running.renew_at:
                running.renew_at = now + self._lease / 3
                here = TransferSource("", running.secret)
                self._jobs.renewals.append(Renewal(running.offered, here))
        for incoming in self._incoming.values():
            if now > incoming.renew_at:
                incoming.renew_at = now + self._lease / 3
                count = (incoming.params.num_tokens or 0) // self._context.block_size
                hashes = self._context.block_hashes(Request(incoming.source), count)
                self._jobs.renewals.append(Renewal(list(hashes[:count]), incoming.params.transfer))

    def _remember(self, block_hash: bytes) -> None:
        self._saved[block_hash] = None
        self._saved.move_to_end(block_hash)
        if len(self._saved) > _MOST_SAVED:
            self._saved.popitem(last=False)

    def request_finished(
        self,
        request: Request,
        block_ids: BlockIds,  # noqa: ARG002 - saved blocks were copied in their step
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Forget a request; return where its blocks are offered."""
        request_id = request.request_id
        for known in (self._queries, self._matched, self._admitted, self._incoming):
            known.pop(request_id, None)
        self._loads_in_next.discard(request_id)
        running = self._running.pop(request_id, None)
        if running is not None:
            self._note_use(request, running.num_saved)
        if running is None or running.secret is None:
            return False, None
        if running.num_saved < request.num_prompt_tokens // self._context.block_size:
            return False, None  # it ended early
        if running.offered:
            self._jobs.renewals.append(Renewal(running.offered, TransferSource("", running.secret)))
        num_tokens = len(running.offered) * self._context.block_size
        return False, offered_params(self._engine_id, running.secret, num_tokens)

    def receive(self, rank: int, message: WorkerMessage) -> None:
        """Take the answers of a rank."""
        by_serial = {query.serial: query for query in self._queries.values()}
        for serial, count in message.found.items():
            if (query := by_serial.get(serial)) is not None:
                query.ranks.discard(rank)
                query.count = min(query.count, count)
                if not query.ranks:
                    self._forget(query.hashes[query.count :])
        self._forget(message.unsaved)
        for secret, block_hash in message.unoffered:
            self._end_offer(secret, block_hash)

    def _end_offer(self, secret: bytes, block_hash: bytes) -> None:
        running = next((offer for offer in self._running.values() if offer.secret == secret), None)
        if running is not None:
            running.offers_all = False
            if block_hash in running.offered:
                del running.offered[running.offered.index(block_hash) :]

    def _forget(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self._saved.pop(block_hash, None)

    def plan_lost(self, metadata: Jobs) -> None:
        """Ask again; the saves of the lost plan follow when its blocks are computed again.

        Answers to earlier lookups may be lost as well. Loads are given up.
        """
        self._queries = {name: query for name, query in self._queries.items() if not query.ranks}
        self._jobs.renewals = metadata.renewals + self._jobs.renewals
        for save in metadata.saves:
            self._forget(save.hashes)
