"""A KV connector that keeps blocks in this process, and fails as a test asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from hardpoint.plugins import KVConnector
from hardpoint.plugins.kv_connector import (
    FinishedTransfers,
    KVConnectorScheduler,
    KVConnectorWorker,
)

GARBAGE = 0xA5


@dataclass
class Script:
    """The script of both halves, and their calls.

    Attributes:
        asynchronous: whether loads are between steps; if not, they are in the step, by layers.
        asks: how often it does not know yet how much there is.
        delay: duration of a load between steps, in steps.
        keeps: whether it keeps the blocks of ended requests until it has saved them.
        faults: by "half.method", what is raised or, where it can be called, what is called in place
            of the method, with the half and its arguments.
        kept: bytes by block hash.
        bad: hashes of blocks that cannot be loaded.
        calls: "half.method" in order.
        ended: arguments of `load_ended`.
        params: parameters of the last output.
    """

    asynchronous: bool = True
    asks: int = 0
    delay: int = 1
    keeps: bool = False
    faults: dict[str, Any] = field(default_factory=dict)
    kept: dict[bytes, bytes] = field(default_factory=dict)
    bad: set[bytes] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    ended: list[tuple[str, bool]] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)
    params: Any = None
    halves: list[Any] = field(default_factory=list)


SCRIPT = Script()
"""Of the connectors that are built from now on."""


def use(script: Script) -> Script:
    global SCRIPT
    SCRIPT = script
    return script


class Load(msgspec.Struct):
    request_id: str
    hashes: list[bytes]
    blocks: list[int]


class Jobs(msgspec.Struct):
    loads: list[Load] = []
    in_step: list[Load] = []
    saves: list[tuple[bytes, int]] = []
    known: list[str] = []


class _Half:
    name = ""

    def _begin(self, script: Script) -> None:
        self.script = script
        script.halves.append(self)

    def _hit(self, method: str, *args: Any) -> Any:
        """Record a call; return the result in the script, or `...`."""
        called = f"{self.name}.{method}"
        self.script.calls.append(called)
        fault = self.script.faults.get(called)
        if isinstance(fault, BaseException):
            raise fault
        return ... if fault is None else fault(self, *args)


class SchedulerHalf(_Half, KVConnectorScheduler):
    name = "scheduler"

    def __init__(self, script, context):
        self._begin(script)
        self.context = context
        self.jobs = Jobs([], [], [], [])
        self.asked = {}
        self.matched = {}
        self.running = {}
        self.admitted = {}

    def check_request(self, request):
        if self._hit("check_request", request) is ... and request.kv_transfer_params:
            super().check_request(request)

    def request_refused(self, request_id):
        self._hit("request_refused", request_id)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if (other := self._hit("get_num_new_matched_tokens", request)) is not ...:
            return other
        name, size = request.request_id, self.context.block_size
        self.asked[name] = self.asked.get(name, 0) + 1
        if self.asked[name] <= self.script.asks:
            return None, True
        first, end = num_computed_tokens // size, (request.num_tokens - 1) // size
        hashes = self.context.block_hashes(request, end)[first:end]
        count = next((i for i, h in enumerate(hashes) if h not in self.script.kept), len(hashes))
        self.matched[name] = hashes[:count], first
        return count * size, self.script.asynchronous

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.admitted[request.request_id] = request
        if num_external_tokens:
            hashes, first = self.matched.pop(request.request_id, ((), 0))
            blocks = list(block_ids[0][first : first + len(hashes)])
            jobs = self.jobs.loads if self.script.asynchronous else self.jobs.in_step
            jobs.append(Load(request.request_id, list(hashes), blocks))
        self._hit("update_state_after_alloc", request)

    def build_connector_meta(self, plan):
        for name in (*plan.preempted_request_ids, *plan.finished_request_ids):
            self.running.pop(name, None)
        for new in plan.new_requests:
            self.running[new.source.request_id] = [list(new.block_ids[0]), 0]
        for name, blocks in plan.cached_requests.new_block_ids.items():
            self.running[name][0] += blocks[0]
        computed = dict(
            zip(
                plan.cached_requests.request_ids,
                plan.cached_requests.num_computed_tokens,
                strict=True,
            )
        ) | {new.source.request_id: new.num_computed_tokens for new in plan.new_requests}
        for name, count in plan.num_scheduled_tokens.items():
            self._save(name, computed[name] + count)
        jobs, self.jobs = self.jobs, Jobs([], [], [], [])
        jobs.known = list(self.running)
        if (other := self._hit("build_connector_meta", plan)) is not ...:
            return other
        return jobs

    def _save(self, name, num_tokens):
        blocks, done = self.running[name]
        request = self.admitted[name]
        end = min(num_tokens, request.num_tokens) // self.context.block_size
        hashes = self.context.block_hashes(request, end)[done:end]
        self.jobs.saves += zip(hashes, blocks[done:end], strict=True)
        self.running[name][1] = max(done, end)

    def request_finished(self, request, block_ids):
        if (other := self._hit("request_finished", request)) is not ...:
            return other
        return self.script.keeps, self.script.params

    def load_ended(self, request_id, failed):
        self.script.ended.append((request_id, failed))
        self._hit("load_ended", request_id, failed)

    def receive(self, rank, message):
        self._hit("receive", rank, message)

    def set_handshakes(self, handshakes):
        self._hit("set_handshakes", handshakes)

    def plan_lost(self, metadata):
        self._hit("plan_lost", metadata)

    def close(self):
        self._hit("close")


class WorkerHalf(_Half, KVConnectorWorker):
    name = "worker"

    def __init__(self, script, context):
        self._begin(script)
        self.context = context
        self.loading = {}
        self.in_step = []
        self.saves = []
        self.errors = set()
        self.finished = set()
        self.saved = set()
        self.distrusts = False
        self.views = None

    def register_kv_caches(self, caches):
        self._hit("register_kv_caches", caches)
        self.views = self.registered = caches[0]

    def release_kv_caches(self):
        for name in list(self.loading):
            self.give_up(name)
        self.views = None
        self._hit("release_kv_caches")

    def start_load_kv(self, metadata):
        self.saves, self.in_step = [], []
        if metadata is not None:
            self.saves = metadata.saves
            self.in_step = metadata.in_step
            for load in metadata.loads:
                self.scribble(load)
                self.loading[load.request_id] = [self.script.delay, load]
            for load in self.in_step:
                self.scribble(load)
        self._hit("start_load_kv", metadata)

    def scribble(self, load):
        """Write contents that no request may read, like a load in flight."""
        for block in load.blocks:
            for view in self.views:
                view[block].fill_(GARBAGE)

    def fill(self, load):
        for block_hash, block in zip(load.hashes, load.blocks, strict=True):
            data = self.script.kept.get(block_hash)
            if data is None or block_hash in self.script.bad:
                self.errors.add(block)
            else:
                data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                for view, part in zip(self.views, self.split(data), strict=True):
                    view[block].copy_(part)

    def split(self, data):
        return data.split([view.shape[1] for view in self.views])

    def give_up(self, name):
        _, load = self.loading.pop(name)
        self.errors.update(load.blocks)
        self.finished.add(name)

    def wait_for_layer_load(self, layer):
        self._hit("wait_for_layer_load", layer)
        for load in self.in_step:
            self.fill(load)
            self.distrusts = self.distrusts or bool(self.errors.intersection(load.blocks))

    def save_kv_layer(self, layer):
        self._hit("save_kv_layer", layer)

    def wait_for_save(self):
        if not self.distrusts:
            for block_hash, block in self.saves:
                self.script.kept[block_hash] = bytes(
                    torch.cat([view[block] for view in self.views]).tolist()
                )
        self._hit("wait_for_save")

    def get_finished(self, ended):
        self.saved |= ended
        for name, entry in list(self.loading.items()):
            entry[0] -= 1
            if entry[0] < 0:
                self.fill(entry[1])
                del self.loading[name]
                self.finished.add(name)
        if (other := self._hit("get_finished", ended)) is not ...:
            return other
        loaded, self.finished = self.finished, set()
        saved, self.saved = self.saved, set()
        return FinishedTransfers(loaded, saved)

    def load_errors(self):
        errors, self.errors = self.errors, set()
        if (other := self._hit("load_errors")) is not ...:
            return other
        return errors

    def cancel_loads(self, request_ids):
        self._hit("cancel_loads", request_ids)
        for name in request_ids:
            if name in self.loading:
                self.give_up(name)

    def take_message(self):
        other = self._hit("take_message")
        return None if other is ... else other

    def handshake(self):
        other = self._hit("handshake")
        return None if other is ... else other

    def stats(self):
        other = self._hit("stats")
        return None if other is ... else other

    def close(self):
        self._hit("close")


class ScriptedConnector(KVConnector):
    contract = 1
    Metadata = Jobs

    def __init__(self, context):
        super().__init__(context)
        self.script = SCRIPT

    def scheduler_half(self, context):
        self.script.contexts.append(context)
        return self._instead("scheduler_half") or SchedulerHalf(self.script, context)

    def worker_half(self, context):
        self.script.contexts.append(context)
        return self._instead("worker_half") or WorkerHalf(self.script, context)

    def _instead(self, method):
        fault = self.script.faults.get(method)
        if isinstance(fault, BaseException):
            raise fault
        return fault

    def close(self):
        self.script.calls.append("connector.close")
