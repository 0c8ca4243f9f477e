"""`scheduler.step_milliseconds`: on in `AsyncLLM`, off in `LLM`, and the same tokens with both."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest
from support.async_requests import collect
from support.internals import scheduler_of

from hardpoint import LLM, AsyncLLM, ConfigError, SamplingParams, async_llm
from hardpoint.plugins import StepCost
from hardpoint.testing import scripted_config

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPTS = ["word " * length for length in (3, 40, 7, 60, 20)]
MODEL = {"max_model_len": 512, "kv_cache": {"block_size": 4, "num_blocks": 1000}}


@pytest.fixture
def opened(monkeypatch, scripted):
    """Return the setting with which AsyncLLM would open an engine."""
    configs = []

    def build(config, *_, **__):
        configs.append(config)
        config = msgspec.structs.replace(config, max_model_len=64)
        parts = SimpleNamespace(config=config, clock=time.monotonic)
        return SimpleNamespace(parts=parts, change=None)

    monkeypatch.setattr(async_llm, "build_async_engine", build)

    def open_one(**scheduler):
        AsyncLLM(config=scripted_config(scripted, {"scheduler": scheduler}))
        return configs.pop().scheduler.step_milliseconds

    return open_one


def test_it_is_on_in_async_llm_unless_it_is_set(opened):
    assert opened() == 150.0
    assert opened(step_milliseconds=0) == 0.0
    assert opened(step_milliseconds=35.5) == 35.5


def test_it_is_off_where_prompts_are_computed_whole(opened):
    assert opened(chunked_prefill=False) == 0.0


@pytest.mark.parametrize(("given", "limit"), [({}, 0.0), ({"step_milliseconds": 20}, 20.0)])
def test_it_is_off_in_llm_unless_it_is_set(open_engine, given, limit):
    engine = open_engine(MODEL | {"scheduler": given})
    engine.add_request("a", PROMPTS[0], PARAMS)
    while engine.has_unfinished_requests():
        engine.step()
    context = scheduler_of(engine).context
    assert context.limits.step_milliseconds == limit
    assert (context.step_cost() != StepCost()) == bool(limit)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step_milliseconds": -1}, "scheduler.step_milliseconds: expected"),
        (
            {"step_milliseconds": 5, "chunked_prefill": False},
            "scheduler.step_milliseconds: expected 0 without scheduler.chunked_prefill, got 5.0",
        ),
    ],
)
def test_wrong_values_are_refused(scripted, given, message):
    with pytest.raises(ConfigError) as error:
        LLM(config=scripted_config(scripted, MODEL | {"scheduler": given}))
    assert message in str(error.value)


def test_the_engine_measures_its_steps_and_tokens_are_the_same(scripted):
    with LLM(config=scripted_config(scripted, MODEL)) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]
        assert llm.engines.scheduler_stats().step_cost_error is None

    async def main():
        async with AsyncLLM(config=scripted_config(scripted, MODEL)) as llm:
            assert llm.config.scheduler.step_milliseconds == 150.0
            found = await asyncio.gather(*(collect(llm.generate(p, PARAMS)) for p in PROMPTS))
            assert (await llm.engines.scheduler_stats()).step_cost_error > 0
            return [outputs[-1].outputs[0].token_ids for outputs in found]

    assert asyncio.run(main()) == expected
