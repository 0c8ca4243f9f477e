"""Paused engines, and the load and the statistics of several engines."""

from __future__ import annotations

import threading

import pytest
from support.core.played_engines import loads, names, request
from support.waiting import PATIENCE_S, wait_until

from hardpoint.errors import EngineDeadError
from hardpoint.plugins import EngineCoreOutputs, FinishReason, PrefixCacheStats, SchedulerStats
from hardpoint.plugins.requests.stats import PluginReport
from hardpoint.replicas.statistics import PrefillRate


def stats(total, **fields):
    known = {"num_running": 1, "num_waiting": 0, "kv_cache_usage": 0.5} | fields
    return SchedulerStats(prefix_cache=PrefixCacheStats(total, total, total), **known)


def report(engine, total, **fields):
    engine.sink(EngineCoreOutputs(scheduler_stats=stats(total, **fields)))


def totals(scheduler):
    return {rank: engine.prefix_cache.requests for rank, engine in scheduler.engines.items()}


def answer(engine, result, place=-1):
    engine.calls[place][2].set_result(result)


class TestPaused:
    def pause(self, group, world, rank):
        group.call("pause", rank=rank)
        answer(world.of(rank), None)
        assert world.of(rank).calls[-1][0] == "is_paused"
        answer(world.of(rank), True)

    def test_balancers_leave_it_out_until_it_is_resumed(self, world):
        group = world.group(2)
        self.pause(group, world, 1)
        group.add_requests(names("r", 4))
        assert {rank: load[0] for rank, load in loads(group).items()} == {0: 4, 1: 0}
        group.call("resume", rank=1)
        answer(world.of(1), None)
        answer(world.of(1), False)
        group.add_requests(names("s", 2))
        assert {rank: load[0] for rank, load in loads(group).items()} == {0: 5, 1: 1}

    def test_a_request_that_names_it_waits_there(self, world):
        group = world.group(2)
        self.pause(group, world, 1)
        group.add_request(request("named", data_parallel_rank=1))
        assert world.of(1).ids == ["named"]

    def test_while_all_are_paused_requests_are_divided(self, world):
        group = world.group(2)
        for rank in (0, 1):
            self.pause(group, world, rank)
        group.add_requests(names("r", 2))
        assert {rank: load[0] for rank, load in loads(group).items()} == {0: 1, 1: 1}

    def test_it_is_left_out_from_the_call_on_and_what_failed_is_undone(self, world):
        group = world.group(2)
        group.call("sleep", rank=0)
        group.add_request(request("r"))
        assert world.of(1).ids == ["r"]
        world.of(0).calls[-1][2].set_exception(EngineDeadError("no"))
        answer(world.of(0), False)
        assert [engine.state for engine in group.load().engines] == ["serving", "serving"]


class TestLoad:
    def test_what_each_has_to_do(self, world):
        group = world.group(3)
        group.add_requests(names("r", 2))
        group.call("pause", rank=2)
        load = group.load()
        assert [(engine.rank, engine.state, engine.in_flight) for engine in load.engines] == [
            (0, "serving", 1),
            (1, "serving", 1),
            (2, "paused", 0),
        ]
        assert [engine.waiting_prompt_tokens for engine in load.engines] == [3, 3, 0]
        assert (load.in_flight, load.waiting_prompt_tokens) == (2, 6)
        assert (load.prefill_tokens_per_second, load.waiting_prompt_seconds) == (None, None)

    def test_the_rate_is_measured_and_with_it_how_long_prompts_wait(self, world):
        group = world.group(1)
        group.add_requests(names("r", 2))
        world.of(0).give("r0", 7)
        load = group.load()
        rate = load.prefill_tokens_per_second
        assert rate > 0
        assert load.waiting_prompt_seconds == pytest.approx(3 / rate)
        world.of(0).give("r1", 7)
        assert group.load().waiting_prompt_seconds == 0

    def test_the_dead_and_those_that_start(self, world):
        group = world.group(2)
        world.of(1).die()
        assert [engine.state for engine in group.load().engines] == ["serving", "dead"]
        group.retire([1], 0.0)
        assert [engine.state for engine in group.load().engines] == ["serving"]

    def test_what_lies_a_minute_back_counts_half(self):
        rate = PrefillRate()
        assert rate.per_second is None
        rate.add(100, 1.0)
        assert rate.per_second == pytest.approx(100.0)
        rate.add(600, 60.0)
        assert rate.per_second == pytest.approx(650 / 60.5)


class TestStatistics:
    def test_each_engine_is_seen_under_its_own_index(self, world):
        world.group(2)
        report(world.of(1), 5, num_running=4)
        batch = world.received[-1]
        assert batch.engine_index == 1
        report(world.of(0), 3)
        seen = world.received[-1].scheduler_stats
        assert totals(seen) == {0: 3, 1: 5}
        assert (seen.num_running, seen.prefix_cache.requests) == (5, 8)
        assert [engine.num_running for engine in seen.engines.values()] == [1, 4]

    def test_totals_do_not_fall_when_one_is_restarted(self, world):
        group = world.group(2, restarts=2)
        report(world.of(0), 7)
        report(world.of(1), 5)
        world.of(1).die(killed=True)
        seen = world.received[-1].scheduler_stats
        assert totals(seen) == {0: 7, 1: 5}
        assert seen.engines[1].num_running == 0
        wait_until(lambda: len(group.pids) == 2, what="the restart")
        report(world.of(1), 2)
        assert totals(world.received[-1].scheduler_stats) == {0: 7, 1: 7}

    def test_nor_when_one_goes_and_another_takes_its_rank(self, world):
        group = world.group(2)
        report(world.of(0), 1)
        report(world.of(1), 5)
        group.retire([1], 0.0)
        seen = world.received[-1].scheduler_stats
        assert totals(seen) == {0: 1, 1: 5}
        assert seen.num_running == 1
        group.scale(2, 0.0)
        report(world.of(1), 2)
        assert totals(world.received[-1].scheduler_stats) == {0: 1, 1: 7}

    def test_one_that_drains_is_counted_until_its_end(self, world):
        group = world.group(2)
        group.add_requests(names("r", 2))
        report(world.of(1), 5)
        change = threading.Thread(target=group.retire, args=([1], 600.0))
        change.start()
        wait_until(lambda: group.load().engines[1].state == "draining", what="the draining")
        report(world.of(0), 1)
        assert totals(world.received[-1].scheduler_stats) == {0: 1, 1: 5}
        world.of(1).give("r1", 7, finish=FinishReason.STOP)
        change.join(PATIENCE_S)

    def test_restarts_and_resumes_by_engine(self, world):
        group = world.group(2, restarts=2)
        group.add_requests(names("r", 2))
        world.of(1).die("r1", killed=True)
        wait_until(lambda: len(group.pids) == 2, what="the restart")
        report = group.call("plugin_report")
        for rank in (0, 1):
            answer(world.of(rank), PluginReport(scheduler=stats(rank), sleep_level=rank))
        seen = report.result(PATIENCE_S)
        assert {rank: engine.restarts for rank, engine in seen.engines.items()} == {0: 0, 1: 1}
        assert {rank: engine.num_resumes for rank, engine in seen.engines.items()} == {0: 1, 1: 0}
        assert [engine.sleep_level for engine in seen.engines.values()] == [0, 1]
        assert seen.sleep_level == 0
