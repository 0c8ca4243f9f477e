"""Scheduling as users of an engine meet it: timeouts, tags, overload, policies, reasons."""

from __future__ import annotations

import gc
import signal
from contextlib import closing

import pytest
from support.driving import run
from support.internals import core_of, scheduler_of

from hardpoint import (
    ConfigError,
    OverloadedError,
    PluginError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.configuration.loading import config_from
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.errors import PluginFaultError
from hardpoint.host.live.settings import Settings, with_policy
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineCoreRequest, SchedulingPolicy, WaitingFor, hookimpl
from hardpoint.testing import ScriptedClock, scripted_config, scripted_engine

HERE = "support.plugins.faulty"
ENDLESS = SamplingParams(
    temperature=0, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)


def finish(engine) -> list:
    """Run to the end; return the last outputs in the order in which they came."""
    finals = []
    while engine.has_unfinished_requests():
        finals += [output for output in engine.step() if output.finished]
    return finals


def order(engine) -> list[str]:
    return [output.request_id for output in finish(engine)]


class TestTimeouts:
    def test_a_running_request_keeps_what_it_has(self, open_engine):
        clock = ScriptedClock()
        engine = open_engine(clock=clock)
        engine.add_request("late", [1] * 5, ENDLESS, RequestExtras(timeout=2.0))
        engine.add_request("free", [1] * 5, ENDLESS)
        for _ in range(3):
            assert engine.step() == []
        clock.advance(2.0)
        (output,) = engine.step()
        assert output.request_id == "late"
        assert output.outputs[0].finish_reason == "timeout"
        assert len(output.outputs[0].token_ids) == 3
        (rest,) = finish(engine)
        assert rest.outputs[0].token_ids[:3] == output.outputs[0].token_ids

    def test_a_waiting_request_ends_without_a_token(self, open_engine):
        clock = ScriptedClock()
        engine = open_engine({"scheduler": {"max_num_seqs": 1}}, clock=clock)
        engine.add_request("runs", [1] * 5, ENDLESS)
        engine.add_request("waits", [1] * 5, ENDLESS, RequestExtras(timeout=1.5))
        engine.step()
        clock.advance(1.6)
        (output,) = engine.step()
        assert output.request_id == "waits"
        assert output.outputs[0].finish_reason == "timeout"
        assert output.outputs[0].token_ids == []
        finish(engine)
        assert scheduler_of(engine).stats().kv_cache_usage == 0

    @pytest.mark.parametrize("hours", [-1000, 1000])
    def test_the_clock_of_the_client_does_not_matter(self, open_engine, hours):
        clock = ScriptedClock(now=1000.0)
        engine = open_engine({"stats": {"request_metrics": True}}, clock=clock)
        elsewhere = 1000.0 + 3600 * hours
        engine.add_request(
            "late", [1] * 5, ENDLESS, RequestExtras(timeout=2.0, arrival_time=elsewhere)
        )
        made = EngineCoreRequest(
            request_id="made",
            prompt_token_ids=[1],
            params=ENDLESS,
            timeout=2.0,
            arrival_time=elsewhere,
        )
        engine.add_request("made", made)
        clock.advance(1.9)
        assert engine.step() == []
        clock.advance(0.1)
        outputs = {output.request_id: output.outputs[0] for output in engine.step()}
        assert sorted(outputs) == ["late", "made"]
        for output in outputs.values():
            assert output.finish_reason == "timeout"
            assert output.metrics.time_to_first_token > 1.8  # never negative
            assert output.metrics.queue_seconds == pytest.approx(1.9)

    def test_time_that_tokenizing_takes_counts(self, open_engine, monkeypatch):
        clock = ScriptedClock()
        engine = open_engine(clock=clock)
        encode = engine.parts.tokenizer.encode

        def slow(text, **options):
            clock.advance(1.5)
            return encode(text, **options)

        monkeypatch.setattr(engine.parts.tokenizer, "encode", slow)
        engine.add_request("too late", "x", ENDLESS, RequestExtras(timeout=1.0))
        assert [output.request_id for output in engine.step()] == ["too late"]
        engine.add_request("late", "x", ENDLESS, RequestExtras(timeout=2.0))
        clock.advance(0.4)
        assert engine.step() == []
        clock.advance(0.2)
        assert [output.request_id for output in engine.step()] == ["late"]

    @pytest.mark.parametrize("timeout", [0, -1, "soon", float("nan")])
    def test_what_is_no_time_is_refused(self, open_engine, timeout):
        engine = open_engine()
        with pytest.raises(RequestError, match="timeout: expected a (number > 0|finite)"):
            engine.add_request("r", "x", ENDLESS, RequestExtras(timeout=timeout))
        assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_first", "fair"])
def test_a_client_cannot_jump_the_queue_by_its_arrival_time(open_engine, policy):
    engine = open_engine({"scheduler": {"max_num_seqs": 1, "policy": policy}})
    for name, arrived in (("a", None), ("b", 9e9), ("c", None), ("d", 1.0)):
        engine.add_request(name, "x", ENDLESS, RequestExtras(arrival_time=arrived))
    assert order(engine) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tags": {"tenant": 5}}, "tags.tenant: expected a string, got 5"),
        ({"tags": "acme"}, "tags: expected a table, got 'acme'"),
        ({"priority": 1.5}, "priority: expected a whole number, got 1.5"),
        ({"cache_salt": ""}, "cache_salt: expected a string of length >= 1"),
    ],
)
def test_wrong_extras_are_refused(open_engine, fields, message):
    engine = open_engine()
    with pytest.raises(RequestError) as error:
        engine.add_request("r", "x", ENDLESS, RequestExtras(**fields))
    assert str(error.value).startswith(message)


