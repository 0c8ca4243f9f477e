"""Live changes of an engine in this process: what changes, what does not, and who is told."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest
from support.plugins.changing import Pick, Twice, token_of
from support.waiting import PATIENCE_S, call_interrupted, wait_until

from hardpoint import LLM, SamplingParams
from hardpoint.errors import (
    BusyError,
    ConfigError,
    HardpointError,
    PluginFaultError,
    PluginLoadError,
    PluginNotFoundError,
    RequestError,
)
from hardpoint.host.live.change import Changes
from hardpoint.testing import scripted_config

MODULE = "support.plugins.changing"


@pytest.fixture
def opened(scripted):
    """Return a function that opens an LLM on the scripted model."""
    llms = []

    def open_llm(extra=None):
        llms.append(LLM(config=scripted_config(scripted, extra or {})))
        return llms[-1]

    yield open_llm
    for llm in llms:
        llm.close()


@pytest.fixture
def llm(opened):
    return opened()


class Waits(Pick):
    """Is built once it may go on."""

    contract = 1
    begun, go = threading.Event(), threading.Event()

    def __init__(self, context):
        super().__init__(context)
        self.begun.set()
        self.go.wait(PATIENCE_S)


@pytest.fixture
def waits():
    Waits.begun.clear()
    Waits.go.clear()
    yield Waits
    Waits.go.set()


def picked(llm, step=1, name="pick", tokens=4):
    """Return the tokens that a processor forces."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, plugin_args={name: {"step": step}})
    (output,) = llm.generate("a", params)
    return output.outputs[0].token_ids


def forced(delta, step=1, factor=1, tokens=4):
    return [token_of(delta, step, position, factor) for position in range(tokens)]


class TestSettings:
    def test_a_limit_of_the_scheduler(self, llm):
        assert llm.engines.set_config({"scheduler.max_waiting": 1}).generation == 2
        assert llm.config.scheduler.max_waiting == 1
        engine = llm.llm_engine
        engine.add_request("1", "a", SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match=r"overloaded: 1 requests are waiting"):
            engine.add_request("2", "a", SamplingParams(max_tokens=2))
        llm.engines.set_config({"scheduler.max_waiting": None})
        engine.add_request("4", "a", SamplingParams(max_tokens=2))

    def test_each_has_value_origin_and_scope(self, llm):
        before = llm.engines.settings()
        llm.engines.set_config({"engine.stream_interval": 3})
        after = llm.engines.settings()
        assert before.fingerprint != after.fingerprint
        setting = after.values["engine.stream_interval"]
        assert (setting.value, setting.change) == (3, "live")
        assert setting.origin == "engines.set_config()"
        assert after.values["model"].change == "restart"
        assert after.generation == before.generation + 1 == llm.plugins.manifest.generation

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (
                {"scheduler.max_num_seqs": 2},
                r"max_num_seqs: it cannot be changed .*restart",
            ),
            (
                {"scheduler.max_wating": 2},
                r"max_wating: there is no such setting .did you",
            ),
            ({"scheduler.max_waiting": 0}, r"scheduler\.max_waiting: expected .*>= 1"),
            (
                {"scheduler.policy": "fsfc"},
                r"policy: no scheduling_pol.*from engines.set_config",
            ),
            ({"plugin.pick.delta": 1}, r"plugin\.pick"),
            ({"stats.sinks": ["log"]}, r"stats\.sinks: this engine gathers no statistics"),
            ("scheduler", r"config: expected"),
        ],
        ids=["restart", "unknown", "value", "name", "no plugin", "no statistics", "no table"],
    )
    def test_a_wrong_change_names_what_is_wrong(self, llm, values, words):
        before = llm.engines.settings()
        with pytest.raises(HardpointError, match=words):
            llm.engines.set_config(values)
        assert llm.engines.settings() == before

    def test_a_policy_and_its_options(self, llm):
        llm.engines.set_config({"scheduler.policy": "fair", "plugin.fair.tag": "team"})
        assert llm.config.plugin == {"fair": {"tag": "team"}}
        llm.engines.set_config({"scheduler.policy": "priority"})
        assert llm.config.plugin == {}  # the options went with the policy
        with pytest.raises(ConfigError, match=r"^plugin\.fair"):
            llm.engines.set_config({"plugin.fair.tag": "team"})

    def test_sinks(self, opened):
        llm = opened({"stats": {"sinks": ["log"]}})
        llm.engines.set_config({"stats.sinks": ["log", "prometheus"]})
        llm.generate("a", SamplingParams(max_tokens=2))
        assert "hardpoint" in llm.metrics()
        llm.engines.set_config({"stats.sinks": ["log"]})
        assert llm.metrics() == ""


