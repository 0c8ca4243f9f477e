"""A result is checked against its plan: nobody waits for ever, and the executor is named."""

from __future__ import annotations

import pytest
from support.driving import run, summary
from support.fault_cases import jobs, run_all

from hardpoint import RequestError, SamplingParams
from hardpoint.errors import EngineFaultError
from hardpoint.plugins import EngineCoreRequest

HERE = "support.plugins.returning"
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
# A prompt of three steps, so that an early token is one before its end.
STEPS = {"scheduler": {"max_num_batched_tokens": 32}}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nothing", "it returned no token, expected one"),
        ("empty", "it returned no token, expected one"),
        ("doubled", "it returned 2 tokens, expected one"),
        ("early", "it returned a token, expected none before the whole prompt is computed"),
    ],
)
def test_what_differs_ends_that_request_alone(open_engine, how, words):
    work = [(name, prompt[:4], params) for name, prompt, params in jobs(6)]
    engine = open_engine(STEPS)
    expected = run(engine, work)
    engine.close()
    engine = open_engine(STEPS | {"executor": {"use": f"{HERE}:Returning"}})
    finals = run_all(engine, [*work, (how, [3] * 80, PARAMS)])
    (guilty,) = finals.pop(how).outputs
    assert guilty.finish_reason == "error"
    assert guilty.error.startswith("plugin 'returning' (support.plugins.returning:Returning)")
    assert words in guilty.error
    assert guilty.token_ids == []
    assert {name: [summary(final)] for name, final in finals.items()} == expected
    assert words in engine.health().fallbacks["executor"].message
    assert engine.health().ok


def test_tokens_for_a_request_that_was_not_planned_end_it(open_engine):
    limits = {"max_num_seqs": 1, "policy": "priority"}
    executor = {"use": f"{HERE}:Returning"}
    engine = open_engine({"scheduler": limits, "executor": executor})
    engine.add_request("foreign", [1, 2], PARAMS)
    engine.step()
    engine.call_utility("reset_prefix_cache", True)  # it is preempted, and another one goes first
    first = EngineCoreRequest(
        request_id="other", prompt_token_ids=[1, 2], params=PARAMS, priority=-1
    )
    engine.add_request("other", first)
    finals = run_all(engine, [])
    (guilty,) = finals["foreign"].outputs
    assert "it returned tokens of a request that it was not to compute" in guilty.error
    assert "plugin 'returning'" in guilty.error
    assert finals["other"].outputs[0].finish_reason == "length"


def test_what_is_no_result_ends_the_engine_in_words(open_engine):
    engine = open_engine({"executor": {"use": f"{HERE}:NoResult"}})
    engine.add_request("r", [1, 2], PARAMS)
    with pytest.raises(EngineFaultError) as error:
        run_all(engine, [])
    assert "plugin 'no_result'" in str(error.value)
    assert "expected a ModelRunnerOutput for step 1, got dict" in str(error.value)


@pytest.mark.parametrize(
    ("path", "name", "words"),
    [
        ("executor", "NoFuture", "its execute_model returned NoneType, expected Future"),
        ("scheduler", "NoPlan", "its schedule returned NoneType, expected SchedulerOutput"),
        ("scheduler", "NoOutputs", "its update returned NoneType, expected dict"),
        ("executor", "Cancelled", "its execute_model returned a future that was cancelled"),
        ("scheduler", "TooMany", "plan of step 1 schedules 1000 tokens of request '.*', expected"),
        ("scheduler", "Unknown", "plan of step 1 has request 'unknown' only in one of num_sched"),
    ],
)
def test_a_wrong_return_value_ends_the_engine_and_is_named(open_engine, path, name, words):
    engine = open_engine({path: {"use": f"{HERE}:{name}"}})
    engine.add_request("r", [1, 2], PARAMS)
    with pytest.raises(EngineFaultError, match=f"{HERE}:{name}.*{words}"):
        run_all(engine, [])


def test_a_request_that_the_scheduler_does_not_add_is_refused(open_engine):
    engine = open_engine({"scheduler": {"use": f"{HERE}:Ignoring"}})
    with pytest.raises(RequestError, match="plugin 'ignoring'.*its add_request did not add"):
        engine.add_request("r", [1, 2], PARAMS)
    assert not engine.has_unfinished_requests()