def test_a_full_queue_refuses_requests_and_takes_them_again(open_engine):
    engine = open_engine({"scheduler": {"max_num_seqs": 1, "max_waiting": 2}})
    engine.add_request("a", "x", ENDLESS)
    engine.step()
    engine.add_request("b", "x", ENDLESS)
    engine.add_request("c", "x", ENDLESS)
    with pytest.raises(OverloadedError) as error:
        engine.add_request("d", "x", ENDLESS)
    assert str(error.value) == (
        "overloaded: 2 requests are waiting, the maximum (scheduler.max_waiting); try again later"
    )
    many = SamplingParams(n=3, max_tokens=2)
    with pytest.raises(OverloadedError):
        engine.add_request("e", "x", many)
    engine.abort_requests(["b", "c"])
    with pytest.raises(OverloadedError):
        engine.add_request("e", "x", many)  # the third completion is one too many: none runs
    engine.add_request("d", "x", ENDLESS)
    assert order(engine) == ["a", "d"]


class TestReasons:
    def test_why_a_request_waits(self, open_engine):
        engine = open_engine({"scheduler": {"max_num_seqs": 1}})
        for name in "abc":
            engine.add_request(name, "x", ENDLESS)
        assert engine.why_waiting("a")[0].waiting_for is WaitingFor.NEXT_STEP
        engine.step()
        assert engine.why_waiting("a") == {0: None}
        slot = engine.why_waiting("b")[0]
        assert slot.waiting_for is WaitingFor.SLOT
        assert slot.message == "1 request is running, the maximum (max_num_seqs)"
        behind = engine.why_waiting("c")[0]
        assert (behind.waiting_for, behind.ahead) == (WaitingFor.BEHIND, 1)
        assert behind.message == "1 request is ahead of it"
        engine.abort_requests(["b"])
        with pytest.raises(RequestError, match="request_id: 'b' is not a live request"):
            engine.why_waiting("b")

    def test_blocks_and_their_numbers(self, open_engine):
        engine = open_engine(
            {"max_model_len": 128, "kv_cache": {"num_blocks": 8, "prefix_caching": False}},
        )
        engine.add_request("a", [1] * 65, ENDLESS)
        engine.add_request("b", [1] * 65, ENDLESS)
        engine.step()
        reason = engine.why_waiting("b")[0]
        assert reason.waiting_for is WaitingFor.BLOCKS
        assert (reason.needed, reason.available) == (5, 2)
        assert reason.message == (
            "it needs up to 5 KV blocks, 3 are free, 1 of them reserved for running requests"
        )


class Watcher:
    """Takes step records."""

    contract = 1
    records: list = []

    @hookimpl
    def step_planned(self, record):
        self.records.append(record)
        if record.step == 3:
            raise ValueError("cannot watch")


