"""One load under several configurations: records, processes, comparison, tenants, conversations."""

from __future__ import annotations

import json
from multiprocessing import current_process, forkserver, get_context
from operator import methodcaller
from typing import ClassVar

import msgspec
import pytest
from support.costs import made_up_cost

from hardpoint.builtin_plugins.scheduling.scheduler import DefaultScheduler
from hardpoint.plugins import ConfigError, EngineConfig, HardpointError, StepCost
from hardpoint.simulation import (
    Fleet,
    Lengths,
    Segment,
    SimulatedRequest,
    SyntheticLoad,
    TraceError,
    runs,
    simulate,
)
from hardpoint.typed import convert

LOAD = {
    "synthetic": {
        "requests": 120,
        "rate": 30.0,
        "prompt": {"median": 60, "sigma": 0.7},
        "output": {"median": 12},
        "tenants": 3,
        "turns": 2.0,
        "think_seconds": 0.5,
    }
}


@pytest.fixture
def file_cost(cost):
    return made_up_cost(
        max_model_len=4096,
        num_blocks=512,
        step_cost=cost,
    )


@pytest.fixture(scope="module")
def forked_processes(tmp_path_factory):
    """Let processes be forks of a process that has imported the package."""
    context = get_context("forkserver")
    context.set_forkserver_preload([runs.__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "get_context", lambda _: context)
        # Else it would be removed at the end of the program, after the folder that it is in.
        config = vars(current_process())["_config"]
        patch.setitem(config, "tempdir", str(tmp_path_factory.mktemp("p")))
        yield
    methodcaller("_stop")(forkserver.ensure_running.__self__)


def config_of(**tables):
    return convert(tables, EngineConfig, path="")


@pytest.fixture
def variants():
    return {
        name: config_of(scheduler={"policy": name, "max_num_seqs": 4})
        for name in ("fcfs", "shortest_first")
    }


def by_kind(records):
    by_record = {"progress": [], "result": [], "comparison": []}
    for record in records:
        by_record[record["record"]].append(record)
    return by_record


class TestSimulate:
    def test_each_variant_has_a_result_and_the_first_is_compared_with(self, variants, file_cost):
        records = by_kind(simulate(variants, LOAD, cost=file_cost))
        assert [result["variant"] for result in records["result"]] == ["fcfs", "shortest_first"]
        (comparison,) = records["comparison"]
        assert comparison["with"] == "fcfs"
        first, second = (result["report"]["ttft"]["mean"] for result in records["result"])
        assert second < first
        changes = comparison["changes"]["shortest_first"]
        assert changes["ttft.mean"] == pytest.approx(second / first - 1)
        assert changes["preemptions"] is None  # of 0
        json.dumps(records)

    @pytest.mark.usefixtures("forked_processes")
    def test_processes_give_the_same(self, variants, file_cost):
        here = by_kind(simulate(variants, LOAD, cost=file_cost))["result"]
        apart = by_kind(simulate(variants, LOAD, cost=file_cost, processes=2))["result"]
        assert {result["variant"]: result["report"] for result in apart} == {
            result["variant"]: result["report"] for result in here
        }

    @pytest.mark.usefixtures("forked_processes")
    def test_an_error_in_a_process_is_that_of_its_variant(self, variants, file_cost):
        variants["broken"] = config_of(scheduler={"asynchronous": True})
        with pytest.raises(HardpointError, match="broken: scheduler.asynchronous: expected False"):
            list(simulate(variants, LOAD, cost=file_cost, processes=2))

    def test_what_is_left_open_is_that_of_the_calibrated_engine(self, file_cost):
        small = msgspec.structs.replace(file_cost, max_model_len=64)
        load = {"synthetic": {"requests": 3, "prompt": {"median": 100}, "output": {"median": 2}}}
        (record,) = by_kind(simulate({"": config_of()}, load, cost=small))["result"]
        assert record["report"]["refused"] == 3
        assert "64" in next(iter(record["report"]["refusals"].values()))

    def test_cost_may_be_a_file_and_trace_as_well(self, file_cost, tmp_path):
        cost, trace = tmp_path / "cost.json", tmp_path / "trace.jsonl"
        cost.write_bytes(msgspec.json.encode(file_cost))
        line = {"input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
        rows = [line | {"timestamp": 3_600_000 + 500 * number} for number in range(4)]
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        load = {"trace": str(trace), "limit": 3, "speed": 2.0}
        (record,) = by_kind(simulate({"": config_of()}, load, cost=cost))["result"]
        assert record["report"]["prompt_tokens"] == 1800
        assert record["curves"]["time"][-1] == pytest.approx(0.5)

    @pytest.mark.parametrize(
        ("load", "settings", "message"),
        [
            ({"speed": 0}, {}, "load.speed: expected a number > 0, got 0"),
            ({"limit": 0}, {}, "load.limit: expected a whole number >= 1, got 0"),
            ({"synthetic": {"rate": 0}}, {}, "load.synthetic.rate: expected a number > 0, got 0"),
            ({"trace": "none.jsonl"}, {}, "none.jsonl: the trace cannot be read: No such file"),
            ({}, {"processes": 0}, "processes: expected at least 1, got 0"),
            ({}, {"objective": {"ttft": "x"}}, "objective.ttft: expected a number, got 'x'"),
        ],
    )
    def test_what_is_wrong_is_named(self, variants, file_cost, load, settings, message):
        with pytest.raises((ConfigError, TraceError), match=message):
            list(simulate(variants, load, cost=file_cost, **settings))

    def test_a_variant_is_needed(self, file_cost):
        with pytest.raises(ConfigError, match="variants: expected at least one, got none"):
            list(simulate({}, LOAD, cost=file_cost))


class TestReports:
    def test_tenants_and_conversations(self, open_fleet):
        def turn(at, number, session, tenant, output=4):
            return SimulatedRequest(
                at=at,
                prompt=(Segment(2 * number, 10),),
                output=Segment(2 * number + 1, output),
                session=session,
                tags={"tenant": tenant},
            )

        fleet = open_fleet(1)
        report = fleet.run([turn(0, 0, "x", "a"), turn(1, 1, "y", "b"), turn(10, 2, "x", "a")])
        # A prompt of 10 tokens takes 5 + 0.2 + 0.5 ms, a further token 5.1 ms.
        assert {name: tenant.finished for name, tenant in report.tenants.items()} == {
            "a": 2,
            "b": 1,
        }
        assert report.tenants["a"].ttft.p99 == pytest.approx(0.0057)
        assert report.e2e.p50 == pytest.approx(0.0057 + 3 * 0.0051)
        conversations = report.conversations
        assert (conversations.count, conversations.turns, conversations.goodput_share) == (
            2,
            1.5,
            1.0,
        )
        by_name = {conversation.session: conversation for conversation in conversations.longest}
        assert by_name["x"].turns == 2
        assert by_name["x"].seconds == pytest.approx(10 + 0.0057 + 3 * 0.0051)
        assert by_name["x"].waited == pytest.approx(2 * 0.0057)
        assert by_name["y"].longest_wait == pytest.approx(0.0057)

    def test_without_tenants_and_sessions_there_are_none(self, open_fleet, request_at):
        report = open_fleet(1).run([request_at(0, 0)])
        assert report.tenants == {}
        assert report.conversations is None

    def test_one_late_turn_is_a_conversation_that_missed_the_objective(self, cost):
        load = SyntheticLoad(
            requests=60, rate=200.0, turns=3.0, think_seconds=0.05, prompt=Lengths(median=200)
        )
        config = {"kv_cache": {"num_blocks": 256}}
        with Fleet(config, step_cost=cost) as fleet:
            report = fleet.run(load.generate())
        assert report.conversations.goodput_share < report.goodput_share < 1

    def test_curves_are_those_of_the_report(self, open_fleet):
        load = convert(LOAD["synthetic"], SyntheticLoad, path="")
        fleet = open_fleet(1)
        report, curves = fleet.run(load.generate()), fleet.curves()
        assert len(curves["ttft"]) == 101
        assert curves["ttft"][50] == pytest.approx(report.ttft.p50)
        assert curves["e2e"][95] == pytest.approx(report.e2e.p95)
        assert len(curves["time"]) == len(curves["good"]) == len(curves["wait"])

    def test_without_requests_there_is_nothing_to_show(self, open_fleet):
        fleet = open_fleet(1)
        report = fleet.run([])
        assert report.finished == 0
        assert set(map(len, fleet.curves().values())) == {0}


class TestTenants:
    def test_they_change_nothing_else(self):
        plain = SyntheticLoad(requests=50, turns=2.0, hot_prefixes=3)
        with_some = msgspec.structs.replace(plain, tenants=4, priorities=3)
        for request, other in zip(plain.generate(), with_some.generate(), strict=True):
            assert msgspec.structs.replace(other, tags={}, priority=0) == request

    def test_their_shares_are_those_of_zipf(self):
        load = SyntheticLoad(requests=6000, tenants=3, tenant_zipf=1.0, priorities=2)
        requests = list(load.generate())
        counts = [
            sum(request.tags["tenant"] == f"t{place}" for request in requests) for place in range(3)
        ]
        assert counts == pytest.approx([6000 * 6 / 11, 6000 * 3 / 11, 6000 * 2 / 11], rel=0.07)
        assert sum(request.priority for request in requests) == pytest.approx(3000, rel=0.05)

    def test_turns_of_a_conversation_have_one(self):
        load = SyntheticLoad(requests=200, turns=3.0, tenants=5)
        tenants = {}
        for request in load.generate():
            assert tenants.setdefault(request.session, request.tags) == request.tags


class Watching(DefaultScheduler):
    """Keeps the cost of steps that it was given last."""

    contract = 2
    seen: StepCost
    first: StepCost | None = None

    def schedule(self):
        Watching.seen = self.context.step_cost()
        Watching.first = Watching.first or Watching.seen
        return super().schedule()


@pytest.mark.parametrize("limit", [0.0, 50.0])
def test_schedulers_get_what_an_engine_has_measured(file_cost, limit):
    """With a limit for the time of steps alone, as in a real engine."""
    Watching.first = None
    scheduler = {"use": f"{__name__}:Watching", "step_milliseconds": limit, "max_num_seqs": 4}
    variants = {"one": config_of(scheduler=scheduler)}
    list(simulate(variants, LOAD, cost=file_cost, processes=1))
    assert Watching.seen.is_trained is bool(limit)
    if limit:
        assert Watching.first.is_trained, "from the first step on, as one that has served"
        work = {"single_queries": 3, "context": 150, "prompts": 1, "prompt_tokens": 40}
        expected = file_cost.milliseconds(**work)
        assert Watching.seen.milliseconds(**work) == pytest.approx(expected, rel=0.25)


class Arrivals(DefaultScheduler):
    """Keeps the times at which requests arrived, as policies and ages read them."""

    contract = 2
    seen: ClassVar[list[float]] = []

    def add_request(self, request):
        Arrivals.seen.append(request.arrival_time)
        super().add_request(request)


def test_a_request_is_as_old_as_its_client_knows(file_cost):
    """It may arrive in a step, after which the engine reads it: as the real one, it is older."""
    Arrivals.seen.clear()
    variants = {"one": config_of(scheduler={"use": f"{__name__}:Arrivals", "max_num_seqs": 4})}
    list(simulate(variants, LOAD, cost=file_cost, processes=1))
    load = convert(LOAD["synthetic"], SyntheticLoad, path="")
    assert Arrivals.seen == [request.at for request in load.generate()]
