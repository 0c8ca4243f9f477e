"""Whatever a plugin raises is its own fault, in its scope; a signal of the user is nobody's."""

from __future__ import annotations

import signal
import sys

import pytest
from support.driving import FINAL, run
from support.fault_cases import run_all
from support.plugins import raising
from support.plugins.raising import PanicException

from hardpoint import PluginError, RequestError, SamplingParams
from hardpoint.cli import main
from hardpoint.errors import EngineFaultError, PluginContractError, PluginLoadError
from hardpoint.plugins import Command, EvictionPolicy, SchedulingPolicy, hookimpl
from hardpoint.testing import scripted_engine

HERE = "support.plugins.raising"
GREEDY = {"temperature": 0.0, "max_tokens": 8, **FINAL}
TEXT = " abc abc"


def engine_with(open_engine, *enable, **config):
    enable = [f"{HERE}:{name}" for name in enable]
    return open_engine({"plugins": {"enable": enable}, **config})


def request(request_id, **fields):
    return (request_id, "say abc", SamplingParams(**GREEDY, **fields))


@pytest.mark.parametrize("where", ["start", "advance", "apply", "update_state"])
def test_a_panic_in_a_logits_processor_ends_its_request(open_engine, where):
    engine = engine_with(open_engine, "Logits", "Whole")
    name = "whole" if where == "update_state" else "logits"
    used = request("bad", plugin_args={name: {"where": where}})
    finals = run_all(engine, [used, request("good")])
    assert f"its {where} failed: PanicException: index" in finals["bad"].outputs[0].error
    assert finals["good"].outputs[0].text == TEXT


@pytest.mark.parametrize("process", [{}, {"in_process": False}], ids=["here", "own process"])
def test_a_failed_device_state_is_named_at_the_start(open_engine, process):
    with pytest.raises(PluginError, match=r"'no_state' .*its device_state failed: PanicExc"):
        engine_with(open_engine, "NoState", engine=process)


def test_a_failed_close_is_named_and_the_others_are_closed(open_engine):
    engine = engine_with(open_engine, "NoClose", "Closes")
    with pytest.raises(PluginError, match=r"'no_close' .*its close failed: PanicException: index"):
        engine.close()
    assert raising.CLOSED.pop() == "closes"


@pytest.mark.parametrize("where", ["Arguments", "prepare"])
def test_a_panic_of_the_frontends_part_refuses_the_request(open_engine, where):
    engine = engine_with(open_engine, "Logits")
    with pytest.raises(RequestError, match=rf"'logits'.*its {where} failed: PanicException: ind"):
        engine.add_request(*request("bad", plugin_args={"logits": {"where": where}}))
    assert run_all(engine, [request("good")])["good"].outputs[0].text == TEXT


def test_panics_of_scope_step_are_counted(open_engine):
    engine = engine_with(
        open_engine,
        "Hooks",
        max_model_len=64,
        scheduler={"policy": f"{HERE}:Policy"},
        kv_cache={"num_blocks": 4, "eviction": f"{HERE}:Eviction"},
        kv_events={"publishers": [f"{HERE}:Publisher"]},
        stats={"sinks": [f"{HERE}:Sink"]},
    )
    for times in range(3):
        long = [("long", [times] * 40, SamplingParams(**GREEDY))]
        assert run_all(engine, long)["long"].outputs[0].error is None
    assert run_all(engine, [request("good")])["good"].outputs[0].text == TEXT
    with pytest.raises(RequestError, match=r"plugin 'hooks'.*request_received failed: PanicExc"):
        engine.add_request(*request("received", seed=1))
    (finished,) = run_all(engine, [request("finished")])["finished"].outputs
    assert "its hook request_finished failed: PanicException: index" in finished.error
    fallbacks = engine.health().fallbacks
    engine.close()
    assert set(fallbacks) == {"policy", "eviction", "publisher", "sink", "step_planned"}
    assert all("PanicException: index out of bounds" in f.message for f in fallbacks.values())


def test_a_panic_at_the_start_names_the_plugin(scripted, open_engine, tmp_path, monkeypatch):
    with pytest.raises(PluginLoadError, match=r"'unbuildable'.*constructor failed: PanicExcept"):
        engine_with(open_engine, "Unbuildable")
    with pytest.raises(PluginError, match=r"'started'.*engine_started failed: PanicException"):
        engine_with(open_engine, "Started")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginLoadError, match=r"'x'.*its import failed: SystemExit: 0"):
        scripted_engine(scripted, {"plugins": {"enable": [{"use": "leaves:X", "name": "x"}]}})


def test_a_command_that_panics_is_named(folder):
    with pytest.raises(PanicException) as error:
        main(["--set", f'plugins.enable=["{HERE}:Oops"]', "oops"])
    assert "the command 'oops' of plugin 'oops'" in error.value.__notes__[0]