def test_step_records_reach_hooks_whose_faults_end_nothing(open_engine):
    Watcher.records = []
    config = {"plugins": {"enable": [f"{__name__}:Watcher"]}}
    engine = open_engine(config | {"engine": {"random_request_ids": False}})
    results = run(engine, [("a", "say abc", ENDLESS), ("b", "emoji", ENDLESS)])
    assert set(results) == {"a", "b"}
    first = Watcher.records[0]
    assert first.scheduled == {"a": 7, "b": 5}
    assert (list(first.new), first.num_running, first.num_waiting) == (["a", "b"], 2, 0)
    assert Watcher.records[-1].step > 50
    fallback = engine.health().fallbacks["step_planned"]
    assert fallback.count == 1
    assert "plugin 'watcher'" in fallback.message
    assert "ValueError: cannot watch" in fallback.message
    assert engine.health().ok


class TestPolicies:
    @pytest.mark.parametrize("policy", ["fcfs", "fair", "shortest_first"])
    def test_a_priority_that_is_ignored_is_logged_once(self, policy, open_engine, caplog):
        engine = open_engine({"scheduler": {"policy": policy}})
        engine.add_request("plain", "x", ENDLESS)
        assert not caplog.records
        for name in ("a", "b"):
            engine.add_request(name, "x", ENDLESS, RequestExtras(priority=-1))
        assert [record.getMessage() for record in caplog.records] == [
            f'priority: the scheduling policy "{policy}" ignores it; scheduler.policy = "priority" '
            "orders by it"
        ]
        engine.set_policy("priority")
        engine.set_policy(policy)
        engine.add_request("again", "x", ENDLESS, RequestExtras(priority=-1))
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("policy", ["priority", f"{HERE}:BadPolicy"])
    def test_a_policy_that_may_look_at_priorities_gives_no_warning(
        self, policy, open_engine, caplog
    ):
        engine = open_engine({"scheduler": {"policy": policy}})
        engine.add_request("a", "x", ENDLESS, RequestExtras(priority=-1))
        assert not caplog.records

    def test_a_policy_that_raises_leaves_the_decision_to_fcfs(self, open_engine, caplog):
        engine = open_engine({"scheduler": {"policy": f"{HERE}:BadPolicy", "max_num_seqs": 1}})
        for name in ("a", "b", "c"):
            engine.add_request(name, "x", ENDLESS)
        assert order(engine) == ["a", "b", "c"]
        fallback = engine.health().fallbacks["bad_policy"]
        assert fallback.count >= 3
        assert "plugin 'bad_policy'" in fallback.message
        assert "ZeroDivisionError: division by zero" in fallback.message
        assert sum("bad_policy" in record.getMessage() for record in caplog.records) == 1

    def test_on_error_engine_ends_the_engine(self, open_engine):
        engine = open_engine(
            {
                "scheduler": {"policy": f"{HERE}:BadPolicy"},
                "plugins": {"on_error": {"bad_policy": "engine"}},
            },
        )
        with pytest.raises(PluginFaultError, match="plugin 'bad_policy'.*ZeroDivisionError"):
            engine.add_request("a", "x", ENDLESS)

    def test_a_scope_that_a_policy_cannot_have(self, scripted):
        with pytest.raises(ConfigError) as error:
            scripted_engine(scripted, {"plugins": {"on_error": {"fcfs": "request"}}})
        assert str(error.value) == (
            'plugins.on_error.fcfs: expected "step" or "engine", got "request" (from default)'
        )

    def test_the_engine_is_never_idle_for_a_policy(self, open_engine):
        engine = open_engine({"scheduler": {"policy": f"{__name__}:Never"}})
        for name in ("a", "b"):
            engine.add_request(name, "x", ENDLESS)
        engine.step()
        reason = engine.why_waiting("b")[0]
        assert reason.waiting_for is WaitingFor.POLICY
        assert reason.message == "the scheduling policy holds it back: not today"
        assert order(engine) == ["a", "b"]
        fallback = engine.health().fallbacks["never"]
        assert fallback.count == 2
        assert "admit() held back every waiting request while nothing ran" in fallback.message


class Never(SchedulingPolicy):
    """Admits nobody."""

    contract = 1

    def key(self, request):
        return request.arrival_time

    def admit(self, request, load):
        return "not today"


class LastFirst(SchedulingPolicy):
    """Latest arrival first; counts what it was told."""

    contract = 1
    state_format = "last-first"

    class Options(SchedulingPolicy.Options):
        sign: int = -1

    def __init__(self, context):
        super().__init__(context)
        self.added_ids = []
        self.inherited = None

    def key(self, request):
        return self.options.sign * request.arrival_time

    def added(self, request):
        self.added_ids.append(request.source.external_req_id)

    def export_state(self):
        return list(self.added_ids)

    def import_state(self, state):
        if self.options.sign == 0:
            raise ValueError("no such books")
        self.inherited = state


