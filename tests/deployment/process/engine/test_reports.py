"""Reports of a loop to its clients: the engine's load, and changes of its KV cache."""

from __future__ import annotations

import itertools
import time

import pytest
from support.core.engine_harness import LoopRig, MidStep, ScriptedExecutor, request
from support.waiting import PATIENCE_S, wait_until

from hardpoint.plugins import EngineCoreOutputs, PrefixCacheStats, SchedulerStats
from hardpoint.plugins.requests.engine_state import KVCacheChanges
from hardpoint.process import cache_changes as log_of_changes
from hardpoint.process import output_coalescer
from hardpoint.process.cache_changes import CacheChangeLog
from hardpoint.process.engine.loop import LoopOptions
from hardpoint.process.engine.reports import ClientReports
from hardpoint.process.protocol import UtilityCall
from hardpoint.replicas.prefix_index import PrefixIndex

PROMPT = list(range(41))
LOAD = LoopOptions(reports_load=True)


def reporting_cache():
    return LoopOptions(cache_changes=CacheChangeLog())


def loads(rig, client=0):
    return [
        message.load
        for number, message in rig.messages
        if number == client and getattr(message, "load", None) is not None
    ]


def changes(rig, client=0):
    return [
        message.cache_changes
        for number, message in rig.messages
        if number == client and getattr(message, "cache_changes", None) is not None
    ]


def index_of(rig, client=0):
    """An index that has read all changes that a client got; asserts that none are missing."""
    index = PrefixIndex(4)
    for change in changes(rig, client):
        assert index.apply(0, change)
    return index


def names_of_steps(rig):
    """The ids of all requests that took part in a step."""
    plans = [plan for plan, _ in list(rig.executor.sampled.values())]
    return {name for plan in plans for name in plan.num_scheduled_tokens}


def is_idle(rig, client=0):
    """Whether the last load of a client shows an engine that has run four steps and ended."""
    last = loads(rig, client)[-1:]
    return any(
        (load.num_running, load.num_waiting, load.kv_cache_usage) == (0, 0, 0)
        and load.num_steps >= 4
        for load in last
    )


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


class ScriptedCore:
    """A core with a load that a test sets."""

    def __init__(self):
        self.num_running, self.num_loads = 0, 0

    def stats(self):
        self.num_loads += 1
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=0,
            kv_cache_usage=0.0,
            prefix_cache=PrefixCacheStats(),
        )


class TestTimes:
    @pytest.fixture
    def core(self):
        return ScriptedCore()

    @pytest.fixture
    def clock(self):
        return Clock()

    @pytest.fixture
    def reports(self, core, clock):
        reports = ClientReports(2, clock, stats=core.stats, cache=None)
        assert set(reports.with_reports({})) == {0, 1}
        return reports

    def test_a_load_is_sent_at_most_every_100_ms(self, reports, core, clock):
        sent = []
        for _ in range(40):
            clock.now += 0.03
            core.num_running += 1
            sent += [clock.now] * bool(reports.with_reports({}))
        assert len(sent) == 10
        assert all(after - before > 0.0999 for before, after in itertools.pairwise(sent))
        assert core.num_loads == 11

    def test_one_that_has_not_changed_is_not_sent(self, reports, clock):
        clock.now += 5
        assert reports.with_reports({}) == {}
        assert reports.wait_s is None

    def test_a_request_that_has_ended_since_is_a_change(self, reports, clock):
        clock.now += 5
        reports.read_request(1, "a")
        sent = reports.with_reports({})
        assert [sent[client].load.last_request for client in (0, 1)] == [None, "a"]

    def test_what_may_have_changed_too_early_is_looked_at_later(self, reports, clock):
        clock.now += 0.04
        assert reports.with_reports({}, executed=True) == {}
        assert reports.wait_s == pytest.approx(0.06)
        clock.now += 0.07
        assert reports.with_reports({})[0].load.num_steps == 1
        assert reports.wait_s is None

    def test_they_come_with_the_outputs_of_a_step(self, reports, core, clock):
        clock.now += 1
        core.num_running = 3
        outputs = EngineCoreOutputs(finished_requests={"a"})
        sent = reports.with_reports({1: outputs})
        assert sent[1] is outputs
        assert outputs.load.num_running == sent[0].load.num_running == 3
        assert sent[0].finished_requests is None


