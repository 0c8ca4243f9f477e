"""Deaths of the engines of a client of several, which the test plays."""

from __future__ import annotations

import threading

import msgspec
import pytest
from support.core.played_engines import Engine, loads, names, request
from support.waiting import wait_until

from hardpoint.errors import EngineDeadError
from hardpoint.host.boundary.activity import PluginCall
from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    ModelError,
)
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import WeightRun
from hardpoint.replicas import replicas


def test_requests_of_a_dead_engine_go_on_at_another(world):
    group = world.group(2)
    group.add_requests(names("r", 4))
    world.of(1).give("r1", 5)
    world.of(1).die(killed=True)
    assert world.of(0).ids == ["r0", "r2", "r1", "r3"]
    assert loads(group)[0] == (4, 13)
    world.of(0).give("r1", 6, finish=FinishReason.STOP)
    assert world.tokens("r1") == [5, 6]
    assert world.outputs("r1")[-1].num_resumes == 1
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
    wait_until(lambda: set(group.pids) == {0, 1}, what="the other engine")
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
    wait_until(lambda: world.of(0).ids == ["a", "c"], what="the requests")


@pytest.mark.parametrize("is_sent_first", [False, True])
def test_an_abort_during_the_sending_reaches_the_engine(world, monkeypatch, is_sent_first):
    group = world.group(1, restarts=3)
    for name in ("a", "b"):
        group.add_request(request(name))
    offer = Engine.offer_requests

    def offered(self, requests):
        attempt = offer(self, requests)
        if [request.request_id for request in requests] != ["a"]:
            return attempt

        def aborting():
            if not is_sent_first:
                group.abort_requests(["a", "b"])
            attempt()
            if is_sent_first:
                group.abort_requests(["a", "b"])
            return True

        return aborting

    monkeypatch.setattr(Engine, "offer_requests", offered)
    world.of(0).die(killed=True)
    wait_until(lambda: len(world.engines) == 2 and "a" in world.of(0).aborted, what="the abort")
    assert world.of(0).ids == ["a"]
    assert world.of(0).aborted[-1] == "a"


def test_one_that_dies_while_it_starts_is_tried_again_as_often_as_allowed(world):
    group = world.group(1, restarts=2)
    group.add_request(request("a"))
    world.failing[0] = [EngineDeadError("killed early"), EngineDeadError("and again")]
    world.of(0).die(killed=True)
    wait_until(lambda: world.received, what="the end")
    limit = r"not restarted: 2 restarts within a minute \(engine\.max_restarts_per_minute\)"
    for call in (lambda: group.add_request(request("b")), lambda: group.call("resume")):
        with pytest.raises(EngineDeadError, match=f"and again; {limit}"):
            call()


def test_what_cannot_be_built_is_not_tried_again(world):
    group = world.group(2, restarts=3)
    world.failing[1] = [ModelError("the file is gone"), EngineDeadError("never")]
    group.add_request(request("pinned", data_parallel_rank=1))
    world.of(1).die(killed=True)
    wait_until(lambda: world.outputs("pinned"), what="its end")
    named = r"the file is gone; the request names that engine (data_parallel_rank)"
    assert named in world.error("pinned")
    assert len(world.failing[1]) == 1
    group.add_request(request("other"))
    assert world.of(0).ids == ["other"]
    with pytest.raises(EngineDeadError, match="^data_parallel_rank: engine 1 is dead$"):
        group.add_request(request("late", data_parallel_rank=1))


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
    for member in requests:
        member.data_parallel_rank = None
    bystanders = names("b", 3)
    for bystander, rank in zip(bystanders, (1, 2, 3), strict=True):
        bystander.data_parallel_rank = rank
    group.add_requests(bystanders)
    ledger = group._ledger
    group.add_requests(requests)
    # All four are taken for requests of one step, whichever engine they are on.
    victims = {ledger.get(f"r{i}").replica.rank for i in range(4)}
    assert victims
    culprit, deaths = "r2", []

    def run() -> None:
        """Let engines compute; engines with the culprit in a step die."""
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
            seen.append((death.call, death.repeated))
            return EngineDeadError(f"named: {death.error}")

    watcher = Watcher()
    group = world.group(3, resume="off")
    group.watch_deaths(watcher.watch)
    call = PluginCall("hooks", "x", "plugin 'x'", "step")
    group.add_requests(names("r", 3))
    world.of(0).die("r0", call=call)
    world.of(1).die("r1", call=call, killed=True)
    world.of(2).die("r2", call=call)
    assert seen == [(call, ""), (None, ""), (call, "2 times within 60 s")]
    assert world.error("r0") == (
        "named: it fell over; the request was in the step in which it died"
    )