class TestLiveSwap:
    def engine(self, scripted):
        engine = scripted_engine(scripted, {"scheduler": {"max_num_seqs": 1}})
        for name in "abcd":
            engine.add_request(name, "x", ENDLESS)
        engine.step()
        return engine

    def test_those_who_wait_get_the_new_order_and_nobody_is_lost(self, scripted):
        engine = self.engine(scripted)
        expected = {o.request_id: o.outputs[0].token_ids for o in finish(self.engine(scripted))}
        manifest = engine.set_policy(f"{__name__}:LastFirst")
        assert manifest.generation == 2
        assert engine.parts.plugins.manifest == manifest
        assert engine.parts.config.scheduler.policy == f"{__name__}:LastFirst"
        finals = finish(engine)
        assert [o.request_id for o in finals] == ["a", "d", "c", "b"]
        assert {o.request_id: o.outputs[0].token_ids for o in finals} == expected
        engine.close()

    def test_options_are_checked_and_books_are_handed_over(self, scripted):
        engine = self.engine(scripted)
        engine.set_policy(f"{__name__}:LastFirst")
        with pytest.raises(
            ConfigError, match=r"^plugin\.last_first\.sgn: unknown .*\(from set_policy\(\)\)$"
        ):
            engine.set_policy(f"{__name__}:LastFirst", {"sgn": 1})
        engine.set_policy(f"{__name__}:LastFirst", {"sign": 1})
        policy = core_of(engine)._parts.policy.policy.wrapped
        assert policy.inherited == ["a", "b", "c", "d"]
        assert order(engine) == ["a", "b", "c", "d"]
        engine.close()

    def test_a_file_that_configured_the_old_policy_is_not_blamed(self, scripted):
        extra = {"scheduler": {"policy": "fair"}, "plugin": {"fair": {"tag": "team"}}}
        config = config_from(scripted_config(scripted, extra))
        assert config[1].of("plugin.fair.tag") == "argument LLM(config=...)"
        before = Settings(*config, resolve_plugins(*config))
        changed = with_policy(before, "fair", {"tag": "tenant"}, "set_policy()")
        assert changed.config.plugin == {"fair": {"tag": "tenant"}}
        with pytest.raises(ConfigError, match=r"^plugin\.fair\.tag: .* \(from set_policy\(\)\)$"):
            with_policy(before, "fair", {"tag": 7}, "set_policy()")

    @pytest.mark.parametrize(
        ("use", "options", "error", "words"),
        [
            ("fcsf", {}, PluginError, "did you mean 'fcfs'"),
            ("uniproc", {}, PluginError, "uniproc"),
            (
                "fair",
                {"weights": {"a": -1}},
                ConfigError,
                "fair.weights.a: expected a number > 0, got -1",
            ),
            (
                f"{__name__}:LastFirst",
                {"sign": 0},
                PluginFaultError,
                r"plugin 'last_first' .*: import_state\(\) failed: ValueError: no such books",
            ),
        ],
    )
    def test_a_swap_that_fails_changes_nothing(self, scripted, use, options, error, words):
        engine = self.engine(scripted)
        engine.set_policy(f"{__name__}:LastFirst")
        before = engine.parts.plugins.manifest
        with pytest.raises(error, match=words):
            engine.set_policy(use, options)
        assert engine.parts.plugins.manifest == before
        assert order(engine) == ["a", "d", "c", "b"]
        engine.close()

    def test_every_built_in_policy_can_follow_every_other(self, scripted):
        engine = self.engine(scripted)
        names = ["fair", "priority", "shortest_first", "fcfs", "fair"]
        for generation, name in enumerate(names, 2):
            assert engine.set_policy(name).generation == generation
            engine.step()
        assert order(engine) == ["a", "b", "c", "d"]
        assert engine.health().fallbacks == {}
        engine.close()


