"""The limit of prompt tokens that wait, and when there is room again."""

import re

import pytest
from support.builtins.scheduler_harness import Simulator
from support.core.serial_engine import slowed

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.scheduling.prompt_time import PrefillMeter
from hardpoint.errors import ConfigError, OverloadedError, QueueFullError
from hardpoint.plugins import FinishReason
from hardpoint.testing import scripted_config


def simulator(limit=100, **settings):
    return Simulator(max_waiting_tokens=limit, max_num_batched_tokens=10, blocks=256, **settings)


def test_a_prompt_beyond_the_limit_is_refused():
    sim = simulator()
    sim.add("a", prompt=60)
    sim.add("b", prompt=40)
    with pytest.raises(QueueFullError) as refused:
        sim.add("c", prompt=5)
    assert str(refused.value) == (
        "overloaded: prompts of 100 tokens are waiting, and 5 more would be above the maximum, 100 "
        "(scheduler.max_waiting_tokens); try again in 1 s"
    )
    assert refused.value.retry_after == 1
    assert isinstance(refused.value, OverloadedError)
    sim.step()  # computes ten
    sim.add("c", prompt=10)
    with pytest.raises(QueueFullError):
        sim.add("d", prompt=1)


def test_any_prompt_is_taken_where_none_waits():
    sim = simulator(limit=5)
    sim.add("a", prompt=20)
    with pytest.raises(QueueFullError):
        sim.add("b", prompt=1)
    sim.step()
    sim.step()
    sim.add("b", prompt=20)  # "a" generates, and waits no more


def test_those_that_end_wait_no_more():
    sim = simulator()
    sim.add("a", prompt=100)
    sim.abort("a", reason=FinishReason.ABORT)
    sim.add("b", prompt=100)


def test_the_rate_is_measured_while_prompts_are_computed():
    rate = PrefillMeter()
    assert rate.tokens_per_second is None
    rate.record(0.0, 0)
    rate.record(10.0, 100)
    assert rate.tokens_per_second is None
    rate.record(12.0, 50)
    assert rate.tokens_per_second == 50
    rate.record(13.0, 0)
    assert rate.tokens_per_second == 50
    rate.record(99.0, 0)
    rate.record(100.0, 400)
    assert rate.tokens_per_second == 50  # of the steps before
    rate.record(101.0, 400)
    assert rate.tokens_per_second == 400
    rate.rest()
    rate.record(500.0, 10)
    assert rate.tokens_per_second == 400
    for second in range(501, 520):
        rate.record(float(second), 10)
    assert rate.tokens_per_second == 10


def test_the_error_has_the_seconds_until_there_is_room(scripted):
    tables = {
        "plugins": {"enable": ["support.plugins.slow:Slow"]},
        "scheduler": {"max_waiting_tokens": 60, "max_num_seqs": 1, "max_num_batched_tokens": 16},
    }
    with LLM(config=scripted_config(scripted, tables)) as llm:
        params = slowed({"slow": {"seconds": 0.1}}, max_tokens=1)
        llm.generate(["x" * 60], params)  # in four steps, of which one is slow
        with pytest.raises(QueueFullError) as refused:
            llm.generate(["x" * 60, "y" * 31], params)
        assert re.search("prompts of 60 tokens are waiting, and 31 more", str(refused.value))
        assert 1 <= refused.value.retry_after <= 60
        assert llm.generate("say abc", SamplingParams(temperature=0))[0].outputs[0].text


def test_a_scheduler_without_the_limit_refuses_to_start(scripted):
    tables = {
        "scheduler": {"use": "support.broken.schedulers:Limitless", "max_waiting_tokens": 60},
    }
    expected = (
        "scheduler.max_waiting_tokens: expected none, because the scheduler 'limitless' does not "
        "limit the tokens that wait, got 60"
    )
    with pytest.raises(ConfigError, match=expected):
        LLM(config=scripted_config(scripted, tables))
