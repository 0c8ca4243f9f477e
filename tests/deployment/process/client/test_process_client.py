"""A client of an engine process: its messages and the answers, errors included."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import msgspec
import pytest
from support.core.serial_engine import GREEDY, config, slowed, still_serves
from support.internals import engine_of, open_calls_of, output_processor_of, set_timeout, sockets_of
from support.waiting import PATIENCE_S, HeldSteps, wait_until

from hardpoint import (
    LLM,
    ConfigError,
    EngineDeadError,
    EngineTimeoutError,
    HardpointError,
    OverloadedError,
    PluginError,
    RequestError,
    SamplingParams,
    errors,
)
from hardpoint.errors import PluginLoadError, PromptTooLongError
from hardpoint.host.boundary.errors import engine_dead, error_of, kind_of
from hardpoint.host.system.encoding import WireError
from hardpoint.plugins import EngineCoreRequest, SchedulingPolicy

BOTH = pytest.mark.parametrize("in_process", [True, False], ids=["in-process", "own-process"])


class Unbuildable(SchedulingPolicy):
    """A policy that cannot be built where it lives."""

    contract = 1

    def __init__(self, context):
        raise OSError("no such disk")

    def key(self, request):
        return 0


def slow(seconds: float, max_tokens: int = 400) -> SamplingParams:
    return slowed({"slow": {"seconds": seconds}}, max_tokens)


@pytest.fixture(scope="module")
def process_llm(scripted):
    with LLM(config=config(scripted)) as llm:
        yield llm


@pytest.fixture(scope="module")
def here(scripted):
    with LLM(config=config(scripted, in_process=True)) as llm:
        yield llm


@pytest.fixture
def llm(in_process, process_llm, here):
    return here if in_process else process_llm


# The same errors in both modes


@BOTH
class TestRefusals:
    def test_too_many(self, llm):
        with pytest.raises(OverloadedError) as error:
            llm.generate(["x"] * 6, slow(0.05))
        assert type(error.value) is OverloadedError
        assert str(error.value) == (
            "overloaded: 3 requests are waiting, the maximum (scheduler.max_waiting); "
            "try again later"
        )
        assert not llm.llm_engine.has_unfinished_requests()
        assert still_serves(llm)

    def test_completions_too_many(self, llm):
        many = msgspec.structs.replace(slow(0.05), n=5, temperature=1.0, seed=1)
        with pytest.raises(OverloadedError, match="overloaded: 3 requests are waiting"):
            llm.generate("x", many)
        assert still_serves(llm)

    def test_what_can_never_run(self, llm):
        with pytest.raises(RequestError) as error:
            llm.generate(["x", "x", "x"], GREEDY, tags=[{}, {"grow": "yes"}, {}])
        assert type(error.value) is PromptTooLongError
        assert str(error.value) == (
            "prompts[1]: the prompt is too long: 600 tokens; this model's maximum context length "
            "is 512 tokens, less one to generate"
        )
        assert not llm.llm_engine.has_unfinished_requests()
        assert still_serves(llm)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("include", ["nothing"], "include: expected 'timings' or 'trace', got 'nothing'"),
            (
                "include",
                ["speculation"],
                "include: expected no 'speculation' in a request without drafts (speculation.use "
                "is empty), got ['speculation']",
            ),
            (
                "speculator",
                "nothing",
                "speculator: expected \"none\", because speculation.use is empty, got 'nothing'",
            ),
        ],
    )
    def test_parameters_of_a_prompt(self, llm, field, value, message):
        wrong = msgspec.structs.replace(GREEDY, **{field: value})
        for params, where in (([GREEDY, wrong], "prompts[1]: "), (wrong, "")):
            with pytest.raises(RequestError) as error:
                llm.generate(["x", "x"], params)
            assert str(error.value) == where + message
        assert still_serves(llm)

    def test_in_a_stream(self, llm):
        stream = llm.stream("x", slow(0.0, 100))
        begun = len(next(stream).outputs[0].token_ids)
        with pytest.raises(RequestError, match="prompt: the prompt is too long: 600 tokens"):
            llm.generate("x", GREEDY, tags={"grow": "yes"})
        rest = sum(len(each.outputs[0].token_ids) for each in stream)
        assert begun + rest == 100  # undisturbed
        assert still_serves(llm)

    def test_a_policy_that_cannot_be_built(self, llm):
        with pytest.raises(PluginLoadError) as error:
            llm.plugins.set_policy(f"{__name__}:Unbuildable")
        assert type(error.value) is PluginLoadError
        assert "plugin 'unbuildable'" in str(error.value)
        assert "OSError: no such disk" in str(error.value)
        assert llm.config.scheduler.policy == "fcfs"
        assert llm.plugins.manifest.generation == 1
        assert still_serves(llm)

    def test_a_policy_with_options_that_it_has_not(self, llm):
        with pytest.raises(ConfigError, match=r"^plugin\.fair\.wieghts: unknown"):
            llm.plugins.set_policy("fair", {"wieghts": {}})
        with pytest.raises(PluginError, match="no_such_policy"):
            llm.plugins.set_policy("no_such_policy")
        assert still_serves(llm)

    def test_what_pools(self, llm):
        with pytest.raises(RequestError, match="classify: this model cannot do it; it can: gen"):
            llm.classify(["x"])
        assert still_serves(llm)


@pytest.mark.parametrize("in_process", [False, True])
def test_callables_are_for_this_process(process_llm, here, scripted, in_process):
    """The engine's, and its workers' as well."""
    params = SamplingParams(max_tokens=2, logits_processors=[lambda _ids, logits: logits])
    assert here.generate("x", params)[0].finished
    with contextlib.ExitStack() as stack:
        elsewhere = process_llm
        if in_process:
            tables = config(scripted, in_process=True) | {"executor": {"use": "multiproc"}}
            elsewhere = stack.enter_context(LLM(config=tables))
        with pytest.raises(RequestError) as error:
            elsewhere.generate("x", params)
        assert str(error.value) == (
            "logits_processors: callables cannot travel to workers in another process; enable a "
            "factory `(params) -> callable or None` as a plugin (plugins.enable), which is called "
            'there, or use engine.in_process = true and executor.use = "uniproc"'
        )
        assert still_serves(elsewhere)


# Questions


def test_questions_over_the_wire(process_llm):
    engine = engine_of(process_llm)
    engine.add_request("a", "x", slow(0.03))
    engine.add_request("b", "x", slow(0.03))
    engine.step()
    assert engine.why_waiting("a") == {0: None}
    assert engine.why_waiting("b")[0].waiting_for.name == "SLOT"
    stats = process_llm.engines.scheduler_stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    engine.abort_requests(["a", "b"])
    process_llm.reset_prefix_cache(recompute_running=True)
    meters = process_llm.plugins.meters()
    assert meters["slow"].rows >= 1
    assert process_llm.plugins.health().ok


def test_only_what_is_declared_can_be_called(process_llm):
    client = process_llm.llm_engine.parts.client
    with pytest.raises(
        RequestError,
        match="method: expected one of call_part, collective_rpc, .*, got 'close'",
    ):
        client.call("close").result(PATIENCE_S)
    with pytest.raises(RequestError, match="request_ids: expected a list, got 'r'"):
        client.call("why_waiting", "r").result(PATIENCE_S)
    with pytest.raises(RequestError, match="^UtilityCall: a builtins.object cannot travel"):
        client.call("why_waiting", [object()])
    assert still_serves(process_llm)


def test_a_step_without_requests_returns_at_once(process_llm):
    assert process_llm.llm_engine.step() == []


def test_a_question_that_is_not_answered_in_time(scripted, tmp_path):
    held = HeldSteps(tmp_path)
    with LLM(config=config(scripted, call_timeout_seconds=0.2)) as llm:
        llm.llm_engine.add_request("a", "x", slowed(held.slow(), 1))
        wait_until(held.have_begun, PATIENCE_S, "the step")
        words = r"did not answer scheduler_stats within 0.2 s \(engine.call_timeout_seconds\)"
        with pytest.raises(EngineTimeoutError, match=words):
            llm.engines.scheduler_stats()
        held.let_go()
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        set_timeout(llm.llm_engine.parts.client, PATIENCE_S)  # the engine answers from now on
        assert llm.engines.scheduler_stats().num_running == 0  # the late answer disturbs nobody
        assert still_serves(llm)


def test_ctrl_c_ends_the_requests_and_leaves_the_engine(process_llm, tmp_path):
    held, known = HeldSteps(tmp_path), output_processor_of(engine_of(process_llm))

    def interrupt():
        wait_until(
            lambda: held.have_begun() and known.num_unfinished_requests() == 2,
            PATIENCE_S,
            "the step",
        )
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        process_llm.generate(["x", "y"], slowed(held.slow(0.05)))
    assert not process_llm.llm_engine.has_unfinished_requests()
    assert len(open_calls_of(process_llm)) == 0
    assert still_serves(process_llm)
    stats = process_llm.engines.scheduler_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_what_is_sent_while_its_death_is_told_is_refused(scripted, monkeypatch):
    """It would be lost, and its sender would wait for the news only."""
    with LLM(config=config(scripted)) as llm:
        client = llm.llm_engine.parts.client
        sockets = sockets_of(client)
        telling, go_on = threading.Event(), threading.Event()
        fail = sockets.fail

        def slowly(error):
            telling.set()
            assert go_on.wait(PATIENCE_S)
            fail(error)

        monkeypatch.setattr(sockets, "fail", slowly)
        os.kill(client.pid, signal.SIGKILL)
        assert telling.wait(PATIENCE_S)
        threading.Timer(0.1, go_on.set).start()
        with pytest.raises(EngineDeadError, match="was killed by signal 9"):
            client.add_request(
                EngineCoreRequest(request_id="r", prompt_token_ids=[1], params=GREEDY)
            )


def test_all_who_wait_are_told_of_its_death(scripted, tmp_path):
    """A batch, and several questions, at once."""
    held = HeldSteps(tmp_path)
    with LLM(config=config(scripted)) as llm:
        client = llm.llm_engine.parts.client
        llm.llm_engine.add_request("a", "x", slowed(held.slow(), 1))
        wait_until(held.have_begun, PATIENCE_S, "the step")
        futures = [client.call("scheduler_stats") for _ in range(5)]
        os.kill(client.pid, signal.SIGKILL)
        began = time.monotonic()
        words = (
            rf"^the engine process \(pid {client.pid}\) was killed by signal 9 .*, while apply\("
        )
        for future in futures:
            with pytest.raises(EngineDeadError, match=words):
                future.result(PATIENCE_S)
        with pytest.raises(EngineDeadError, match=words):
            client.add_request(
                EngineCoreRequest(request_id="r", prompt_token_ids=[1], params=GREEDY)
            )
        with pytest.raises(EngineDeadError, match=words):
            llm.generate("x", GREEDY)
        assert time.monotonic() - began < PATIENCE_S / 2
        client.abort_requests(["r"])  # it has ended them all


# Errors as words


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n[0].isupper()])
def test_every_class_of_the_tree_travels(name):
    error = getattr(errors, name)("words")
    assert kind_of(error) == name
    assert type(error_of(kind_of(error), str(error))) is type(error)
    assert str(error_of(name, "words")) == "words"


def test_other_classes_travel_as_the_nearest_of_the_tree():
    class OwnError(OverloadedError):
        """A plugin's."""

    assert kind_of(OwnError("x")) == "OverloadedError"
    assert kind_of(KeyError("x")) == "HardpointError"
    assert kind_of(WireError("x")) == "RequestError"
    for strange in ("no such class", "annotations", None):
        assert type(error_of(strange, None)) is HardpointError


def test_each_who_waits_gets_an_error_of_its_own():
    first = EngineDeadError("gone")
    first.add_note("the engine's traceback")
    again = engine_dead(first)
    assert again is not first
    assert (str(again), again.__notes__) == ("gone", ["the engine's traceback"])