class TestLoad:
    def test_all_clients_get_it_with_their_own_last_request(self):
        rig = LoopRig(clients=2, options=LOAD)
        rig.send(request("a"), request("b", client_index=1), request("c", client_index=1))
        with rig:
            rig.until(lambda: len(rig.ends) == 3 and is_idle(rig) and is_idle(rig, 1))
        assert [loads(rig, client)[-1].last_request for client in (0, 1)] == ["a", "c"]

    def test_waiting_requests_are_reported_without_any_output(self):
        executor = ScriptedExecutor()
        step = MidStep(executor)
        rig = LoopRig(executor, options=LOAD, max_num_seqs=1)
        with rig:
            rig.send(request("a", max_tokens=2), request("b", max_tokens=2))
            assert step.begun.wait(PATIENCE_S)
            rig.send(UtilityCall(0, 1, "pause", ["keep", False]), request("c"))
            step.go_on.set()
            rig.until(lambda: any(load.num_waiting == 2 for load in loads(rig)))
            assert not rig.ends
            rig.send(UtilityCall(0, 2, "resume"))
            rig.until(lambda: len(rig.ends) == 3)

    def test_one_that_is_refused_was_read(self):
        rig = LoopRig(options=LOAD)
        rig.send(request("a", prompt=[1] * 500))
        with rig:
            rig.until(lambda: loads(rig) and loads(rig)[-1].last_request == "a")

    def test_an_idle_engine_sends_nothing_more(self):
        rig = LoopRig(options=LOAD)
        rig.send(request("a"))
        with rig:
            rig.until(lambda: is_idle(rig))

            def sends_nothing():
                count = len(rig.messages)
                time.sleep(0.3)
                rig.collect()
                return len(rig.messages) == count

            wait_until(sends_nothing)


class TestCache:
    def test_the_prefix_of_a_request_that_ran_is_found_until_a_reset(self):
        rig = LoopRig(clients=2, options=reporting_cache())
        rig.send(request("a", prompt=PROMPT), request("b", prompt=PROMPT[:20] + [7] * 20))
        with rig:
            rig.until(lambda: len(rig.ends) == 2)
            for client in (0, 1):
                index = index_of(rig, client)
                assert index.cached_prefix_tokens(request("x", PROMPT)) == {0: 40}
                salted = request("x", PROMPT, cache_salt="other")
                assert index.cached_prefix_tokens(salted) == {}
            rig.send(UtilityCall(0, 1, "reset_prefix_cache"))
            rig.until(lambda: changes(rig)[-1].cleared)
        assert index_of(rig).cached_prefix_tokens(request("x", PROMPT)) == {}

    def test_what_is_evicted_is_not_found(self):
        rig = LoopRig(blocks=16, options=reporting_cache())
        with rig:
            for number in range(4):
                rig.send(request(str(number), prompt=[number] * 41))
                rig.until(lambda number=number: len(rig.ends) == number + 1)
        index = index_of(rig)
        cached = [index.cached_prefix_tokens(request("x", [number] * 41)) for number in range(4)]
        assert cached[3] == {0: 40}
        assert cached[0] == {}
        assert len(index) <= 16

    def test_a_slow_client_loses_changes_and_gets_all_blocks(self, monkeypatch):
        monkeypatch.setattr(output_coalescer, "MOST_UNREAD", 30)
        rig = LoopRig(options=reporting_cache(), clients=2)
        prompts = [[number] * 41 for number in range(5)]
        index = PrefixIndex(4)
        with rig:
            for number, prompt in enumerate(prompts):
                rig.send(request(str(number), prompt=prompt, max_tokens=1))
            wait_until(lambda: len(names_of_steps(rig)) == 5)
            wait_until(lambda: not rig.core.num_unfinished_requests())
            rig.send(UtilityCall(0, 1, "is_paused"))  # answered after all that came before
            while not hasattr(rig.queues.output.pop(lambda client: client == 0)[1], "call_id"):
                pass
            rig.collect()
            complete = [index.apply(0, change) for change in changes(rig, 1)]
            assert not complete[-1]
            assert index.cached_prefix_tokens(request("x", prompts[0])) == {}
            rig.send(UtilityCall(1, 7, "cached_blocks"))
            rig.until(lambda: 7 in rig.answers)
            answer = rig.answers[7].result.value
            assert isinstance(answer, KVCacheChanges)
            assert index.restore(0, answer)
        for prompt in prompts:
            assert index.cached_prefix_tokens(request("x", prompt)) == {0: 40}


class TestNotAsked:
    def test_nothing_is_sent_or_computed(self, monkeypatch):
        rig = LoopRig()
        monkeypatch.setattr(rig.core, "stats", None)
        monkeypatch.setattr(rig.core, "cached_blocks", None)
        rig.send(request("a"))
        with rig:
            rig.until(lambda: rig.ends)
        assert not loads(rig)
        assert not changes(rig)
        assert rig.cache.take_events() == []

    def test_all_blocks_are_refused_by_name(self):
        with LoopRig() as rig:
            rig.send(UtilityCall(0, 1, "cached_blocks"))
            rig.until(lambda: rig.answers)
        assert rig.answers[1].failure == "this engine does not report changes of its KV cache"

    def test_load_alone_collects_no_events(self):
        rig = LoopRig(options=LOAD)
        rig.send(request("a"))
        with rig:
            rig.until(lambda: rig.ends)
        assert not changes(rig)


def test_all_blocks_are_bounded(monkeypatch):
    monkeypatch.setattr(log_of_changes, "MOST_BLOCKS", 3)
    hashes = {bytes([number]) * 32: number for number in range(9)}
    answer = CacheChangeLog().all_of(hashes)
    assert answer.stored == {bytes([number]) * 8 for number in range(3)}
    assert answer.cleared