def first_token_steps(scripted, policy) -> dict[str, list[int]]:
    """Steps from arrival to the first token, by tenant; one sends ten times what the other does."""
    engine = scripted_engine(
        scripted,
        {
            "scheduler": {"policy": policy, "max_num_seqs": 4},
            "kv_cache": {"prefix_caching": False},
        },
    )
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    came, waits, step = {}, {"big": [], "small": []}, 0
    arrivals = [(0, "big")] * 200 + [(10 * i, "small") for i in range(20)]
    while arrivals or engine.has_unfinished_requests():
        for due, tenant in [each for each in arrivals if each[0] <= step]:
            request_id = f"{tenant}-{len(came)}"
            came[request_id] = due
            extras = RequestExtras(tags={"tenant": tenant})
            engine.add_request(request_id, [len(came) % 250] * 20, params, extras)
        arrivals = [each for each in arrivals if each[0] > step]
        step += 1
        for output in engine.step():
            if (due := came.pop(output.request_id, None)) is not None:
                waits[output.request_id.partition("-")[0]].append(step - due)
                came[output.request_id] = None
    assert engine.health().fallbacks == {}
    engine.close()
    return waits


@pytest.mark.nightly
def test_a_small_tenant_is_served_soon_beside_a_big_one(scripted):
    """p95 of the time to the first token under `fair` is at most a fifth of that under `fcfs`."""
    unfair, fair = first_token_steps(scripted, "fcfs"), first_token_steps(scripted, "fair")
    p95 = {name: sorted(each["small"])[18] for name, each in (("fcfs", unfair), ("fair", fair))}
    assert p95["fair"] <= p95["fcfs"] / 5
    assert len(fair["big"]) == len(unfair["big"]) == 200


class TestPrefixCache:
    def test_reset_while_requests_run(self, open_engine):
        engine = open_engine()
        expected = run(engine, [("a", [7] * 50, ENDLESS)])["a"]
        engine.add_request("b", [7] * 50, ENDLESS)
        for _ in range(5):
            engine.step()
        engine.call_utility("reset_prefix_cache")
        hits = engine.call_utility("scheduler_stats").prefix_cache.hit_tokens
        assert hits == 48
        assert run(engine, [("c", [7] * 50, ENDLESS)])["c"] == expected
        assert (
            engine.call_utility("scheduler_stats").prefix_cache.hit_tokens == hits
        )  # "b" stored nothing more

    def test_reset_that_recomputes_what_runs(self, open_engine):
        engine = open_engine()
        expected = run(engine, [("a", [7] * 50, ENDLESS)])["a"]
        engine.add_request("b", [7] * 50, ENDLESS)
        for _ in range(5):
            engine.step()
        engine.call_utility("reset_prefix_cache", True)
        assert engine.call_utility("scheduler_stats").num_running == 0
        finals = finish(engine)
        assert finals[0].outputs[0].token_ids == expected[0][0][1]
        assert engine.call_utility("scheduler_stats").num_preemptions == 1

    def test_prompt_logprobs_are_the_same_with_a_warm_cache(self, open_engine):
        engine = open_engine()
        params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
        for name in ("cold", "warm"):
            engine.add_request(name, [9] * 40, params)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {o.request_id: o for o in engine.step()}
        assert outputs["cold"].prompt_logprobs == outputs["warm"].prompt_logprobs
        assert len(outputs["warm"].prompt_logprobs) == 40


def test_an_interrupted_step_loses_nothing_that_follows(open_engine):
    """An error between plan and result: the batch is computed anew, finished ids are told again."""
    engine = open_engine()
    expected = run(engine, [("again", [3] * 40, ENDLESS)])
    core = core_of(engine)
    execute = core._executor.execute_model
    engine.add_request("a", [3] * 40, ENDLESS)
    engine.step()

    core._executor.execute_model = lambda _plan: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    core._executor.execute_model = execute
    assert not engine.has_unfinished_requests()
    assert run(engine, [("again", [3] * 40, ENDLESS)]) == expected
    assert engine.call_utility("scheduler_stats").kv_cache_usage == 0


def test_a_request_that_waits_has_few_objects_for_the_garbage_collector_to_visit(scripted):
    def tracked() -> int:
        gc.collect()
        return len(gc.get_objects())

    params = SamplingParams(temperature=0.0)
    with closing(scripted_engine(scripted)) as engine:
        for number in range(50):
            engine.add_request(str(number), "hello", params)
        before = tracked()
        for number in range(50, 250):
            engine.add_request(str(number), "hello", params)
        # Ten each; a thread that an earlier test has left may make a few in the meantime.
        assert tracked() - before < 200 * 10 + 50
