"""Resources that an engine process keeps to itself, and its report when it is ready."""

from __future__ import annotations

import gc
import json
import os
import re

import pytest
from support.process.harness import open_engine

from hardpoint import SamplingParams

pytestmark = pytest.mark.fresh_process

VARIABLE = "HARDPOINT_TEST_WORD"
CONFIG = {
    "plugins": {"enable": ["support.plugins.reporting:Tells"]},
    "max_model_len": "auto",
    "kv_cache": {"num_blocks": 3},
}


@pytest.fixture(scope="module")
def engine(scripted):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "before")
        engine = open_engine(scripted, CONFIG)
    yield engine
    engine.close()


def seen_in(engine, prompt=(1, 2, 3)):
    params = SamplingParams(max_tokens=1, plugin_args={"tells": {"variable": VARIABLE}})
    engine.add_request("tell", list(prompt), params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return json.loads(re.search(r"<(.*)>", outputs[0].outputs[0].error)[1])


def test_the_heap_is_frozen_there_and_not_here(engine):
    here = gc.get_freeze_count()
    seen = seen_in(engine)
    assert seen["pid"] != os.getpid()
    assert seen["frozen"] > 10_000
    assert gc.get_freeze_count() <= here  # what is frozen may be released


def test_what_changes_in_the_environment_later_does_not_reach_it(engine, monkeypatch):
    monkeypatch.setenv(VARIABLE, "after")
    assert seen_in(engine)["variable"] == "before"


def test_prompts_are_hashed_by_the_thread_that_reads(engine):
    assert seen_in(engine, range(40))["hashed_in"][-1] == "EngineInput"


def test_a_context_that_was_fitted_is_in_the_ready_response(engine):
    ready = engine.parts.client.ready
    assert (ready.max_model_len, ready.num_gpu_blocks) == (48, 3)
    assert engine.parts.config.max_model_len == 48
