"""The client of several engines, with engines that the test plays."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import pytest
from support.waiting import wait_until

from hardpoint.boundary.activity import PluginCall, Snapshot
from hardpoint.boundary.errors import rejection_output
from hardpoint.core.client import replicas
from hardpoint.core.client.engine_choice import EngineChoice
from hardpoint.core.client.engine_group import EngineGroup
from hardpoint.core.client.process_client import EngineStart
from hardpoint.core.client.restarts import RestartBudget
from hardpoint.errors import EngineClosedError, EngineDeadError, RequestError
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    HardpointError,
    ModelError,
    PrefixCacheStats,
    SamplingParams,
    SchedulerStats,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config_tables import EngineProcessConfig, ParallelConfig
from hardpoint.plugins.stats import StepFault
from hardpoint.registry.plugin_set import resolve_plugins


class Engine:
    """A client of an engine that the test plays."""

    in_process = False

    def __init__(self, start, sink, process=None):
        del process
        world = Engine.world
        self.start, self.sink = start, sink
        self.pid = 100 + len(world.engines)
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
            assert world.hold.wait(10)

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
        return future

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


class World:
    """All engines that were started, and how the next ones start."""

    def __init__(self, monkeypatch):
        self.engines, self.failing, self.hold = [], {}, None
        self.received, self.groups = [], []
        Engine.world = self
        monkeypatch.setattr(replicas, "ProcessClient", Engine)

    def group(self, data=2, *, restarts=0, balancer="round_robin", **engine):
        config = EngineConfig(
            parallel=ParallelConfig(data=data, balancer=balancer),
            engine=EngineProcessConfig(in_process=False, **engine),
        )
        plugins = resolve_plugins(config, ConfigSources())
        budget = RestartBudget(enabled=restarts > 0, max_per_minute=max(restarts, 1))
        start = EngineStart(config, ConfigSources(), plugins.manifest)
        choice = EngineChoice(plugins, config)
        group = EngineGroup(start, choice, budget, sink=self.received.append)
        self.groups.append(group)
        return group

    def of(self, rank):
        """Return the latest engine of a rank."""
        return [e for e in self.engines if e.start.engine_index == rank][-1]

    def outputs(self, request_id):
        batches = [item for item in self.received if isinstance(item, EngineCoreOutputs)]
        found = [output for batch in batches for output in batch.outputs]
        return [output for output in found if output.request_id == request_id]

    def tokens(self, request_id):
        return [token for output in self.outputs(request_id) for token in output.new_token_ids]

    def error(self, request_id):
        return self.outputs(request_id)[-1].error


@pytest.fixture
def world(monkeypatch):
    world = World(monkeypatch)
    yield world
    for group in world.groups:
        group.close()


def request(name, **fields):
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[1, 2, 3], params=SamplingParams(), **fields
    )


def names(prefix, count):
    return [request(f"{prefix}{i}") for i in range(count)]


def loads(group):
    return {r.rank: (r.in_flight, r.pending_prompt_tokens) for r in group._replicas.serving}


# Start


def test_all_engines_have_the_cache_of_the_first(world):
    group = world.group(3)
    configs = [engine.start.config for engine in world.engines]
    assert sorted(engine.start.engine_index for engine in world.engines) == [0, 1, 2]
    assert world.engines[0].start.engine_index == 0
    assert [config.kv_cache.num_blocks for config in configs] == [None, 64, 64]
    assert [config.max_model_len for config in configs] == [None, 128, 128]
    assert [engine.start.num_sharing for engine in world.engines] == [3, 2, 2]
    assert set(group.pids) == set(group.ranks) == {0, 1, 2}


def test_one_that_cannot_start_takes_all_back(world):
    world.failing[2] = [ModelError("weights: memory is short")]
    with pytest.raises(ModelError, match=r"^engine 2 of 4: weights: memory is short$"):
        world.group(4)
    assert len(world.engines) == 3
    assert all(engine.closed for engine in world.engines)


# Requests


def test_requests_of_a_call_are_one_message_to_each_engine(world):
    group = world.group(2)
    group.add_requests(names("r", 5))
    assert [engine.ids for engine in world.engines] == [["r0", "r2", "r4"], ["r1", "r3"]]
    assert [engine.messages for engine in world.engines] == [1, 1]
    assert loads(group) == {0: (3, 9), 1: (2, 6)}


def test_what_is_in_flight_is_counted_until_it_ends(world):
    group = world.group(2)
    group.add_requests(names("r", 4))
    first, second = world.of(0), world.of(1)
    first.give("r0", 7)
    assert loads(group) == {0: (2, 3), 1: (2, 6)}
    first.give("r0", 8, finish=FinishReason.STOP)
    second.give("r1", finish=FinishReason.LENGTH)
    assert loads(group) == {0: (1, 3), 1: (1, 3)}
    group.abort_requests(["r2", "r3", "unknown"])
    assert (first.aborted, second.aborted) == (["r2"], ["r3"])
    assert loads(group) == {0: (0, 0), 1: (0, 0)}
    assert world.tokens("r0") == [7, 8]


def test_aborted_requests_that_the_engine_reports_are_counted_once(world):
    group = world.group(2)
    group.add_request(request("a"))
    world.of(0).sink(EngineCoreOutputs(finished_requests={"a"}))
    assert loads(group)[0] == (0, 0)
    group.abort_requests(["a"])
    assert world.of(0).aborted == []


def test_a_request_that_names_its_engine_runs_there(world):
    group = world.group(3)
    for index in range(4):
        group.add_request(request(f"r{index}", data_parallel_rank=2))
    assert world.of(2).ids == ["r0", "r1", "r2", "r3"]


def test_an_engine_that_accepts_nothing_is_asked_again(world):
    group = world.group(2)
    world.of(0).is_full = True
    attempt = group.offer_requests(names("r", 4))
    assert not attempt()
    world.of(0).is_full = False
    assert attempt()
    assert [engine.ids for engine in world.engines] == [["r0", "r2"], ["r1", "r3"]]
    assert [engine.messages for engine in world.engines] == [1, 1]


def test_one_that_cannot_be_encoded_takes_its_call_back(world):
    group = world.group(2)
    call = [*names("r", 3), request("bad", tags={"unencodable": "yes"})]
    for send in (group.add_requests, group.offer_requests):
        with pytest.raises(RequestError, match="^tags: cannot be encoded$"):
            send(call)
        assert loads(group) == {0: (0, 0), 1: (0, 0)}


def test_one_that_is_refused_ends_its_call_on_all_engines(world):
    group = world.group(2)
    group.add_request(request("other"))
    group.add_requests(names("r", 4))
    world.of(1).sink(rejection_output("r0", RequestError("prompt: too long")))
    assert [world.error(f"r{i}") for i in range(4)] == ["prompt: too long"] * 4
    assert loads(group) == {0: (1, 3), 1: (0, 0)}
    assert sorted(world.of(0).aborted + world.of(1).aborted) == ["r1", "r2", "r3"]


def test_statistics_are_those_of_all_engines(world):
    world.group(2)
    for rank in (0, 1):
        stats = SchedulerStats(
            num_running=rank + 1,
            num_waiting=10 * rank,
            kv_cache_usage=0.5 * rank,
            prefix_cache=PrefixCacheStats(1, 10, 5),
            num_accepted_by_position=[1] * (rank + 1),
            num_requests_by_adapter={"a": 1, f"own{rank}": 2},
        )
        world.of(rank).sink(EngineCoreOutputs(scheduler_stats=stats))
    merged = world.received[-1].scheduler_stats
    assert (merged.num_running, merged.num_waiting, merged.kv_cache_usage) == (3, 10, 0.25)
    assert merged.prefix_cache == PrefixCacheStats(2, 20, 10)
    assert merged.num_accepted_by_position == [2, 1]
    assert merged.num_requests_by_adapter == {"a": 2, "own0": 2, "own1": 2}


# Deaths


def test_requests_of_a_dead_engine_go_on_at_another(world):
    group = world.group(2)
    group.add_requests(names("r", 4))
    world.of(1).give("r1", 5)
    world.of(1).die(killed=True)
    assert world.of(0).ids == ["r0", "r2", "r1", "r3"]
    assert loads(group)[0] == (4, 13)
    world.of(0).give("r1", 6, finish=FinishReason.STOP)
    assert world.tokens("r1") == [5, 6]
    assert set(group.pids) == {0}


def test_what_a_dead_engine_sends_later_is_dropped(world):
    group = world.group(2)
    group.add_requests(names("r", 2))
    old = world.of(1)
    old.die(killed=True)
    old.give("r1", 9)
    assert world.tokens("r1") == []
    world.of(0).give("r1", 5)
    assert world.tokens("r1") == [5]
    assert group.is_serving


def test_an_engine_is_started_in_its_place(world):
    group = world.group(2, restarts=3)
    group.add_requests(names("r", 2))
    world.of(1).die(killed=True)
    wait_until(lambda: set(group.pids) == {0, 1}, 10, "the other engine")
    assert world.of(1) is world.engines[2]
    assert world.engines[1].closed
    assert (group.num_restarts, world.of(1).start.num_sharing) == (1, 1)
    group.add_requests(names("s", 3))
    assert {"s0", "s1", "s2"} & set(world.of(1).ids)


def test_requests_wait_for_an_engine_that_is_restarted(world):
    group = world.group(1, restarts=3)
    world.hold = threading.Event()
    group.add_request(request("a"))
    world.of(0).die(killed=True)
    assert not group.is_serving
    group.add_request(request("b"))
    group.add_request(request("c"))
    group.abort_requests(["b"])
    world.hold.set()
    wait_until(lambda: world.of(0).ids == ["a", "c"], 10, "the requests")


def test_one_that_dies_while_it_starts_is_tried_again_as_often_as_allowed(world):
    group = world.group(1, restarts=2)
    group.add_request(request("a"))
    world.failing[0] = [EngineDeadError("killed early"), EngineDeadError("and again")]
    world.of(0).die(killed=True)
    wait_until(lambda: world.received, 10, "the end")
    limit = r"not restarted: 2 restarts within a minute \(engine\.max_restarts_per_minute\)"
    for call in (lambda: group.add_request(request("b")), lambda: group.call("resume")):
        with pytest.raises(EngineDeadError, match=f"and again; {limit}"):
            call()


def test_what_cannot_be_built_is_not_tried_again(world):
    group = world.group(2, restarts=3)
    world.failing[1] = [ModelError("the file is gone"), EngineDeadError("never")]
    world.of(1).die(killed=True)
    group.add_request(request("pinned", data_parallel_rank=1))
    wait_until(lambda: world.outputs("pinned"), 10, "its end")
    named = r"the file is gone; the request names that engine (data_parallel_rank)"
    assert named in world.error("pinned")
    assert len(world.failing[1]) == 1
    group.add_request(request("other"))
    assert world.of(0).ids == ["other"]


def test_without_restarts_the_last_death_ends_the_group(world):
    group = world.group(2)
    group.add_requests(names("r", 2))
    world.of(0).die(killed=True)
    world.of(1).die(killed=True)
    assert isinstance(world.received[-1], EngineDeadError)
    with pytest.raises(EngineDeadError, match="it fell over"):
        group.add_request(request("late"))


def test_a_pinned_request_ends_with_its_engine(world):
    group = world.group(2)
    group.add_request(request("pinned", data_parallel_rank=1))
    world.of(1).die(killed=True)
    assert world.error("pinned") == (
        "it fell over; the request names that engine (data_parallel_rank)"
    )
    assert loads(group)[0] == (0, 0)


@pytest.mark.parametrize(
    ("in_step", "why"),
    [
        (["r1"], "was in the step in which it died"),
        ([], "may be sent again"),
    ],
)
def test_resume_can_be_off(world, in_step, why):
    group = world.group(2, resume="off")
    group.add_requests(names("r", 2))
    world.of(1).die(*in_step)
    assert world.error("r1") == f"it fell over; the request {why}"
    assert world.of(0).ids == ["r0"]


def test_a_request_goes_on_as_often_as_is_allowed(world):
    group = world.group(3, max_resumes=1)
    group.add_requests(names("r", 3))
    world.of(2).die(killed=True)
    (second,) = [e for e in world.engines if "r2" in e.ids and e is not world.of(2)]
    second.die(killed=True)
    assert world.error("r2") == (
        "it fell over; the request went on at another engine 1 time before (engine.max_resumes)"
    )
    (rest,) = [e for e in world.engines if e.start.engine_index in group.pids]
    assert sorted(rest.ids) == ["r0", "r1"]


def test_a_request_that_kills_engines_takes_two_and_ends_no_other(world):
    """Suspects go on one at a time, so the second death names the culprit."""
    group = world.group(4, max_resumes=3)
    requests = [request(f"r{i}", data_parallel_rank=0) for i in range(4)]
    for one in requests:
        one.data_parallel_rank = None
    bystanders = names("b", 3)
    for one, rank in zip(bystanders, (1, 2, 3), strict=True):
        one.data_parallel_rank = rank
    group.add_requests(bystanders)
    ledger = group._ledger
    group.add_requests(requests)
    # All four are taken for requests of one step, whichever engine they are on.
    victims = {ledger.get(f"r{i}").replica.rank for i in range(4)}
    assert victims
    culprit, deaths = "r2", []

    def run() -> None:
        """Let engines compute; those that have the culprit in a step die."""
        for engine in list(world.engines):
            if engine in deaths:
                continue
            live = [n for n in dict.fromkeys(engine.ids) if owner(n) is engine]
            if culprit in live:
                deaths.append(engine)
                engine.die(*live)
                return
            for name in live:
                engine.give(name, 1)

    def owner(name):
        entry = ledger.get(name)
        return None if entry is None or entry.replica is None else entry.replica.client

    for _ in range(20):
        run()
    assert len(deaths) == 2
    assert world.error(culprit) == (
        "it fell over; the request was in the step of 2 engines when they died; it runs no more"
    )
    others = [f"r{i}" for i in range(4) if f"r{i}" != culprit]
    pinned = [b.request_id for b in bystanders if b.data_parallel_rank in group.pids]
    assert all(world.outputs(name)[-1].error is None for name in others + pinned)
    assert all(owner(name) is not None for name in others + pinned)


def test_plugins_in_which_engines_die_twice_are_reported(world):
    seen = []

    class Watcher:
        def watch(self, death):
            seen.append((death.call, death.is_repeated))
            return EngineDeadError(f"named: {death.error}")

    watcher = Watcher()
    group = world.group(3, resume="off")
    group.watch_deaths(watcher.watch)
    call = PluginCall("hooks", "x", "plugin 'x'", "step")
    group.add_requests(names("r", 3))
    world.of(0).die("r0", call=call)
    world.of(1).die("r1", call=call, killed=True)
    world.of(2).die("r2", call=call)
    assert seen == [(call, False), (None, False), (call, True)]
    assert world.error("r0") == (
        "named: it fell over; the request was in the step in which it died"
    )


def test_deaths_at_the_start_fail_the_start(world):
    class Early(Engine):
        def __init__(self, *args):
            super().__init__(*args)
            if self.start.engine_index == 1:
                self.sink(EngineDeadError("gone at once"))

    replicas.ProcessClient = Early
    with pytest.raises(EngineDeadError, match="engine 1 of 2: gone at once"):
        world.group(2)


def test_closing_while_an_engine_is_restarted(world):
    group = world.group(1, restarts=3)
    world.hold = threading.Event()
    world.of(0).die(killed=True)
    group.close()
    world.hold.set()
    wait_until(lambda: len(world.engines) == 2 and world.of(0).closed, 10, "the end of both")
    assert group.pids == {}


# Control calls


def test_a_call_goes_to_all_and_one_answer_is_made(world):
    group = world.group(2)
    answers = {
        "collective_rpc": ([["a"], ["b", "c"]], ["a", "b", "c"]),
        "is_paused": ([True, False], False),
        "supported_tasks": ([["generate"], ["generate"]], ["generate"]),
        "step_faults": (
            [{"x": StepFault(2, "one")}, {"x": StepFault(3, "two"), "y": StepFault(1, "three")}],
            {"x": StepFault(5, "one"), "y": StepFault(1, "three")},
        ),
    }
    for method, (given, expected) in answers.items():
        future = group.call(method, 1)
        for engine, answer in reversed(list(zip(world.engines, given, strict=True))):
            assert not future.done()
            name, args, own = engine.calls[-1]
            assert (name, args) == (method, (1,))
            own.set_result(answer)
        assert future.result(0) == expected


def test_a_partial_failure_names_the_engines(world):
    group = world.group(3)
    future = group.call("reset_prefix_cache")
    for rank, outcome in enumerate((None, RequestError("no such level"), None)):
        own = world.of(rank).calls[-1][2]
        own.set_exception(outcome) if outcome else own.set_result(None)
    with pytest.raises(RequestError, match=r"^engine 1: no such level; 2 of 3 engines succeeded$"):
        future.result(0)


def test_one_error_of_all_engines_is_that_error(world):
    group = world.group(2)
    future = group.call("wake_up")
    for engine in world.engines:
        engine.calls[-1][2].set_exception(HardpointError("it is not asleep"))
    with pytest.raises(HardpointError, match="^it is not asleep$"):
        future.result(0)


def test_an_engine_that_dies_is_left_out_of_a_call(world):
    group = world.group(2)
    future = group.call("is_paused")
    world.of(0).calls[-1][2].set_exception(EngineDeadError("killed"))
    world.of(1).calls[-1][2].set_result(True)
    assert future.result(0) is True
    last = group.call("is_paused")
    for engine in world.engines:
        engine.calls[-1][2].set_exception(EngineDeadError("killed"))
    with pytest.raises(EngineDeadError, match="killed"):
        last.result(0)


def test_each_engine_is_asked_why_its_own_requests_wait(world):
    group = world.group(2)
    group.add_requests(names("r", 4))
    future = group.call("why_waiting", ["r3", "r0", "r2"])
    asked = [engine.calls[-1][1][0] for engine in world.engines]
    assert asked == [["r0", "r2"], ["r3"]]
    world.of(0).calls[-1][2].set_result(["because", None])
    world.of(1).calls[-1][2].set_result(["therefore"])
    assert future.result(0) == ["therefore", "because", None]


def test_a_part_that_is_not_done_is_asked_again_where_it_is_not(world):
    group = world.group(2)
    args = ("adapters", "poll", {"ticket": 7})
    first = group.call("call_part", *args)
    world.of(0).calls[-1][2].set_result({"name": "a"})
    world.of(1).calls[-1][2].set_result(None)
    assert first.result(0) is None
    second = group.call("call_part", *args)
    assert [len(engine.calls) for engine in world.engines] == [1, 2]
    world.of(1).calls[-1][2].set_result({"name": "a"})
    assert second.result(0) == {"name": "a"}
    third = group.call("call_part", "adapters", "list")
    for engine, answer in zip(world.engines, ([1], [2]), strict=True):
        engine.calls[-1][2].set_result(answer)
    with pytest.raises(HardpointError, match="list: the engines answered differently"):
        third.result(0)
    released = group.call("call_part", "retention", "release", {})
    for engine, answer in zip(world.engines, ("missing", "accepted"), strict=True):
        engine.calls[-1][2].set_result(answer)
    assert released.result(0) == "accepted"


def test_cancelling_a_call_cancels_it_everywhere(world):
    group = world.group(2)
    future = group.call("pause", "wait")
    assert future.cancel()
    assert all(engine.calls[-1][2].cancelled() for engine in world.engines)


def test_requests_that_time_out_keep_the_time_that_is_left(world):
    group = world.group(2)
    one = msgspec.structs.replace(request("a"), timeout=30.0)
    group.add_request(one)
    world.of(0).die(killed=True)
    assert 0 < world.of(1).sent[0].timeout <= 30.0


def test_nothing_is_served_after_closing(world):
    group = world.group(2)
    group.close()
    group.close()
    assert all(engine.closed for engine in world.engines)
    with pytest.raises((EngineClosedError, EngineDeadError)):
        group.add_request(request("late"))
