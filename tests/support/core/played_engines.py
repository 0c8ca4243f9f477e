"""A client of several engines, with engines that a test plays."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from types import SimpleNamespace

from hardpoint.errors import EngineDeadError, RequestError
from hardpoint.host.boundary.activity import Snapshot
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SamplingParams,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.config_tables import EngineProcessConfig
from hardpoint.process.client.process_client import EngineStart
from hardpoint.replicas import replicas
from hardpoint.replicas.choice import EngineChoice
from hardpoint.replicas.group import ReplicaSet
from hardpoint.replicas.restarts import RestartBudget
from hardpoint.replicas.waves.group import WaveGroup
from support.waiting import PATIENCE_S


class Engine:
    """A client of an engine that the test plays."""

    in_process = False

    def __init__(self, start, sink, process=None):
        del process
        world = Engine.world
        self.start, self.sink = start, sink
        self.pid = next(world.pids)
        self.ready = SimpleNamespace(num_gpu_blocks=64, max_model_len=128)
        self.was_killed = False
        self.last = Snapshot()
        self.activity = SimpleNamespace(snapshot=lambda: self.last)
        self.sent, self.messages, self.aborted, self.calls = [], 0, [], []
        self.closed, self.is_full = False, False
        self.starting(world)
        world.engines.append(self)

    def starting(self, world):
        index = self.start.engine_index
        if world.failing.get(index):
            raise world.failing[index].pop(0)
        if world.hold is not None:
            assert world.hold.wait(PATIENCE_S)

    @property
    def ids(self):
        return [request.request_id for request in self.sent]

    def add_requests(self, requests):
        self.offer_requests(requests)()

    def add_request(self, request):
        self.add_requests([request])

    def offer_requests(self, requests):
        if any(request.tags.get("unencodable") for request in requests):
            raise RequestError("tags: cannot be encoded")

        def attempt():
            if self.is_full:
                return False
            self.messages += 1
            self.sent += requests
            return True

        return attempt

    def abort_requests(self, ids):
        self.aborted += ids

    def call(self, method, *args):
        future = Future()
        self.calls.append((method, args, future))
        if method in Engine.world.answered:
            future.set_result(None)
        return future

    @property
    def called(self):
        """The methods that were called."""
        return [method for method, *_ in self.calls]

    def utility_timeout(self, method):
        del method
        return 5.0

    def close(self):
        self.closed = True

    # What the engine does

    def give(self, request_id, *tokens, finish=None):
        output = EngineCoreOutput(
            request_id=request_id, new_token_ids=list(tokens), finish_reason=finish
        )
        self.sink(EngineCoreOutputs(outputs=[output]))

    def die(self, *in_step, killed=False, call=None):
        self.was_killed = killed
        self.last = Snapshot(call=call, in_step=frozenset(in_step))
        self.sink(EngineDeadError("it fell over"))


class Spawned:
    """A process that does nothing."""

    @classmethod
    def spawn(cls, rank, interpreter):
        del rank, interpreter
        Engine.world.num_spawned += 1
        return cls()

    def close(self, grace_s):
        del grace_s
        if Engine.world.hold is not None:
            Engine.world.hold.set()


class World:
    """All engines that were started, and how the next ones start."""

    def __init__(self, monkeypatch):
        self.engines, self.failing, self.hold = [], {}, None
        self.received, self.groups, self.num_spawned = [], [], 0
        self.pids = itertools.count(100)
        self.answered = set()  # calls that engines answer at once
        Engine.world = self
        monkeypatch.setattr(replicas, "ProcessClient", Engine)
        self.leaving = []  # of each group, what is called for an engine that is to go
        self.hosts = SimpleNamespace(
            open=Spawned.spawn, join_address=None, on_leave=self.leaving.append, close=lambda: None
        )

    def group(
        self, data=2, *, restarts=0, balancer="round_robin", expert=False, num_local=None, **engine
    ):
        address = None if num_local is None else "tcp://127.0.0.1:5000"
        parallel = ParallelConfig(
            data=data, balancer=balancer, expert=expert, local=num_local, join_address=address
        )
        config = EngineConfig(
            parallel=parallel,
            engine=EngineProcessConfig(in_process=False, **engine),
        )
        plugins = resolve_plugins(config, ConfigSources())
        budget = RestartBudget(enabled=restarts > 0, max_per_minute=max(restarts, 1))
        start = self.start = EngineStart(config, ConfigSources(), plugins.manifest)
        choice = EngineChoice(plugins, config)
        make = WaveGroup if expert else ReplicaSet
        group = make(start, choice, budget, self.hosts, sink=self.received.append)
        self.groups.append(group)
        return group

    def of(self, rank):
        """Return the latest engine of a rank."""
        return [e for e in self.engines if e.start.engine_index == rank][-1]

    def outputs(self, request_id):
        batches = [item for item in self.received if isinstance(item, EngineCoreOutputs)]
        outputs = [output for batch in batches for output in batch.outputs]
        return [output for output in outputs if output.request_id == request_id]

    def tokens(self, request_id):
        return [token for output in self.outputs(request_id) for token in output.new_token_ids]

    def error(self, request_id):
        return self.outputs(request_id)[-1].error


def request(name, **fields):
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[1, 2, 3], params=SamplingParams(), **fields
    )


def names(prefix, count):
    return [request(f"{prefix}{i}") for i in range(count)]


def loads(group):
    return {r.rank: (r.in_flight, r.pending_prompt_tokens) for r in group._replicas.serving}