class TestPlugins:
    def test_enable_replace_options_disable(self, llm):
        llm.plugins.change(enable=[Pick])
        assert picked(llm) == forced(0)
        llm.plugins.change(options={"pick": {"delta": 5}})
        assert picked(llm) == forced(5)
        llm.plugins.change(replace={"pick": Twice}, options={"pick": {"delta": 7}})
        assert picked(llm) == forced(7, factor=2)
        manifest = llm.plugins.change(disable=["pick"])
        assert manifest.generation == 5
        with pytest.raises(
            RequestError, match=r"^plugin_args\.pick: .*'pick' was switched off .*generation 4"
        ):
            picked(llm)
        llm.plugins.change(enable=[Pick])
        assert picked(llm) == forced(0)  # the options went with it

    def test_one_of_two_uses_of_a_class(self, llm):
        fqcn = f"{MODULE}:Pick"
        llm.plugins.change(enable=[fqcn, {"use": fqcn, "name": "second"}])

        def on():
            entries = llm.plugins.manifest.entries
            return {e.name: e.value for e in entries if e.value.startswith(MODULE)}

        llm.plugins.change(replace={"second": Twice})
        assert on() == {"pick": fqcn, "second": f"{MODULE}:Twice"}
        llm.plugins.change(replace={"second": Pick})
        llm.plugins.disable("second")
        assert on() == {"pick": fqcn}
        llm.plugins.enable({"use": fqcn, "name": "second"})
        llm.plugins.disable("pick")
        assert on() == {"second": fqcn}

    @pytest.mark.parametrize("name", ["min_p", "logits_processors/min_p"])
    @pytest.mark.parametrize("use", ["name", "path", "class", "table"])
    def test_a_disabled_plugin_is_enabled_again(self, llm, name, use):
        entry = next(e for e in llm.plugins.manifest.entries if e.name == "min_p")
        uses = {"name": entry.name, "path": entry.path, "class": entry.value}
        llm.plugins.disable(name)
        manifest = llm.plugins.enable(uses.get(use, {"use": entry.value, "name": "min_p"}))
        assert "min_p" in {e.name for e in manifest.entries}

    def test_a_batch_level_one_joins_a_running_batch(self, llm):
        engine = llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        for index in range(3):
            engine.add_request(f"plain {index}", "a", params)
        engine.step()
        llm.plugins.change(enable=[f"{MODULE}:Rows"], options={"rows": {"delta": 3}})
        own = msgspec.structs.replace(params, plugin_args={"rows": {"step": 2}})
        engine.add_request("own", "a", own)
        engine.step()
        llm.plugins.change(options={"rows": {"delta": 9}})
        engine.add_request("next", "a", own)
        found = run(engine)
        assert found["own"] == forced(3, 2, tokens=6)
        assert found["next"] == forced(9, 2, tokens=6)
        assert found["plain 0"] == llm.generate("a", params)[0].outputs[0].token_ids

    def test_live_requests_finish_with_theirs(self, llm):
        engine = llm.llm_engine
        llm.plugins.change(enable=[Pick], options={"pick": {"delta": 1}})
        params = SamplingParams(max_tokens=5, ignore_eos=True, plugin_args={"pick": {"step": 1}})
        engine.add_request("old", "a", params)
        engine.step()
        llm.plugins.change(options={"pick": {"delta": 2}})
        engine.add_request("new", "a", params)
        engine.step()
        llm.plugins.change(disable=["pick"])
        assert run(engine) == {"old": forced(1, tokens=5), "new": forced(2, tokens=5)}

    def test_live_requests_end_by_choice(self, llm):
        engine = llm.llm_engine
        llm.plugins.change(enable=[Pick])
        params = SamplingParams(max_tokens=5, ignore_eos=True, plugin_args={"pick": {"step": 1}})
        engine.add_request("old", "a", params)
        engine.add_request("plain", "a", SamplingParams(max_tokens=5, ignore_eos=True))
        engine.step()
        llm.plugins.change(disable=["pick"], running="end")
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {one.request_id: one.outputs[0] for one in engine.step()}
        assert outputs["old"].finish_reason == "abort"
        assert outputs["plain"].finish_reason == "length"

    def test_what_no_request_uses_is_closed(self, llm, monkeypatch):
        closed = []
        monkeypatch.setattr(Pick, "close", lambda self: closed.append(self.options.delta))
        llm.plugins.change(enable=[Pick], options={"pick": {"delta": 1}})
        engine = llm.llm_engine
        params = SamplingParams(max_tokens=3, ignore_eos=True, plugin_args={"pick": {"step": 1}})
        engine.add_request("old", "a", params)
        engine.step()
        llm.plugins.change(options={"pick": {"delta": 2}})
        assert closed == []
        run(engine)
        llm.engines.set_config({"scheduler.max_waiting": 5})
        assert closed == [1]

    def test_states(self, llm):
        llm.plugins.change(enable=[Pick], options={"pick": {"delta": 4}})
        assert llm.plugins.states()["pick"] == {"delta": 4}

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            (lambda _: {"a": "x" * 5000}, "at most 4096 bytes"),
            (lambda _: 7, "expected a mapping, got int"),
            (lambda _: {"a": object()}, "its dump_state failed"),
            (lambda _: 1 / 0, "ZeroDivisionError"),
        ],
        ids=["long", "number", "object", "error"],
    )
    def test_a_state_that_fails_hurts_nothing(self, llm, monkeypatch, state, words):
        monkeypatch.setattr(Pick, "dump_state", state)
        llm.plugins.change(enable=[Pick])
        assert words in llm.plugins.states()["pick"]["error"]

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"enable": [f"{MODULE}:Breaks"]}, PluginLoadError, "'breaks' .*it breaks"),
            ({"enable": ["nothing"]}, PluginNotFoundError, "called 'nothing'"),
            ({"disable": ["pikc"]}, PluginNotFoundError, r"disable: no component .*pikc"),
            ({"disable": ["fcfs"]}, ConfigError, r"disable: 'fcfs' .*scheduler\.policy chooses"),
            (
                {"replace": {"uniproc": "multiproc"}},
                ConfigError,
                r"executor\.use: it cannot be changed .*restart",
            ),
            ({"options": {"min_p": {"x": 1}}}, ConfigError, r"plugin\.min_p\.x: unknown"),
            ({"running": "stop"}, ConfigError, "running: expected"),
        ],
        ids=["broken", "unknown", "disable", "chosen", "restart", "option", "running"],
    )
    def test_a_wrong_change_names_the_plugin(self, llm, change, error, words):
        before = llm.plugins.manifest
        with pytest.raises(error, match=words):
            llm.plugins.change(**change)
        assert llm.plugins.manifest == before
        llm.plugins.change(enable=[Pick])
        assert picked(llm) == forced(0)


