"""Observers of outputs, which frontend halves of step parts have: calls, faults, live changes."""

from __future__ import annotations

import functools

import pytest

from hardpoint import SamplingParams
from hardpoint.errors import ConfigError, EngineDeadError, PluginFaultError
from hardpoint.host.live.settings import ChangeRequest
from hardpoint.plugins import FrontendHalf, StepPart
from hardpoint.plugins.step_part.observer import OutputObserver, PreparedPartChange
from hardpoint.testing import scripted_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class Watch(StepPart):
    """Has an observer of the class `observes`."""

    contract = 1
    observes: type[OutputObserver]
    changes_live = True

    def frontend_half(self, context):
        del context
        return Half(self.observes())


class Half(FrontendHalf):
    def __init__(self, observer):
        self._observer = observer

    def observer(self):
        return self._observer


class Log(OutputObserver):
    """Logs its calls, across engines."""

    calls: list = []
    interval_seconds = 1.0

    def add(self, request, arrived):
        assert arrived > 0
        self.calls.append("add")
        return request.external_req_id

    def begin(self, outputs):
        self.calls.append(f"begin {len(outputs.outputs)}")

    def update(self, state, output, num_tokens):
        assert len(output.new_token_ids) == 1
        self.calls.append(f"update {state} {num_tokens}")

    def end(self, state, reason):
        self.calls.append(f"end {state} {reason}")

    def flush(self):
        self.calls.append("flush")

    def engine_ended(self):
        self.calls.append("engine_ended")

    def report(self):
        self.calls.append("report")


class Logging(Watch):
    contract = 1
    observes = Log


class Broken(Log):
    """Raises `error` in the methods of `failing`."""

    failing: tuple[str, ...] = ("add",)
    error: Exception = OSError("full")

    def __getattribute__(self, name):
        own = functools.partial(object.__getattribute__, self)
        return own("fail") if name in own("failing") else own(name)

    def fail(self, *_):
        raise self.error


class Breaking(Watch):
    contract = 1
    observes = Broken


class Misleading(Watch):
    contract = 1
    observes = dict


@pytest.fixture(autouse=True)
def _no_calls():
    Log.calls.clear()


def engine_with(open_engine, *classes, **plugin_settings):
    enable = [f"{__name__}:{cls.__name__}" for cls in classes]
    settings = {"plugins": {"enable": enable, **plugin_settings}}
    return open_engine(settings)


def run(engine, name="a"):
    engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, PARAMS)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_an_observer_sees_each_output_of_each_request(open_engine):
    engine = engine_with(open_engine, Logging)
    run(engine)
    engine.close()
    steps = [["begin 1", f"update a {count}", "flush"] for count in (1, 2, 3)]
    steps[-1].insert(2, "end a length")
    assert [one for one in Log.calls if one != "report"] == ["add", *steps[0], *steps[1], *steps[2]]


def test_closing_ends_the_requests_that_are_live(open_engine):
    engine = engine_with(open_engine, Logging)
    engine.add_request("a", {"prompt_token_ids": [5]}, PARAMS)
    engine.step()
    engine.close()
    assert Log.calls[-1] == "end a abort"


@pytest.mark.parametrize("method", ["add", "begin", "update", "end", "flush"])
def test_a_fault_is_counted_and_no_request_has_it(open_engine, monkeypatch, method):
    monkeypatch.setattr(Broken, "failing", (method,))
    engine = engine_with(open_engine, Breaking, Logging)
    outputs = run(engine)
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "length"
    fault = engine.health().fallbacks["breaking"]
    assert f"its {method}() failed: OSError: full" in fault.message
    assert f"test_observers:{Breaking.__name__}" in fault.message
    assert Log.calls.count("end a length") == 1 + (method not in ("add", "end"))
    if method == "add":  # nothing more of that request is observed
        assert Log.calls.count("update a 1") == 1


@pytest.mark.parametrize("method", ["flush", "report"])
def test_a_fault_of_a_component_may_end_the_engine(open_engine, monkeypatch, method):
    monkeypatch.setattr(Broken, "failing", (method,))
    monkeypatch.setattr(Broken, "error", PluginFaultError("plugin 'x': down"))
    monkeypatch.setattr(Broken, "interval_seconds", 0.0)
    engine = engine_with(open_engine, Breaking, Logging)
    engine.add_request("a", {"prompt_token_ids": [5]}, PARAMS)
    with pytest.raises(EngineDeadError, match="plugin 'x': down"):
        engine.step()
    assert method in Log.calls  # the others were called, too


def test_what_is_no_observer_is_refused(open_engine):
    with pytest.raises(PluginFaultError, match="observer.*expected an OutputObserver or None"):
        engine_with(open_engine, Misleading)


def test_statistics_without_a_part_that_gathers_them_are_refused(scripted):
    settings = {"plugins": {"disable": ["statistics"]}, "stats": {"request_metrics": True}}
    with pytest.raises(ConfigError, match="stats: expected an enabled step part"):
        scripted_engine(scripted, settings)


def test_a_part_with_an_observer_cannot_be_changed_live(open_engine):
    engine = engine_with(open_engine)
    use = f"{__name__}:Logging"
    with pytest.raises(ConfigError, match="has observer, which observes requests from their start"):
        engine.change(ChangeRequest.of("test", plugins={"enable": [use]}))


class Changing(StepPart):
    """Builds an object for each generation of the plugins; `error` refuses the change."""

    contract = 1
    error: Exception | None = None
    calls: list = []

    def frontend_half(self, context):
        del context
        return ChangingHalf()


class ChangingHalf(FrontendHalf):
    def prepare_change(self, components, config):
        del config
        calls = Changing.calls
        calls.append(sorted(components.enabled("logits_processors"))[:1])
        return PreparedPartChange(
            switch=lambda is_new: calls.append(f"switch {is_new}"),
            close_old=lambda: calls.append("close_old"),
            close_new=lambda: calls.append("close_new"),
        )


class ChangedAfter(Changing):
    contract = 1
    after = ("changing",)

    def frontend_half(self, context):
        del context
        return RefusingHalf()


class RefusingHalf(FrontendHalf):
    def prepare_change(self, components, config):
        del components, config
        raise ConfigError("this part stays as it is")


def test_a_half_changes_what_it_drives(open_engine):
    Changing.calls.clear()
    engine = engine_with(open_engine, Changing)
    engine.change(ChangeRequest.of("test", plugins={"disable": ["allowed_token_ids"]}))
    assert Changing.calls == [["bad_words"], "switch True", "close_old"]


def test_a_half_that_refuses_a_change_undoes_those_of_others(open_engine):
    Changing.calls.clear()
    engine = engine_with(open_engine, Changing, ChangedAfter)
    with pytest.raises(ConfigError, match="this part stays as it is"):
        engine.change(ChangeRequest.of("test", plugins={"disable": ["allowed_token_ids"]}))
    assert Changing.calls == [["bad_words"], "close_new"]
