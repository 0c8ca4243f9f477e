"""Sleep, wake-up and profiles with workers that hold a real KV cache, here and over ZMQ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.driving import run
from support.internals import core_of, worker_of

from hardpoint import LLM, ConfigError, HardpointError, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.testing import ScriptedClock, scripted_config, scripted_engine

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True, min_tokens=3)
JOBS = [("greedy", [1] * 9, GREEDY), ("drawn", [2] * 21, DRAWN)]


def add_jobs(engine):
    for name, prompt, params in JOBS:
        engine.add_request(name, prompt, params)


def finish(engine):
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = output.outputs[0].token_ids
    return tokens


@pytest.fixture
def wanted(scripted):
    engine = scripted_engine(scripted)
    results = run(engine, JOBS)
    engine.close()
    return {name: result[0][0][1] for name, result in results.items()}


class TestMemory:
    @pytest.mark.parametrize("level", [1, 2])
    def test_requests_go_on_after_a_sleep_with_the_same_tokens(self, open_engine, wanted, level):
        engine = open_engine()
        core = core_of(engine)
        add_jobs(engine)
        for _ in range(5):
            engine.step()
        core.sleep(level, "keep").result(0)
        assert not core.has_requests()
        core.wake_up()
        assert finish(engine) == wanted

    def test_level_1_gives_the_cache_back_and_level_2_the_model_too(self, open_engine):
        engine = open_engine()
        core, worker = core_of(engine), worker_of(engine)
        model = worker.runner.model
        core.sleep(1).result(0)
        assert worker.runner._caches == []
        assert worker.runner.model is model
        core.wake_up()
        assert len(worker.runner._caches) == 1
        core.sleep(2).result(0)
        with pytest.raises(RuntimeError, match="the worker has no model"):
            worker.runner  # noqa: B018 - asking is the test
        core.wake_up()
        assert worker.runner.model is not model

    def test_after_level_2_weights_come_first(self, open_engine, wanted):
        engine = open_engine()
        core = core_of(engine)
        core.sleep(2).result(0)
        with pytest.raises(HardpointError, match="tags: expected weights before kv_cache"):
            core.wake_up(["kv_cache"])
        core.wake_up(["weights"])
        assert core.is_sleeping()
        core.wake_up(["kv_cache"])
        add_jobs(engine)
        assert finish(engine) == wanted

    def test_an_engine_that_sleeps_can_be_closed(self, open_engine):
        engine = open_engine()
        core_of(engine).sleep(2).result(0)

    @pytest.mark.parametrize("ends", ["aborted", "late"])
    def test_a_request_may_end_while_only_the_weights_are_awake(self, open_engine, ends):
        clock = ScriptedClock()
        engine = open_engine(clock=clock)
        core = core_of(engine)
        engine.add_request("a", [1] * 9, GREEDY, RequestExtras(timeout=5.0))
        engine.add_request("b", [2] * 9, GREEDY)
        engine.step()
        core.sleep(2, "keep").result(0)
        core.wake_up(["weights"])
        if ends == "aborted":
            engine.abort_requests(["a"])
        else:
            clock.advance(6.0)
        engine.step()
        core.wake_up()
        assert len(finish(engine)["b"]) == 20
        assert engine.call_utility("scheduler_stats").kv_cache_usage == 0


class TestRefusals:
    def test_profiles_need_a_folder(self, open_engine):
        engine = open_engine()
        core = core_of(engine)
        with pytest.raises(ConfigError, match="^engine.profile_dir: expected a folder to write"):
            core.start_profile()
        with pytest.raises(HardpointError, match="no profile is being recorded"):
            core.stop_profile()


def test_a_profile_shows_what_ran(open_engine, tmp_path):
    folder = tmp_path / "profiles"
    engine = open_engine({"engine": {"profile_dir": str(folder)}})
    core = core_of(engine)
    core.start_profile()
    with pytest.raises(HardpointError, match="a profile is being recorded"):
        core.start_profile()
    run(engine, JOBS)
    (path,) = core.stop_profile()
    assert Path(path).parent == folder
    names = {event.get("name", "") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)


@pytest.fixture(scope="module")
def llm(scripted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    engine = {"in_process": False, "profile_dir": str(folder)}
    config = scripted_config(scripted, {"engine": engine})
    with LLM(config=config) as llm:
        yield llm


class TestInAnotherProcess:
    def call(self, llm, method, *args):
        return llm.llm_engine.parts.client.call(method, *args).result(30)

    def test_sleep_and_wake(self, llm):
        before = llm.generate("say abc", GREEDY)[0].outputs[0].token_ids
        for level in (0, 1, 2):
            assert self.call(llm, "sleep", level, "wait") is None
            assert self.call(llm, "is_paused") is True
            assert self.call(llm, "is_sleeping") is (level > 0)
            self.call(llm, "wake_up")
            assert llm.generate("say abc", GREEDY)[0].outputs[0].token_ids == before

    def test_errors_are_those_of_the_engine(self, llm):
        with pytest.raises(HardpointError, match="level: expected 0, 1 or 2, got 9"):
            self.call(llm, "sleep", 9)
        with pytest.raises(HardpointError, match="there is no encoder cache"):
            self.call(llm, "reset_encoder_cache")

    def test_workers_can_be_called(self, llm):
        (meters,) = self.call(llm, "collective_rpc", "plugin_meters")
        assert "temperature" in meters

    def test_profiles(self, llm):
        self.call(llm, "start_profile")
        llm.generate("say abc", GREEDY)
        (path,) = self.call(llm, "stop_profile")
        assert Path(path).stat().st_size > 1000