class TestUndo:
    def test_a_failed_commit_leaves_all_as_it_was(self, llm):
        """The new policy does not take the state over, when the rest is committed already."""
        llm.plugins.change(enable=[Pick], options={"pick": {"delta": 1}})
        llm.plugins.set_policy(f"{MODULE}:Keeper")
        before = llm.engines.settings()
        with pytest.raises(PluginFaultError, match=r"import_state\(\) failed: .*takes no state"):
            llm.plugins.change(
                options={"pick": {"delta": 2}}, config={"scheduler.policy": f"{MODULE}:Refusing"}
            )
        assert llm.engines.settings() == before
        assert picked(llm) == forced(1)

    @pytest.mark.parametrize("action", ["prepare", "state", "commit"])
    def test_workers_that_fail(self, opened, action):
        llm = opened(
            {
                "executor": {"use": f"{MODULE}:FailingCalls"},
                "plugin": {"failing_calls": {"action": action}},
                "plugins": {"enable": [f"{MODULE}:Pick"]},
            }
        )
        engine = llm.llm_engine
        params = SamplingParams(max_tokens=6, ignore_eos=True, plugin_args={"pick": {"step": 1}})
        engine.add_request("old", "a", params)
        engine.step()
        before = llm.engines.settings()
        with pytest.raises(HardpointError, match=f"the workers fail to {action}"):
            llm.plugins.change(
                options={"pick": {"delta": 2}},
                config={"scheduler.policy": "fair", "scheduler.max_waiting": 1},
            )
        assert llm.engines.settings() == before
        engine.add_request("new", "a", params)
        engine.add_request("more", "a", params)
        expected = forced(0, tokens=6)
        assert run(engine) == {"old": expected, "new": expected, "more": expected}

    def test_one_that_takes_too_long(self, opened, waits, monkeypatch):
        llm = opened({"plugins": {"change_seconds": 7.5}})
        clock = SimpleNamespace(monotonic=itertools.count(step=8).__next__)
        with monkeypatch.context() as patch:
            patch.setattr("hardpoint.host.live.driver.time", clock)
            late = r"by (the engine, )?worker 0(, the frontend)?; nothing has changed$"
            with pytest.raises(HardpointError, match=rf"not prepared within 7\.5 s .* {late}"):
                llm.plugins.change(enable=[waits])
        waits.go.set()
        llm.plugins.change(enable=[Pick])
        assert picked(llm) == forced(0)

    def test_an_interrupt_undoes_it(self, llm, waits, monkeypatch):
        """As of Ctrl-C, while the change is prepared: another one is possible afterwards."""

        def interrupted(seconds):
            monkeypatch.undo()
            raise KeyboardInterrupt

        clock = SimpleNamespace(sleep=interrupted)
        monkeypatch.setattr("hardpoint.core.frontend.llm_engine.time", clock)
        with pytest.raises(KeyboardInterrupt):
            llm.plugins.change(enable=[waits])
        waits.go.set()
        llm.plugins.change(enable=[Pick])
        assert picked(llm) == forced(0)

    def test_one_that_is_undone_when_its_thread_is_about_to_end(self, monkeypatch):
        prepared, go, undone = threading.Event(), threading.Event(), []

        class Lingering(threading.Thread):
            def run(self):
                super().run()
                prepared.set()
                go.wait(PATIENCE_S)

        monkeypatch.setattr("hardpoint.host.live.change.threading.Thread", Lingering)
        made = SimpleNamespace(undo=lambda: undone.append("once"))
        changes = Changes([SimpleNamespace(prepare=lambda *_: made)])
        changes.prepare(SimpleNamespace(), plugins=SimpleNamespace())
        assert prepared.wait(PATIENCE_S)
        changes.undo()
        go.set()
        assert undone == ["once"]

    def test_signals_do_not_make_one_appear_prepared(self):
        go, answers = threading.Event(), set()
        made = SimpleNamespace(undo=lambda: None)
        slot = SimpleNamespace(prepare=lambda *_: go.wait(PATIENCE_S) and made)
        changes = Changes([slot])
        changes.prepare(SimpleNamespace(), plugins=SimpleNamespace())
        call_interrupted(lambda: answers.add(changes.is_prepared()))
        assert answers == {False}
        go.set()
        wait_until(changes.is_prepared)
        changes.undo()

    def test_a_second_change_meanwhile_is_busy(self, llm, waits):
        with ThreadPoolExecutor() as pool:
            change = pool.submit(llm.plugins.change, enable=[waits])
            assert waits.begun.wait(PATIENCE_S)
            with pytest.raises(BusyError, match="another live change is under way"):
                llm.engines.set_config({"scheduler.max_waiting": 9})
            waits.go.set()
            change.result(PATIENCE_S)
        assert picked(llm, name="waits") == forced(0)


def run(engine):
    """Run all requests to their end; return their tokens by id."""
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output.outputs[0].token_ids
    return found