def test_an_engine_of_another_machine_quarantines_no_plugin(world):
    seen = []

    class Watcher:
        def watch(self, death):
            seen.append((death.call, death.repeated))
            return EngineDeadError(f"named: {death.error}")

    watcher = Watcher()
    group = world.group(3, num_local=1)
    group.watch_deaths(watcher.watch)
    call = PluginCall("hooks", "x", "plugin 'x'", "step")
    for rank in (2, 1, 0):
        world.of(rank).die(call=call)
    assert seen == [(None, ""), (None, ""), (call, "")]


def test_the_deaths_of_joined_engines_do_not_prevent_restarts_of_others(world):
    group = world.group(3, restarts=1, num_local=1)
    for rank in (2, 1, 0):
        world.of(rank).die(killed=True)
        wait_until(lambda: len(group.pids) == 3, what="the restart")
    world.of(2).die(killed=True)
    assert sorted(group.pids) == [0, 1]
    assert group.is_serving


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
    wait_until(lambda: world.num_spawned == 2, what="the other process")
    group.close()
    wait_until(lambda: len(world.engines) == 2 and world.of(0).closed, what="the end of both")
    assert group.pids == {}


@pytest.mark.parametrize("resume", ["exact", "any"])
def test_tokens_of_other_weights_do_not_go_on_as_if_nothing_had_happened(world, resume):
    group = world.group(2, resume=resume)
    group.add_requests(names("r", 4))  # 1 and 3 at the second engine
    world.of(1).give("r1", 5)
    runs = [WeightRun(0, "0", "0"), WeightRun(1, "7", "7")]
    output = EngineCoreOutput(request_id="r3", new_token_ids=[6], weight_runs=runs)
    world.of(1).sink(EngineCoreOutputs(outputs=[output]))
    start = world.engines[0].start
    load = msgspec.structs.replace(start.config.load, version="7")
    config = msgspec.structs.replace(start.config, load=load)
    group.restart_with(config, start.manifest)
    world.of(1).die(killed=True)
    if resume == "exact":
        assert world.error("r1") == (
            "it fell over; the request began with weights of version '0', and engines have '7' now "
            "(engine.resume)"
        )
    else:
        assert "r1" in world.of(0).ids
    resumed = next(sent for sent in world.of(0).sent if sent.request_id == "r3").resumed
    assert (resumed.output_token_ids, resumed.weight_runs, resumed.num_resumes) == ([6], runs, 1)


def test_all_that_came_of_a_request_goes_with_it(world):
    group = world.group(3, max_resumes=2)
    group.add_requests(names("r", 3))
    for number, tokens in ((2, [1, 2]), (2, [3])):
        output = EngineCoreOutput(
            request_id="r2",
            new_token_ids=tokens,
            observed_logprobs=[-0.5] * len(tokens),
            prompt_logprobs=[None] * len(tokens),
            part_figures={"speculation": {"drafts": number}},
        )
        world.of(2).sink(EngineCoreOutputs(outputs=[output]))
    world.of(2).die(killed=True)
    (second,) = [e for e in world.engines if "r2" in e.ids and e is not world.of(2)]
    resumed = second.sent[-1].resumed
    assert resumed.output_token_ids == [1, 2, 3]
    assert resumed.observed_logprobs == [-0.5] * 3
    assert (resumed.num_prompt_logprobs, resumed.num_resumes) == (3, 1)
    assert resumed.part_figures == {"speculation": {"drafts": 2}}
    second.give("r2", 4)
    second.die(killed=True)
    last = next(e for e in world.engines if e.start.engine_index in group.pids)
    resumed = next(sent for sent in last.sent if sent.request_id == "r2").resumed
    assert (resumed.output_token_ids, resumed.num_resumes) == ([1, 2, 3, 4], 2)


def test_a_pooling_request_begins_anew(world):
    group = world.group(2)
    pooling = msgspec.structs.replace(request("a"), pooling_params=PoolingParams(task="embed"))
    group.add_request(pooling)
    world.of(0).die(killed=True)
    assert world.of(1).sent[0].resumed is None
