"""Errors that a program catches do not depend on where the engine runs."""

from __future__ import annotations

import itertools
import threading

import pytest
from support.internals import core_of
from support.process.harness import open_engine
from support.process.slow_requests import SLOW, UNFINISHED
from support.samples import Sample

from hardpoint import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    PluginError,
    RequestError,
    SamplingParams,
    plugins,
)
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.scheduling.scheduler import DefaultScheduler
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.errors import EngineFaultError, PluginFaultError
from hardpoint.plugins import EngineCoreRequest, LogitsProcessor, Phase, hookimpl
from hardpoint.testing import scripted_config, scripted_engine

HALF = "\ud800"  # of a pair
MESSAGE = r"expected text that UTF-8 can hold, got '\ud800' at character "
HERE = __name__
ENABLED = {
    "plugins": {
        "enable": ["support.plugins.faulty:Dense", f"{HERE}:Meddling", f"{HERE}:Odd"],
        "quarantine_after": 1,
    }
}


class Meddling:
    """Corrupts the arguments of requests that are tagged so."""

    contract = 1

    @hookimpl
    def request_received(self, request):
        if "spoil" in request.tags:
            request.plugin_args["dense"] = {"how": 3}


class Odd(LogitsProcessor):
    """Its own check of its arguments is broken."""

    contract = 1
    phase = Phase.MASK

    class Arguments(plugins.Arguments):
        def __post_init__(self):
            raise LookupError("no such table")

    def apply(self, logits, rows):
        return logits


@pytest.fixture(scope="module")
def inside(scripted):
    engine = scripted_engine(scripted, ENABLED)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def apart(scripted):
    engine = open_engine(scripted, ENABLED)
    yield engine
    engine.close()


@pytest.fixture(params=["inside", "apart"])
def engine(request):
    engine = request.getfixturevalue(request.param)
    yield engine
    assert not engine.has_unfinished_requests()
    engine.add_request("after", "say abc", SamplingParams(temperature=0.0))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].text == " abc abc abc"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": f"r{HALF}"}, f"request_id: {MESSAGE}1"),
        ({"prompt": f"say {HALF}"}, f"prompt: {MESSAGE}4"),
        ({"prompt": {"prompt": HALF}}, f"prompt: {MESSAGE}0"),
        ({"extras": RequestExtras(cache_salt=f"é{HALF}")}, f"cache_salt: {MESSAGE}1"),
        ({"extras": RequestExtras(tags={"tenant": HALF})}, f"tags.tenant: {MESSAGE}0"),
        ({"extras": RequestExtras(tags={HALF: "x"})}, f"tags, a key: {MESSAGE}0"),
        ({"params": SamplingParams(stop=f"a{HALF}")}, f"stop: {MESSAGE}1"),
        ({"params": SamplingParams(stop=["a", HALF])}, f"stop[1]: {MESSAGE}0"),
        ({"params": SamplingParams(bad_words=[HALF])}, f"bad_words[0]: {MESSAGE}0"),
        (
            {"params": SamplingParams(plugin_args={"dense": {"how": HALF}})},
            f"plugin_args.dense.how: {MESSAGE}0",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_text_that_utf_8_cannot_hold(engine, fields, message):
    arguments = {"request_id": "r", "prompt": "x"} | fields
    with pytest.raises(RequestError) as error:
        engine.add_request(**arguments)
    assert str(error.value) == message


def test_text_beyond_ascii_is_well(engine):
    extras = RequestExtras(cache_salt="é", tags={"ключ": "值"})
    engine.add_request("😀", "😀", SamplingParams(max_tokens=1, stop=["é"]), extras)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].request_id == "😀"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tags": {"tenant": HALF}}, "tags.tenant"),
        ({"cache_salt": HALF}, "cache_salt"),
        ({"params": SamplingParams(stop=[HALF])}, "stop[0]"),
        ({"trace_headers": {"traceparent": HALF}}, "trace_headers.traceparent"),
        ({"plugin_args": {"dense": {"how": [HALF]}}}, "plugin_args.dense.how[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_made_elsewhere(engine, fields, path):
    right = {"request_id": "r", "prompt_token_ids": [1], "params": SamplingParams()}
    with pytest.raises(RequestError) as error:
        engine.add_request("r", EngineCoreRequest(**right | fields))
    assert str(error.value) == f"{path}: {MESSAGE}0"


def test_a_wrong_object_is_named_by_its_path(engine):
    extras = RequestExtras(tags={"ok": "x", "tenant": object()})
    with pytest.raises(RequestError, match=r"^tags\.tenant: expected plain data: a builtins\.obj"):
        engine.add_request("r", "x", None, extras)
    params = SamplingParams(plugin_args={"dense": {"how": ["x", object()]}})
    with pytest.raises(RequestError, match=r"^plugin_args\.dense\.how\[1\]: expected plain data: "):
        engine.add_request("r", "x", params)


def test_arguments_that_a_hook_has_corrupted(engine):
    """The plugin is not at fault, so it is not named; the hook is."""
    message = r"^plugin 'meddling' .*: plugin_args\.dense\.how: expected a string, got 3$"
    with pytest.raises(RequestError, match=message):
        engine.add_request("r", "x", None, RequestExtras(tags={"spoil": "yes"}))
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        params=SamplingParams(),
        plugin_args={"dense": {"how": 3}},
    )
    with pytest.raises(RequestError, match=r"^plugin_args\.dense\.how: expected a string, got 3$"):
        engine.add_request("r", request)
    assert engine.health().faults == {}


def test_arguments_whose_own_check_is_broken(engine):
    message = r"^plugin 'odd'.*: its Arguments failed: LookupError: no such table$"
    with pytest.raises(RequestError, match=message):
        engine.add_request("r", "x", SamplingParams(plugin_args={"odd": {}}))


