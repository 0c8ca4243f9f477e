"""The line in the log for each step."""

from __future__ import annotations

import logging
import re

import pytest
from support.core.engine_harness import Rig, ScriptedExecutor, interrupt_of_user

from hardpoint import SamplingParams
from hardpoint.core.engine.step_log import StepLog
from hardpoint.testing import ScriptedClock, scripted_engine
from hardpoint.toolkit.step_cost import StepTimes


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("step ")]


def logged():
    return {"step_log": StepLog(), "step_times": StepTimes(ScriptedClock(tick=0.002))}


def test_context_and_generation_are_told_apart(caplog):
    rig = Rig(**logged(), max_num_batched_tokens=8)
    rig.add("a", prompt=[1, 2, 3], max_tokens=3)
    with caplog.at_level(logging.INFO, "hardpoint"):
        rig.step()
        rig.add("b", prompt=range(9), max_tokens=2)
        rig.step()
        rig.step()
        rig.run()
    assert lines(caplog) == [
        "step 1: 1 context requests with 3 tokens, 0 generation requests with 0 tokens, 2.00 ms",
        "step 2: 1 context requests with 7 tokens, 1 generation requests with 1 tokens, 2.00 ms",
        "step 3: 1 context requests with 2 tokens, 1 generation requests with 1 tokens, 2.00 ms",
        "step 4: 0 context requests with 0 tokens, 1 generation requests with 1 tokens, 2.00 ms",
        "step 5: 0 context requests with 0 tokens, 0 generation requests with 0 tokens, 2.00 ms",
    ]


def test_what_was_lost_and_is_computed_anew_is_context(caplog):
    rig = Rig(**logged())
    rig.add("a", prompt=[1, 2, 3], max_tokens=4)
    with caplog.at_level(logging.INFO, "hardpoint"):
        rig.step()
        rig.step()
        rig.core.reset_prefix_cache(recompute_running=True)
        rig.step()
        rig.step()
    assert [line.split(",")[0] for line in lines(caplog)] == [
        "step 1: 1 context requests with 3 tokens",
        "step 2: 0 context requests with 0 tokens",
        "step 3: 1 context requests with 5 tokens",
        "step 4: 0 context requests with 0 tokens",
    ]


def test_of_a_pipeline_it_is_the_time_from_start_to_result(caplog):
    executor = ScriptedExecutor(2, late=True)
    executor.patient = True
    rig = Rig(executor, **logged())
    rig.add("a", max_tokens=3)
    with caplog.at_level(logging.INFO, "hardpoint"):
        rig.run()
    assert [line.split(":")[0] for line in lines(caplog)] == [f"step {n}" for n in (1, 2, 3, 4, 5)]
    assert lines(caplog)[0].endswith(" 4.00 ms")  # the second step began in between


def test_a_step_that_fails_has_no_line(caplog):
    rig = Rig(**logged())
    rig.executor.fail_at[1] = interrupt_of_user()
    rig.add("a", max_tokens=1)
    with caplog.at_level(logging.INFO, "hardpoint"):
        with pytest.raises(KeyboardInterrupt):
            rig.step()
        rig.executor.fail_at.clear()
        rig.run()
    assert [line.split(":")[0] for line in lines(caplog)] == ["step 2", "step 3"]


@pytest.mark.parametrize("on", [False, True])
def test_it_is_off_unless_asked_for(scripted, caplog, on):
    engine = scripted_engine(scripted, {"engine": {"log_steps": True}} if on else {})
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    with caplog.at_level(logging.INFO, "hardpoint"):
        while engine.has_unfinished_requests():
            engine.step()
    engine.close()
    assert len(lines(caplog)) == (2 if on else 0)
    assert all(re.search(r"\d+\.\d\d ms$", line) for line in lines(caplog))
