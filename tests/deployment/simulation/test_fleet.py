"""Fleets on a virtual clock: equal runs, engines that die, hot prefixes, stale reports."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from hardpoint.errors import PluginNotFoundError
from hardpoint.plugins import ConfigError, LoadBalancer, StepCost
from hardpoint.simulation import Fleet, Lengths, Segment, SimulatedRequest, SyntheticLoad

LOAD = SyntheticLoad(
    requests=300,
    rate=40.0,
    prompt=Lengths(median=60, sigma=0.7),
    output=Lengths(median=12, sigma=0.5),
    hot_prefixes=6,
    hot_tokens=96,
    turns=1.5,
    think_seconds=0.5,
)
BALANCERS = ("least_cost", "two_choices", "round_robin")


class Watcher(LoadBalancer):
    """Takes the first engine, and notes the views of all of them."""

    contract = 1
    uses_cached_prefixes = True
    seen = []

    def choose(self, request, engines):
        type(self).seen.append(
            [
                (e.rank, e.in_flight, e.num_waiting, e.num_running, e.cached_prefix_tokens(request))
                for e in engines
            ]
        )
        return 0


class Broken(LoadBalancer):
    contract = 1

    def choose(self, request, engines):
        raise RuntimeError("no choice")


@pytest.fixture
def seen():
    Watcher.seen = []
    return Watcher.seen


class TestRuns:
    @pytest.mark.parametrize("balancer", BALANCERS)
    def test_all_requests_get_their_tokens(self, open_fleet, balancer):
        report = open_fleet(4, balancer).run(LOAD.generate())
        assert (report.requests, report.finished, report.unfinished) == (300, 300, 0)
        assert report.output_tokens == sum(request.output.length for request in LOAD.generate())
        assert report.prompt_tokens == sum(request.prompt_length for request in LOAD.generate())
        last = [*LOAD.generate()][-1]
        assert report.virtual_seconds > last.at
        # What was neither cached nor the last token of a request was computed.
        cached = report.reuse * report.prompt_tokens
        computed = report.prompt_tokens + report.output_tokens - 300 - cached
        assert report.preemptions == 0
        assert report.computed_tokens == pytest.approx(computed)
        assert report.balancer == balancer
        assert report.faults == {}

    def test_times_of_one_request_are_the_sums_of_its_steps(self, open_fleet):
        cost = StepCost(step=5.0, single_query=1.0, prompt=2.0, prompt_token=0.5, is_trained=True)
        fleet = open_fleet(1, step_cost=cost)
        request = SimulatedRequest(at=3.0, prompt=(Segment(1, 10),), output=Segment(2, 4))
        report = fleet.run([request])
        assert report.ttft.p50 == pytest.approx(0.012)  # 5 + 2 + 10 * 0.5 milliseconds
        assert report.tpot.p50 == pytest.approx(0.006)
        assert report.virtual_seconds == pytest.approx(3 + 0.012 + 3 * 0.006)
        assert report.steps == 4
        assert report.computed_tokens == 13

    def test_an_idle_engine_costs_nothing(self, open_fleet, request_at):
        fleet = open_fleet(50, "round_robin")
        fleet.run([request_at(1e6 * n, n) for n in range(3)])
        steps = [engine.device.num_steps for engine in fleet.engines.values()]
        assert sum(steps) == 3 * 4
        assert steps[3:] == [0] * 47

    def test_requests_that_come_together_share_a_step(self, open_fleet, request_at):
        report = open_fleet(1).run([request_at(5.0, n, shared=n) for n in range(3)])
        assert report.steps == 4

    def test_what_an_engine_refuses_is_counted(self, open_fleet, request_at):
        report = open_fleet(2, blocks=8).run(
            [request_at(0, 0), request_at(0, 1, length=1000), request_at(1, 2)]
        )
        assert (report.finished, report.refused) == (2, 1)
        assert list(report.refusals) == ["PromptTooLongError"]
        assert "1064" in report.refusals["PromptTooLongError"]
        assert report.goodput_share == pytest.approx(2 / 3)

    def test_a_conversation_with_a_refused_turn_does_not_meet_the_objective(
        self, open_fleet, request_at
    ):
        turns = [request_at(number, number, session="a") for number in range(2)]
        turns += [request_at(2, 2, session="b"), request_at(3, 3, length=1000, session="b")]
        fleet = open_fleet(2, blocks=8)
        conversations = fleet.run(turns).conversations
        assert (conversations.count, conversations.turns, conversations.goodput_share) == (
            2,
            2.0,
            0.5,
        )
        assert [
            (conversation.session, conversation.turns) for conversation in conversations.longest
        ] == [("a", 2), ("b", 1)]

    def test_a_cache_that_is_too_small_for_all_evicts_and_preempts(self, open_fleet):
        load = msgspec.structs.replace(LOAD, requests=100, rate=400.0)
        report = open_fleet(1, blocks=40).run(load.generate())
        assert report.finished + report.refused == 100
        assert report.preemptions > 0
        assert report.reuse < open_fleet(1, blocks=4000).run(load.generate()).reuse

    def test_a_conversation_finds_its_own_outputs(self, open_fleet):
        first, answer, text = Segment(1, 32), Segment(2, 33), Segment(3, 15)
        turns = [
            SimulatedRequest(at=0, prompt=(first,), output=answer),
            SimulatedRequest(at=9, prompt=(first, answer, text), output=Segment(4, 2)),
        ]
        report = open_fleet(1).run(turns)
        assert report.reuse * report.prompt_tokens == pytest.approx(64)  # of 65, in whole blocks

    def test_requests_out_of_order_are_refused(self, open_fleet, request_at):
        with pytest.raises(ValueError, match="in the order of their times, got 1 after 2"):
            open_fleet().run([request_at(2, 0), request_at(1, 1)])

    def test_one_alone_needs_no_index_of_what_it_has_cached(self, open_fleet):
        reports = []
        for is_fixed in (False, True):
            fleet = open_fleet(1, scheduler={"step_milliseconds": 20.0}, is_fixed=is_fixed)
            reports.append(fleet.run(LOAD.generate()))
        assert reports[0] == reports[1]
        assert reports[0].reuse > 0.1


class TestDeterminism:
    @pytest.mark.parametrize("balancer", BALANCERS)
    def test_the_same_seed_gives_the_same_bytes(self, open_fleet, balancer):
        first, second = (open_fleet(5, balancer).run(LOAD.generate()) for _ in range(2))
        assert msgspec.json.encode(first) == msgspec.json.encode(second)
        other = msgspec.structs.replace(LOAD, seed=1).generate()
        assert open_fleet(5, balancer).run(other) != first

    @pytest.mark.nightly
    def test_in_every_process(self, open_fleet):
        program = (
            "import msgspec, test_fleet as t\n"
            "from conftest import COST\n"
            "fleet = t.Fleet({'parallel': {'data': 5}, 'kv_cache': {'num_blocks': 64}},"
            " step_cost=COST)\n"
            "print(msgspec.json.encode(fleet.run(t.LOAD.generate())).decode())\n"
        )
        path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        variables = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        here = open_fleet(5, blocks=64).run(LOAD.generate())
        assert ran.stdout == msgspec.json.encode(here).decode() + "\n"
        assert here.finished == 300


class TestReports:
    def test_loads_are_stale_and_counts_are_not(self, open_fleet, request_at, seen):
        """An engine reports its load at most every 100 ms; counts of the client are exact."""
        fleet = open_fleet(2, f"{__name__}:Watcher")
        fleet.run([request_at(at, n, output=200) for n, at in enumerate((0, 0.01, 0.09, 0.3))])
        first = [views[0] for views in seen]
        assert [view[1] for view in first] == [0, 1, 2, 3]  # in flight
        # The reports come at 9 ms, at the end of the first step, and after 109 ms. What was sent in
        # between counts as waiting, though it runs.
        assert [view[2:4] for view in first] == [(0, 0), (0, 1), (1, 1), (0, 3)]

    def test_prefixes_are_known_once_a_step_has_computed_them(self, open_fleet, request_at, seen):
        fleet = open_fleet(2, f"{__name__}:Watcher")
        # A step with 80 tokens of a prompt takes 5 + 0.2 + 80 * 0.05 = 9.2 ms.
        fleet.run([request_at(at, n) for n, at in enumerate((0, 0.009, 0.0093))])
        assert [view[0][4] for view in seen] == [0, 0, 64]
        assert [view[1][4] for view in seen] == [0, 0, 0]

    def test_blocks_that_were_evicted_are_not_known(self, open_fleet, request_at, seen):
        fleet = open_fleet(2, f"{__name__}:Watcher", blocks=6)
        fleet.run([request_at(n, n, shared=n % 2) for n in range(4)])
        assert [view[0][4] for view in seen][2:] == [0, 0]

    def test_an_index_that_forgets_does_so_in_the_same_order_in_every_process(self):
        from hardpoint.plugins.requests.engine_state import KVCacheChanges
        from hardpoint.replicas.prefix_index import BYTES_PER_BLOCK, PrefixIndex

        index = PrefixIndex(16, max_bytes=32 * BYTES_PER_BLOCK)
        keys = [number.to_bytes(8, "big") for number in range(33)]
        index.apply(0, KVCacheChanges(first=0, last=0, stored=set(keys)))
        dropped = 33 - len(index)
        assert 0 < dropped < 33
        removed = KVCacheChanges(first=1, last=1, removed=set(keys[:dropped]))
        index.apply(0, removed)
        assert len(index) == 33 - dropped


class TestHotPrefixes:
    def test_one_that_all_begin_with_does_not_pin_them(self, open_fleet):
        load = SyntheticLoad(
            requests=400,
            rate=60.0,
            prompt=Lengths(median=160),
            output=Lengths(median=16),
            hot_prefixes=1,
            hot_tokens=256,
        )
        report = open_fleet(4, blocks=1024).run(load.generate())
        assert report.imbalance < 1.3
        assert report.reuse > 0.55  # of 0.61: each engine computes the prefix a few times at most

    def test_of_many_each_is_kept_by_few(self, open_fleet):
        load = SyntheticLoad(
            requests=600,
            rate=60.0,
            prompt=Lengths(median=64),
            output=Lengths(median=8),
            hot_prefixes=24,
            hot_tokens=512,
            zipf=0.5,
        )
        reports = {name: open_fleet(4, name, blocks=400).run(load.generate()) for name in BALANCERS}
        assert reports["least_cost"].reuse > 1.5 * reports["round_robin"].reuse
        assert reports["least_cost"].ttft.p99 < reports["round_robin"].ttft.p99
        assert reports["least_cost"].computed_tokens < reports["round_robin"].computed_tokens


class TestEngines:
    @pytest.mark.parametrize("balancer", BALANCERS)
    def test_requests_of_one_that_dies_go_on_at_others(self, open_fleet, balancer):
        fleet, load = open_fleet(3, balancer), msgspec.structs.replace(LOAD, rate=400.0)
        fleet.at(0.3, lambda: fleet.lose_engine(1))
        report = fleet.run(load.generate())
        assert (report.finished, report.unfinished) == (300, 0)
        assert report.output_tokens == sum(request.output.length for request in load.generate())
        assert report.moved > 0
        assert sorted(fleet.engines) == [0, 2]

    def test_tokens_that_were_sent_are_not_generated_again(self, open_fleet, request_at):
        fleet = open_fleet(2, "round_robin")
        fleet.at(0.055, lambda: fleet.lose_engine(0))
        report = fleet.run([request_at(0, 0, output=20)])
        # Prompt in 9.2 ms, then 5.1 ms per token: 9 tokens by 0.0500 s, 10 by 0.0551 s.
        assert report.moved == 1
        assert report.output_tokens == 20
        assert fleet.engines[1].device.num_tokens == 80 + 9 + (20 - 9 - 1)
        assert report.ttft.p50 == pytest.approx(0.0092)

    def test_one_that_joins_serves(self, open_fleet, request_at):
        fleet = open_fleet(1)
        fleet.at(1.0, fleet.add_engine)
        fleet.run([request_at(2.0, n, shared=n) for n in range(2)])
        assert [engine.device.num_steps for engine in fleet.engines.values()] == [4, 4]

    def test_without_any_requests_wait_for_one(self, open_fleet, request_at):
        fleet = open_fleet(1)
        fleet.at(1.0, lambda: fleet.lose_engine(0))
        assert fleet.run([request_at(2.0, 0)]).unfinished == 1
        fleet.at(5.0, fleet.add_engine)
        report = fleet.run([request_at(6.0, 1)])
        assert (report.finished, report.unfinished) == (2, 0)
        assert report.ttft.p99 > 2.9

    def test_a_request_moves_once_another_engine_has_it(self, open_fleet, request_at):
        fleet = open_fleet(1)
        fleet.at(0.055, lambda: fleet.lose_engine(0))
        report = fleet.run([request_at(0, 0, output=20)])
        assert (report.moved, report.unfinished) == (0, 1)
        fleet.at(5.0, fleet.add_engine)
        report = fleet.run([request_at(6.0, 1)])
        assert (report.moved, report.finished) == (1, 2)


class TestPlugins:
    def test_a_balancer_by_its_class(self, open_fleet, request_at, seen):
        fleet = open_fleet(2, f"{__name__}:Watcher")
        fleet.run([request_at(n, n) for n in range(3)])
        assert len(seen) == 3
        assert fleet.engines[1].device.num_steps == 0
        assert fleet.decision_times().count == 3

    def test_the_faults_of_one_are_counted(self, open_fleet, request_at):
        report = open_fleet(2, f"{__name__}:Broken").run([request_at(n, n) for n in range(3)])
        assert report.finished == 3
        assert list(report.faults.values()) == [3]

    def test_policies_decide(self, open_fleet, request_at):
        """With one place to run in, the shorter of two waiting prompts comes first."""
        requests = [
            request_at(0.0, 0, output=8),
            request_at(0.01, 1, shared=1, length=600, output=8),
            request_at(0.02, 2, shared=2, output=8),
        ]
        means = {
            policy: open_fleet(1, scheduler={"policy": policy, "max_num_seqs": 1})
            .run(requests)
            .ttft.mean
            for policy in ("fcfs", "shortest_first")
        }
        assert means["shortest_first"] < means["fcfs"]

    @pytest.mark.parametrize(
        ("tables", "message"),
        [
            ({"kv_cache": {"num_blocks": None}}, "kv_cache.num_blocks: expected the number"),
            (
                {"scheduler": {"asynchronous": True}},
                "scheduler.asynchronous: expected False",
            ),
            ({"speculation": {"use": ["ngram"]}}, r"speculation.use: expected \[\], .* got \['ngr"),
            ({"scheduler": {"max_num_seqs": "x"}}, "scheduler.max_num_seqs: expected a whole"),
            ({"scheduler": {"max_num_seqs": 0}}, "scheduler.max_num_seqs: expected a whole number"),
            ({"step_cost": StepCost()}, "step_cost.is_trained: expected true"),
            ({"step_cost": StepCost(is_trained=True)}, "step_cost.step: expected milliseconds > 0"),
        ],
    )
    def test_settings_that_cannot_be_simulated(self, open_fleet, tables, message):
        with pytest.raises(ConfigError, match=message):
            open_fleet(2, **tables)

    def test_a_balancer_that_is_not_there(self, open_fleet):
        with pytest.raises(PluginNotFoundError, match="mine"):
            open_fleet(2, "mine")

    def test_a_file_is_a_configuration(self, tmp_path, cost):
        file = tmp_path / "fleet.toml"
        file.write_text("[parallel]\ndata = 3\n[kv_cache]\nnum_blocks = 16\n")
        fleet = Fleet(file, step_cost=cost)
        assert list(fleet.engines) == [0, 1, 2]
        fleet.close()
