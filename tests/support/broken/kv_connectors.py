"""KV connectors with one mistake each, and a correct one with a file per block."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from hardpoint.plugins import Executor, KVConnector, Options
from hardpoint.plugins.kv_connector import (
    FinishedTransfers,
    KVConnectorScheduler,
    KVConnectorWorker,
    block_key,
)
from support.samples import Sample, leave_thread, spend


class Move(msgspec.Struct):
    request_id: str
    hashes: list[bytes]
    blocks: list[int]


class Jobs(msgspec.Struct):
    loads: list[Move] = []
    saves: list[Move] = []


class ShelfScheduler(KVConnectorScheduler):
    def __init__(self, folder, context):
        self.folder, self.context, self.size = folder, context, context.block_size
        self.identities = []
        self.matched, self.admitted, self.running = {}, {}, {}
        self.loads, self.loading, self.unsure = [], [], []

    def set_handshakes(self, handshakes):
        self.identities = handshakes

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        first, end = num_computed_tokens // self.size, (request.num_tokens - 1) // self.size
        self.matched[request.request_id] = first
        count = 0
        for block_hash in self.context.block_hashes(request, end)[first:end] if end > first else ():
            if not all(self.has(identity, block_hash) for identity in self.identities):
                break
            count += 1
        return count * self.size, False

    def has(self, identity, block_hash):
        return (self.folder / block_key(identity, block_hash).hex()).exists()

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        first = self.matched.pop(request.request_id, 0)
        self.admitted[request.request_id] = request
        if num_external_tokens:
            end = first + num_external_tokens // self.size
            hashes = self.context.block_hashes(request, end)[first:end]
            self.loads.append(Move(request.request_id, hashes, block_ids[0][first:end]))
            self.loading.append(request)

    def build_connector_meta(self, plan):
        for request_id in (*plan.preempted_request_ids, *plan.finished_request_ids):
            self.running.pop(request_id, None)
        computed = {}
        for new in plan.new_requests:
            request_id = new.source.request_id
            if (request := self.admitted.pop(request_id, None)) is not None:
                saved = new.num_computed_tokens // self.size
                self.running[request_id] = [request, list(new.block_ids[0]), saved]
            computed[request_id] = new.num_computed_tokens
        cached = plan.cached_requests
        for request_id, blocks in cached.new_block_ids.items():
            if request_id in self.running and blocks:
                self.running[request_id][1] += blocks[0]
        computed |= dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        saves, are_right = [], self.are_loads_right(plan.step)
        for request_id, before in computed.items():
            if are_right and request_id in self.running:
                after = before + plan.num_scheduled_tokens.get(request_id, 0)
                saves += self.save(request_id, after)
        loads, self.loads = self.loads, []
        return Jobs(loads, saves) if loads or saves else None

    def are_loads_right(self, step):
        until = step + Executor.MAX_CONCURRENT_BATCHES
        self.unsure += [(request, request.num_tokens, until) for request in self.loading]
        self.loading = []
        self.unsure = [u for u in self.unsure if u[0].num_tokens == u[1] and step < u[2]]
        return not self.unsure

    def save(self, request_id, num_computed):
        request, blocks, first = running = self.running[request_id]
        end = self.num_complete(min(num_computed, request.num_tokens))
        if end <= first:
            return []
        running[2] = end
        return [
            Move(request_id, self.context.block_hashes(request, end)[first:end], blocks[first:end])
        ]

    def num_complete(self, num_tokens):
        return num_tokens // self.size

    def request_finished(self, request, block_ids):
        self.matched.pop(request.request_id, None)
        self.admitted.pop(request.request_id, None)
        self.running.pop(request.request_id, None)
        return False, None


class ShelfWorker(KVConnectorWorker):
    wants_layers = False

    def __init__(self, folder, context):
        self.folder, self.identity = folder, context.identity.digest()
        self.saves, self.errors = [], set()

    def handshake(self):
        return self.identity

    def register_kv_caches(self, caches):
        self.views = [view for layer in caches for view in layer]

    def start_load_kv(self, metadata):
        self.saves = []
        if metadata is None:
            return
        self.saves = metadata.saves
        for load in metadata.loads:
            for index, (block_hash, block) in enumerate(zip(load.hashes, load.blocks, strict=True)):
                if not self.read(self.key(block_hash), block):
                    self.errors.update(load.blocks[index:])
                    break

    def key(self, block_hash):
        return block_key(self.identity, block_hash)

    def read(self, key, block):
        path = self.folder / key.hex()
        try:
            data = path.read_bytes()
        except OSError:
            return False
        if not self.is_right(key, data):
            with suppress(OSError):
                path.unlink()
            return False
        self.write(block, data[32:])
        return True

    def is_right(self, key, data):
        size = 32 + sum(view.shape[1] for view in self.views)
        return len(data) == size and data[:32] == hashlib.sha256(key + data[32:]).digest()

    def write(self, block, data):
        source, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0
        for view in self.views:
            view[block] = source[start : start + view.shape[1]]
            start += view.shape[1]

    def wait_for_save(self):
        for save in self.saves:
            for block_hash, block in zip(save.hashes, save.blocks, strict=True):
                self.store(self.key(block_hash), block)

    def store(self, key, block):
        path = self.folder / key.hex()
        if path.exists():
            return
        data = b"".join(view[block].numpy().tobytes() for view in self.views)
        with suppress(OSError):
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(hashlib.sha256(key + data).digest() + data)
            temporary.replace(path)

    def get_finished(self, ended):
        return FinishedTransfers()

    def load_errors(self):
        errors, self.errors = self.errors, set()
        return errors


class Shelf(Sample, KVConnector, contract=1):
    """Right."""

    Metadata = Jobs
    scheduler_class, worker_class = ShelfScheduler, ShelfWorker

    class Options(Options):
        path: str

    def scheduler_half(self, context):
        return self.scheduler_class(Path(self.options.path), context)

    def worker_half(self, context):
        return self.worker_class(Path(self.options.path), context)


def with_half(half):
    """Return a connector with a half, named as it is."""
    kind = "scheduler" if issubclass(half, ShelfScheduler) else "worker"
    return type(half.__name__, (Shelf,), {f"{kind}_class": half, "__module__": __name__})


class NoContract(Shelf, contract=None):
    pass


@with_half
class LoadsOneBlockEverywhere(ShelfScheduler):
    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        for load in self.loads[-1:]:
            load.hashes = [load.hashes[0]] * len(load.hashes)


@with_half
class ForgetsTheLocalPrefix(ShelfScheduler):
    """Loads into the first blocks of a table, though the local cache has filled them."""

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        first = self.matched.get(request.request_id, 0)
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        for load in self.loads[-1:]:
            if num_external_tokens and first:
                load.blocks = list(block_ids[0][: len(load.blocks)])


@with_half
class SavesBeforeTheStep(ShelfWorker):
    def start_load_kv(self, metadata):
        super().start_load_kv(metadata)
        super().wait_for_save()
        self.saves = []


@with_half
class SavesUnfinishedBlocks(ShelfScheduler):
    def save(self, request_id, num_computed):
        return super().save(request_id, num_computed + self.size - 1)


@with_half
class HidesFailedLoads(ShelfWorker):
    def load_errors(self):
        return ()


class _SavesAll(ShelfScheduler):
    def are_loads_right(self, step):
        return True


class SavesAfterAFailedLoad(Shelf):
    """Saves blocks computed from blocks that could not be loaded."""

    scheduler_class = _SavesAll


class _SavesOthers(ShelfWorker):
    def start_load_kv(self, metadata):
        before = set(self.errors)
        super().start_load_kv(metadata)
        failed = self.errors - before
        loads = metadata.loads if metadata else ()
        names = {load.request_id for load in loads if failed.intersection(load.blocks)}
        self.saves = [save for save in self.saves if save.request_id not in names]


class SavesOthersAfterAFailedLoad(Shelf):
    """Drops the saves of the request with the failed load, and keeps the saves of its sharers."""

    scheduler_class, worker_class = _SavesAll, _SavesOthers


@with_half
class TrustsStorage(ShelfWorker):
    def is_right(self, key, data):
        return len(data) == 32 + sum(view.shape[1] for view in self.views)


@with_half
class RaisesForLostBlocks(ShelfWorker):
    def read(self, key, block):
        data = (self.folder / key.hex()).read_bytes()
        return self.is_right(key, data) and super().read(key, block)


@with_half
class RaisesForUnknownRequests(ShelfScheduler):
    def request_finished(self, request, block_ids):
        del self.running[request.request_id]
        return super().request_finished(request, block_ids)


@with_half
class SendsObjects(ShelfScheduler):
    def build_connector_meta(self, plan):
        jobs = super().build_connector_meta(plan)
        return jobs and {"loads": jobs.loads, "saves": jobs.saves, "plan": object()}


class ForgetsTheTypeOfMetadata(Shelf):
    Metadata = Any


@with_half
class FinishesWithNone(ShelfScheduler):
    def request_finished(self, request, block_ids):
        super().request_finished(request, block_ids)
        return None, None


class _Later(ShelfScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0], True


class NamesNoLoad(Shelf):
    """Loads between steps, and does not report when that is done."""

    scheduler_class = _Later


class _SaysAtOnce(ShelfWorker):
    """Says that loads are done, and does them after the next step."""

    before, current = (), ()

    def start_load_kv(self, metadata):
        self.before, self.current = self.current, ()
        if metadata is not None:
            self.current = metadata.loads
        super().start_load_kv(metadata and Jobs([], metadata.saves))

    def get_finished(self, ended):
        saves = self.saves
        super().start_load_kv(Jobs(self.before, []))
        self.saves = saves
        return FinishedTransfers(loaded=[load.request_id for load in self.current])


class SaysTooSoon(Shelf):
    scheduler_class, worker_class = _Later, _SaysAtOnce


@with_half
class NeverKnows(ShelfScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return None, False


@with_half
class KeepsBlocks(ShelfScheduler):
    """Keeps the blocks of requests, and does not report when they are saved."""

    def request_finished(self, request, block_ids):
        super().request_finished(request, block_ids)
        return True, None


@with_half
class LoadsNothing(ShelfScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False


@with_half
class LeavesTheLastBlock(ShelfScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(count - self.size, 0), False


@with_half
class KeysWithoutIdentity(ShelfWorker):
    def __init__(self, folder, context):
        super().__init__(folder, context)
        self.identity = b"any model"


@with_half
class LooksUpSlowly(ShelfScheduler):
    def has(self, identity, block_hash):
        spend(0.03)
        return super().has(identity, block_hash)


@with_half
class SavesSlowly(ShelfWorker):
    def store(self, key, block):
        spend(0.03)
        super().store(key, block)


class _Shares(ShelfScheduler):
    def set_handshakes(self, handshakes):
        self.identities = Shared.identities

    def has(self, identity, block_hash):
        return identity is not None and super().has(identity, block_hash)


class _Shared(ShelfWorker):
    def handshake(self):
        Shared.identities = [self.identity]


class Shared(Shelf):
    """Passes the messages of its halves through its class."""

    identities = (None,)
    scheduler_class, worker_class = _Shares, _Shared


@with_half
class LeavesAThread(ShelfWorker):
    def register_kv_caches(self, caches):
        super().register_kv_caches(caches)
        leave_thread("Endless")


@with_half
class RemembersRequests(ShelfScheduler):
    def request_finished(self, request, block_ids):
        vars(self).setdefault("ended", []).append(request.request_id)
        return super().request_finished(request, block_ids)
