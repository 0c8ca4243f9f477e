"""The worker half of the connector "stores": moves blocks between the KV cache and the stores."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hardpoint.plugins import ConfigError, Executor, KVConnectorContext, KVTierStats
from hardpoint.plugins.kv_connector import (
    FinishedTransfers,
    KVConnectorWorker,
    KVWorkerContext,
    block_key,
)
from hardpoint.plugins.kv_store import PeerKVStore

from .events import TierEvents
from .jobs import (
    BlockLoad,
    Handshake,
    Jobs,
    Lookup,
    Renewal,
    Save,
    WorkerMessage,
)
from .saving import Saver
from .staging import HEADER_BYTES, Buffer, BufferPool, CacheBlocks, read_mac_key
from .threads import PeerThreads, TaskThreads
from .tiers import CircuitBreaker, Tier, Tiers

if TYPE_CHECKING:
    import torch

    from .options import StoresOptions

_log = logging.getLogger("hardpoint")

_SLACK = 0.9  # of the time for a load or a call, so that loaded blocks are used in time


class _LoadJob:
    """A load that is under way.

    Attributes:
        load: the load.
        deadline: on the monotonic clock.
        lock: held while a block is copied into the KV cache.
        first_bad: index of the first block that could not be loaded.
        left: parts of blocks that are not done, by group of layers.
        ended: whether nothing is written any more.
    """

    def __init__(self, load: BlockLoad, num_groups: int, deadline: float) -> None:
        self.load = load
        self.deadline = deadline
        self.lock = threading.Lock()
        self.first_bad = len(load.hashes)
        self.left = [len(load.hashes)] * num_groups
        self.ended = False

    @property
    def is_done(self) -> bool:
        return self.ended or not any(self.left)

    @property
    def bad_blocks(self) -> list[int]:
        return self.load.block_ids[self.first_bad :]

    def has_loaded(self, group: int) -> bool:
        return self.ended or not self.left[group]

    def fails_from(self, index: int) -> None:
        """Record that a block could not be loaded; without the first one, the load has ended."""
        with self.lock:
            self.first_bad = min(self.first_bad, index)
            self.ended = self.ended or not index

    def give_up(self) -> None:
        """Write no further block; missing blocks count as not loaded."""
        with self.lock:
            if any(self.left):
                self.first_bad = 0
            self.ended = True


class StoresWorker(KVConnectorWorker):
    """Copies blocks to and from buffers, and lets threads load and store them."""

    def __init__(
        self, connector: KVConnectorContext, context: KVWorkerContext, options: StoresOptions
    ) -> None:
        """Open the stores.

        Raises:
            ConfigError: the groups of layers do not divide.
        """
        self._context = context
        self._options = options
        self._report = functools.partial(context.report_fault, connector.name)
        self._lease = connector.config.lease_seconds
        self._timeout = connector.config.load_seconds * _SLACK
        # A call that takes as long as a load may leaves no time for the next store.
        self._call_seconds = min(options.timeout_seconds, connector.config.load_seconds / 2)
        self._identity = context.identity.digest()
        layer_bytes = context.identity.layer_bytes
        self._groups = _groups(layer_bytes, options.layer_groups)
        self._sizes = [layer_bytes[layer] for layer in self._groups[0]]
        self._events = _events(context)
        secret = read_mac_key(options.mac_key_file, f"plugin.{connector.name}.mac_key_file")
        stores = context.open_stores((HEADER_BYTES, *self._sizes), self._call_seconds)
        self._tiers = Tiers(
            [
                Tier(
                    store,
                    CircuitBreaker(options.breaker_failures, options.breaker_seconds),
                    self._call_seconds,
                    context.report_fault,
                    self._events,
                    secret,
                )
                for store in stores
            ],
            secret,
        )
        _check_required(self._tiers, options.required, connector.name)
        self._pins = context.device.type == "cuda"
        threads = self._threads
        self._loaders = threads("KVLoad", options.threads)
        self._peers = PeerThreads(threads, options.threads)
        pools = [
            BufferPool(self._sizes, options.save_bytes, pin_memory=self._pins) for _ in range(2)
        ]
        self._saver = Saver(
            self._tiers, self._groups, self._key, options, self._lease, threads, pools, self._report
        )
        self._local = threading.local()
        self._cache: CacheBlocks | None = None
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._loads: dict[str, _LoadJob] = {}
        self._in_step: list[_LoadJob] = []
        self._saves: list[Save] = []
        self._distrusted = 0  # steps with blocks that are not saved
        self._errors: set[int] = set()
        self._ended: set[str] = set()
        self._answers = WorkerMessage()
        self._stats_changed = False

    def _threads(self, name: str, count: int) -> TaskThreads:
        return TaskThreads(name, count, self._call_seconds, self._report)

    # The KV cache

    def register_kv_caches(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take the cache."""
        self._cache = CacheBlocks(caches)

    def release_kv_caches(self) -> None:
        """Give up all loads."""
        self.cancel_loads(list(self._loads))
        self._cache = None

    def handshake(self) -> Handshake:
        """Return the peers that can be reached."""
        tier = self._tiers.peer_tier
        if tier is None:
            return Handshake()
        assert isinstance(tier.store, PeerKVStore)
        return Handshake(sorted(tier.store.peers))

    # A step

    @property
    def wants_layers(self) -> bool:  # type: ignore[override]
        """Whether layers are loaded or saved one group after another in this step."""
        return len(self._groups) > 1 and bool(self._in_step or self._saves)

    def start_load_kv(self, metadata: Jobs | None) -> None:
        """Start the step's loads and lookups; remember its saves."""
        for job in self._in_step:  # of a step that failed; its blocks may be others' by now
            job.give_up()
        self._saves, self._in_step = [], []
        self._distrusted = max(self._distrusted - 1, 0)
        self._end_late()
        if metadata is None:
            return
        self._saves = metadata.saves
        for lookup in metadata.lookups:
            self._loaders.submit(functools.partial(self._look_up, lookup), first=True)
        for load in metadata.loads:
            self._start(load)
        for hashes in metadata.used:
            self._loaders.submit(functools.partial(self._note_use, hashes))
        for peer in {renewal.transfer.peer for renewal in metadata.renewals}:
            renewals = [renewal for renewal in metadata.renewals if renewal.transfer.peer == peer]
            self._peers.renew(peer, functools.partial(self._renew, peer, renewals))
        if self._in_step and not self.wants_layers:
            self._wait_for(0)

    def wait_for_layer_load(self, layer: int) -> None:
        """Wait for the blocks that this step reads, of the layer's group."""
        for index, group in enumerate(self._groups):
            if layer == group.start:
                self._wait_for(index)

    def save_kv_layer(self, layer: int) -> None:
        """Save the blocks that this step completes, once the group's last layer is computed."""
        for index, group in enumerate(self._groups):
            if layer == group.stop - 1:
                self._save(index)
                if index == len(self._groups) - 1:
                    self._saves = []

    def wait_for_save(self) -> None:
        """Copy the blocks that this step completes, unless that was done layer by layer."""
        if self._saves:
            for index in range(len(self._groups)):
                self._save(index)
            self._saves = []

    def get_finished(self, ended: frozenset[str]) -> FinishedTransfers:  # noqa: ARG002
        """Return the loads that have ended; publish the changes of stores since the last step."""
        self._end_late()
        if self._events is not None:
            self._events.flush()
        with self._lock:
            for job in self._in_step:
                if job.bad_blocks:
                    # Results computed from them are wrong, here and in planned steps.
                    self._distrusted = Executor.MAX_CONCURRENT_BATCHES
                    self._errors.update(job.bad_blocks)
            self._in_step = []
            for request_id, job in list(self._loads.items()):
                if job.is_done:
                    del self._loads[request_id]
                    self._errors.update(job.bad_blocks)
                    self._ended.add(request_id)
            loaded, self._ended = self._ended, set()
        return FinishedTransfers(loaded=loaded)

    def load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        errors, self._errors = self._errors, set()
        return errors

    def cancel_loads(self, request_ids: Sequence[str]) -> None:
        """Give up loads; data that threads still read is dropped."""
        for request_id in request_ids:
            if (job := self._loads.get(request_id)) is not None:
                job.give_up()

    def take_message(self) -> WorkerMessage | None:
        """Return the blocks found, and the blocks that could not be saved."""
        with self._lock:
            answers, self._answers = self._answers, WorkerMessage()
        answers.unsaved, answers.unoffered = self._saver.take_left_out()
        return answers or None

    def evicted(self, store: str, keys: Sequence[bytes]) -> None:
        """Record that a store has evicted a block."""
        if self._events is not None:
            self._events.removed(store, keys)

    def stats(self) -> dict[str, KVTierStats] | None:
        """Return the totals of the stores."""
        with self._lock:
            changed, self._stats_changed = self._stats_changed, False
        changed = self._saver.take_changed() or changed
        return {tier.store.name: tier.totals() for tier in self._tiers} if changed else None

    def close(self) -> None:
        """Store the pending blocks, as far as that does not take too long."""
        self.cancel_loads(list(self._loads))
        seconds = self._call_seconds
        for threads in (self._saver, self._loaders, self._peers):
            threads.close(seconds)
        for tier in self._tiers:
            self._run_limited(tier, "drain", seconds)
            self._run_limited(tier, "close", seconds)

    def _run_limited(self, tier: Tier, method: str, seconds: float) -> None:
        thread = threading.Thread(target=tier.end, args=(method,), name="KVClose", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            _log.warning(
                "KV store %r: its %s() has not ended after %g s, and is left behind",
                tier.store.name,
                method,
                seconds,
            )

    # Loads

    def _start(self, load: BlockLoad) -> None:
        """Load blocks in threads, the groups one after another."""
        job = _LoadJob(load, len(self._groups), time.monotonic() + self._timeout)
        if load.in_step:
            self._in_step.append(job)
        else:
            with self._lock:
                before = self._loads.get(load.request_id)
                self._loads[load.request_id] = job
            if before is not None:
                before.give_up()
        tasks = [
            functools.partial(self._load, job, group, index)
            for group in range(len(self._groups))
            for index in range(len(load.hashes))
        ]
        if load.transfer is None:
            for task in tasks:
                self._loaders.submit(task)
        elif tasks:
            threads = self._peers.fetchers(load.transfer.peer)
            threads.submit(functools.partial(self._fetch_all, job, tasks, threads))

    def _fetch_all(
        self, job: _LoadJob, tasks: Sequence[Callable[[], None]], threads: TaskThreads
    ) -> None:
        """Fetch the first block, and the others if it is there.

        So a request without its blocks holds one thread, and only until the first answer.
        """
        first, *others = tasks
        first()
        if not job.ended:
            for task in others:
                threads.submit(task)

    def _load(self, job: _LoadJob, group: int, index: int) -> None:
        is_loaded = False
        try:
            if index < job.first_bad and not job.ended:
                is_loaded = self._load_part(job, group, index)
        finally:
            if not is_loaded:
                job.fails_from(index)
            with self._progress:
                job.left[group] -= 1
                self._stats_changed = True
                self._progress.notify_all()

    def _load_part(self, job: _LoadJob, group: int, index: int) -> bool:
        """Load a part of a block into this thread's buffer, and copy it into the cache."""
        buffer = self._buffer()
        is_there = self._fetch(job, group, index, buffer)
        if is_there:
            with job.lock:
                if job.ended or self._cache is None:
                    return False
                self._cache.write(job.load.block_ids[index], self._groups[group], buffer)
        return is_there

    def _fetch(self, job: _LoadJob, group: int, index: int, buffer: Buffer) -> bool:
        load = job.load
        transfer = load.transfer
        if transfer is None:
            return self._tiers.load(self._key(load.hashes[index], group), buffer.views)
        tier = self._tiers.peer_tier
        seconds = min(job.deadline - time.monotonic(), self._call_seconds * _SLACK)
        if tier is None or seconds <= 0:
            return False
        key = self._key(load.hashes[index], group, transfer.secret)
        return tier.fetch(transfer.peer, key, buffer.views, seconds)

    def _buffer(self) -> Buffer:
        """Return this thread's buffer; a new one while a nearer store may still read the old."""
        buffer: Buffer | None = getattr(self._local, "buffer", None)
        if buffer is None or self._tiers.late_use(buffer.views) is not None:
            buffer = self._local.buffer = Buffer(self._sizes, pin_memory=self._pins)
        return buffer

    def _wait_for(self, group: int) -> None:
        with self._progress:
            for job in self._in_step:
                self._progress.wait_for(
                    functools.partial(job.has_loaded, group),
                    max(job.deadline - time.monotonic(), 0),
                )
        for job in self._in_step:
            if job.left[group]:
                job.give_up()

    def _end_late(self) -> None:
        now = time.monotonic()
        for job in self._loads.values():
            if now > job.deadline:
                job.give_up()

    # Lookups and renewals

    def _look_up(self, lookup: Lookup) -> None:
        count = len(lookup.hashes)
        for group in range(len(self._groups)):
            keys = [self._key(block_hash, group) for block_hash in lookup.hashes[:count]]
            count = self._tiers.lookup(keys) if keys else 0
        with self._lock:
            self._answers.found[lookup.serial] = count
            self._stats_changed = True

    def _note_use(self, hashes: Sequence[bytes]) -> None:
        keys = [
            self._key(block_hash, group)
            for block_hash in hashes
            for group in range(len(self._groups))
        ]
        for tier in self._tiers:
            if tier is not self._tiers.peer_tier:
                tier.note_use(keys)

    def _renew(self, peer: str, renewals: Sequence[Renewal]) -> None:
        """Renew the offers of a peer, or of this engine if the peer is ""."""
        tier = self._tiers.peer_tier
        if tier is None:
            return
        keys = [
            self._key(block_hash, group, renewal.transfer.secret)
            for renewal in renewals
            for block_hash in renewal.hashes
            for group in range(len(self._groups))
        ]
        tier.run("renew", keys, peer or None)

    # Saves

    def _save(self, group: int) -> None:
        assert self._cache is not None
        if self._distrusted or any(job.bad_blocks for job in self._in_step):
            self._saver.leave_out(self._saves)
        else:
            self._saver.save(self._saves, group, self._cache)

    def _key(self, block_hash: bytes, group: int, secret: bytes = b"") -> bytes:
        layers = None
        if len(self._groups) > 1:
            layers = self._groups[group].start, self._groups[group].stop
        key = block_key(self._identity, block_hash, layers=layers, secret=secret)
        if self._events is not None and not secret and group == len(self._groups) - 1:
            self._events.know(key, block_hash)  # the last part that is stored
        return key


def _events(context: KVWorkerContext) -> TierEvents | None:
    """Return the publisher of events; the first rank does, since all keep the same blocks."""
    if context.publish is None or context.rank:
        return None
    return TierEvents(context.publish, context.identity.block_size)


def _check_required(tiers: Tiers, required: Sequence[str], connector: str) -> None:
    """Ask the stores that are required.

    Raises:
        ConfigError: there is no store of that name, or it does not answer.
    """
    by_name = {tier.store.name: tier for tier in tiers}
    for name in required:
        if name not in by_name:
            raise ConfigError(
                f"plugin.{connector}.required: expected one of "
                f"kv_connector.stores ({', '.join(by_name)}), got {name!r}"
            )
        if (reason := by_name[name].failure()) is not None:
            raise ConfigError(f"plugin.{connector}.required: KV store {name!r}: {reason}")


def _groups(layer_bytes: Sequence[int], count: int) -> list[range]:
    """Return the layers of each group.

    Raises:
        ConfigError: they are not all of one size.
    """
    num_layers = len(layer_bytes)
    size = num_layers // count
    groups = [range(start, start + size) for start in range(0, size * count, max(size, 1))]
    parts = {tuple(layer_bytes[layer] for layer in group) for group in groups}
    if size * count != num_layers or len(parts) != 1:
        would_do = [str(n) for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise ConfigError(
            f"plugin.stores.layer_groups: {num_layers} layers cannot be divided into {count} equal "
            f"groups; {', '.join(would_do)} would do"
        )
    return groups