# Faults that end the engine

RAISES = {"plugin_args": {"dense": {"how": "raise"}}}


class BrokenAdd(Sample, DefaultScheduler, contract=1):
    """Takes no request."""

    def add_request(self, request):
        raise LookupError("no room")


class BrokenEnd(Sample, plugins.SchedulingPolicy, contract=1):
    """Fails when it is closed."""

    def key(self, request):
        return request.arrival_time

    def finished(self, request):
        raise LookupError("no such request")


class BrokenStep(Sample, DefaultScheduler, contract=1):
    """Schedules nothing."""

    def schedule(self):
        raise LookupError("no plan")


@pytest.mark.parametrize("opens", [scripted_engine, open_engine], ids=["inside", "apart"])
def test_one_that_an_abort_brings_out_ends_the_engine_too(scripted, opens):
    policy = {"policy": f"{HERE}:BrokenEnd"}
    settings = {**SLOW["plugins"], "on_error": {"broken_end": "engine"}}
    engine = opens(scripted, {"scheduler": policy, "plugins": settings})
    for name in ("a", "b"):
        engine.add_request(name, "x", UNFINISHED)
    engine.step()
    with pytest.raises(EngineFaultError, match="plugin 'broken_end'.*LookupError: no such request"):
        abort_and_step(engine)
    with pytest.raises(EngineDeadError):
        engine.step()


def abort_and_step(engine):
    """Where the engine is apart, the result of an abort comes with the next outputs."""
    engine.abort_requests(["a"])
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize("opens", [scripted_engine, open_engine], ids=["inside", "apart"])
@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        (
            {"enable": ["support.plugins.faulty:Dense"], "on_error": {"dense": "engine"}},
            RAISES,
            "plugin 'dense'.*apply failed: RuntimeError: broken apply",
        ),
        (
            {"sampler": "support.plugins.faulty:NanSampler"},
            {},
            "plugin 'nan_sampler'.*RuntimeError: bro",
        ),
        ({"scheduler": f"{HERE}:BrokenStep"}, {}, "plugin 'broken_step'.*LookupError: no plan"),
        ({"scheduler": f"{HERE}:BrokenAdd"}, {}, "plugin 'broken_add'.*LookupError: no room"),
    ],
    ids=["logits", "sampler", "schedule", "add"],
)
def test_a_fault_that_ends_the_engine(scripted, opens, settings, fields, message):
    """It may be caught as the end of the engine or as the plugin's fault."""
    tables = ("sampler", "scheduler")
    settings = {k: {"use": v} for k, v in settings.items() if k in tables} or {"plugins": settings}
    engine = opens(scripted, settings)
    with pytest.raises(EngineDeadError, match=message) as error:
        complete(engine, SamplingParams(**fields))
    assert type(error.value) is EngineFaultError
    assert isinstance(error.value, PluginError)
    assert type(error.value.__cause__) is PluginFaultError
    with pytest.raises(EngineDeadError):
        engine.step()


class LosesWorker(UniprocExecutor):
    """Learns in a thread of its own, after the third step, that a worker has ended."""

    contract = 1
    steps = 0

    def on_failure(self, callback):
        self.callback = callback

    def execute_model(self, plan):
        self.steps += 1
        if self.steps == 3:
            lost = OSError("worker 3 was killed")
            thread = threading.Thread(target=self.callback, args=(lost,))
            thread.start()
            thread.join()
        return super().execute_model(plan)


@pytest.mark.parametrize("opens", [scripted_engine, open_engine], ids=["inside", "apart"])
def test_an_executor_that_fails_outside_of_its_calls_ends_the_engine(scripted, opens):
    engine = opens(scripted, {"executor": {"use": f"{HERE}:LosesWorker"}})
    with pytest.raises(EngineFaultError) as error:
        complete(engine, SamplingParams(max_tokens=400, ignore_eos=True))
    assert str(error.value).startswith("plugin 'loses_worker'")
    assert str(error.value).endswith(" failed: OSError: worker 3 was killed")
    assert type(error.value.__cause__) is PluginFaultError
    with pytest.raises(EngineDeadError):
        engine.step()


def test_other_calls_report_a_failed_executor_too(scripted):
    with LLM(config=scripted_config(scripted, {"executor": {"use": f"{HERE}:LosesWorker"}})) as llm:
        list(itertools.islice(llm.stream("x", SamplingParams(max_tokens=9, ignore_eos=True)), 3))
        for call in (
            llm.engines.is_sleeping,
            lambda: llm.generate("x"),
            llm.engines.scheduler_stats,
        ):
            with pytest.raises(EngineFaultError, match="plugin 'loses_worker'.*worker 3 was kill"):
                call()


def complete(engine, params) -> None:
    engine.add_request("r", "x", params)
    while engine.has_unfinished_requests():
        engine.step()


async def test_the_same_in_an_event_loop(scripted):
    config = scripted_config(scripted, {"scheduler": {"use": f"{HERE}:BrokenStep"}})
    async with AsyncLLM(config=config) as llm:
        with pytest.raises(EngineFaultError, match="plugin 'broken_step'.*no plan"):
            await anext(llm.generate("x"))
        with pytest.raises(EngineFaultError, match="plugin 'broken_step'.*no plan"):
            await anext(llm.generate("later"))


def test_a_failure_of_the_engine_itself(scripted, monkeypatch):
    engine = scripted_engine(scripted)
    engine.add_request("r", "x")
    cause = ZeroDivisionError("by nobody")

    def broken(*_):
        raise cause

    monkeypatch.setattr(core_of(engine), "step", broken)
    with pytest.raises(
        EngineDeadError,
        match="^the engine failed in its own code, .* ZeroDivisionError: by nobody$",
    ):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()