@pytest.mark.parametrize("error", [SystemExit(3), PanicException("boom"), GeneratorExit()])
def test_what_ends_the_engine_names_the_plugin(open_engine, monkeypatch, error):
    def broken(self, batch):
        raise error

    engine = engine_with(open_engine)
    model = sys.modules["hardpoint.testing.scripted"].ScriptedModel
    monkeypatch.setattr(model, "forward", broken)
    engine.add_request(*request("a"))
    with pytest.raises(EngineFaultError, match=rf"plugin '.*: {type(error).__name__}"):
        run(engine, [])


# Signals


def interrupting(kind):
    """Return a function that is interrupted, or pretends to be."""

    def by_signal(*_):
        signal.raise_signal(signal.SIGINT)

    def pretended(*_):
        raise KeyboardInterrupt

    def cleaned_up(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("after cleaning up") from None

    return {"signal": by_signal, "pretended": pretended, "cleaned up": cleaned_up}[kind]


@pytest.mark.parametrize("kind", ["signal", "cleaned up"])
def test_the_users_interrupt_passes_through_a_plugin(open_engine, monkeypatch, kind):
    monkeypatch.setattr(f"{HERE}.Logits.apply", interrupting(kind))
    engine = engine_with(open_engine, "Logits")
    engine.add_request(*request("a", plugin_args={"logits": {"where": ""}}))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert run_all(engine, [request("good")])["good"].outputs[0].text == TEXT
    assert engine.health().faults == {}


def test_an_interrupt_that_a_plugin_makes_up_is_its_fault(open_engine, monkeypatch):
    monkeypatch.setattr(f"{HERE}.Logits.apply", interrupting("pretended"))
    engine = engine_with(open_engine, "Logits")
    finals = run_all(
        engine, [request("bad", plugin_args={"logits": {"where": ""}}), request("good")]
    )
    assert "its apply failed: KeyboardInterrupt" in finals["bad"].outputs[0].error
    assert finals["good"].outputs[0].text == TEXT


def test_what_the_programs_own_signal_handler_raises_passes(open_engine, monkeypatch):
    def leave(*_):
        raise SystemExit("terminated")

    monkeypatch.setattr(f"{HERE}.Logits.apply", lambda *_: signal.raise_signal(signal.SIGTERM))
    engine = engine_with(open_engine, "Logits")
    engine.add_request(*request("a", plugin_args={"logits": {"where": ""}}))
    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit, match="terminated"):
            engine.step()
    finally:
        signal.signal(signal.SIGTERM, before)


# What plugins do besides raising


class FalseText(str):
    def __bool__(self):
        raise SystemExit("no truth")


class OddPolicy(SchedulingPolicy):
    contract = 1

    def key(self, request):
        return 0

    def admit(self, request, load):
        return FalseText("not now")


class Grabs(EvictionPolicy):
    contract = 1

    def released(self, blocks):
        blocks.clear()

    def taken(self, block_ids):
        block_ids.clear()

    dropped = taken

    def evict(self, count):
        return range(10**9, 10**9 + count)


class Yields:
    contract = 1

    @hookimpl
    def step_planned(self, record):
        yield


class Awaits:
    contract = 1

    @hookimpl
    async def request_finished(self, output):
        pass


def test_policies_that_change_or_answer_what_they_should_not_are_counted(open_engine):
    config = {
        "scheduler": {"policy": f"{__name__}:OddPolicy"},
        "kv_cache": {"num_blocks": 4, "eviction": f"{__name__}:Grabs"},
        "max_model_len": 64,
    }
    engine = open_engine(config)
    for times in range(4):
        long = ("long", [times] * 40, SamplingParams(**GREEDY))
        assert run_all(engine, [long])["long"].outputs[0].error is None
    assert set(engine.health().fallbacks) == {"odd_policy", "grabs"}


@pytest.mark.parametrize(
    ("name", "words"),
    [("Yields", "step_planned yields, and is no wrapper"), ("Awaits", "is an `async def`")],
)
def test_a_hook_whose_body_would_not_run_is_refused(scripted, name, words):
    with pytest.raises(PluginContractError, match=f"its hook .*{words}"):
        scripted_engine(scripted, {"plugins": {"enable": [f"{__name__}:{name}"]}})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"run": lambda *_: "text"}, "its command 'oops' returned 'text', expected an exit code"),
        ({"run": lambda *_: 10**9}, "returned 1000000000, expected an exit code from 0 to 255"),
        ({"name": "--model"}, "the name of its command: expected a letter or digit"),
        ({"name": 5}, "the name of its command 5: expected a string, got int"),
        ({"summary": "100% sure"}, ""),
    ],
)
def test_a_command_that_is_not_one_is_refused_in_words(folder, capsys, monkeypatch, fields, words):
    command = Command(
        **{"name": "oops", "summary": "", "configure": bool, "run": lambda *_: 0} | fields
    )
    monkeypatch.setattr(f"{HERE}.Oops.cli_commands", hookimpl(lambda self: [command]))
    enable = f'plugins.enable=["{HERE}:Oops"]'
    assert main(["--set", enable, "oops"]) == (2 if words else 0)
    assert words in capsys.readouterr().err
    if "%" in command.summary:
        assert main(["--set", enable, "--help"]) == 0
        assert command.summary in capsys.readouterr().out
