"""States of components: in all processes, and in the log at a first fault."""

from __future__ import annotations

import pytest
from support.plugins import changing_parts, telling
from support.plugins.changing_parts import FIRST, Mark
from support.process.harness import process_config

from hardpoint import LLM, SamplingParams
from hardpoint.configuration.loading import config_from
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.errors import ConfigError
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.replicas.choice import EngineChoice
from hardpoint.testing import scripted_config

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
HERE = telling.__name__
MARKED = {"marked": "yes"}
STATE = "its state at its first fault: "


def tables():
    return {"stats": {"sinks": [f"{HERE}:Telling"]}, "reasoning": {"parser": f"{HERE}:Plain"}}


def test_a_sink_and_a_parser(scripted, caplog):
    with LLM(config=scripted_config(scripted, tables())) as llm:
        before = llm.plugins.states()
        assert before["telling"] == {"seen": False}
        assert before["plain"] == {"form": "plain"}
        (output,) = llm.generate("a", PARAMS)
        assert "no text today" in output.outputs[0].error
        llm.generate("a", PARAMS)
        assert llm.plugins.states()["telling"] == {"seen": True}
    logged = [one.getMessage() for one in caplog.records if STATE in one.getMessage()]
    assert sorted(text.split("'")[1] for text in logged) == ["plain", "telling"]
    assert any(text.endswith(f"{STATE}{{'form': 'plain'}}") for text in logged)
    assert any(text.endswith(f"{STATE}{{'seen': True}}") for text in logged)


def test_the_state_of_a_balancer():
    config, sources = config_from({"parallel": {"data": 2, "balancer": f"{HERE}:First"}})
    choice = EngineChoice(resolve_plugins(config, sources), config)
    assert choice.states() == {"first": {"asked": 0}}
    choice.close()


@pytest.mark.nightly
def test_a_balancer(scripted, caplog):
    config = {"parallel": {"data": 2, "balancer": f"{HERE}:First"}}
    with LLM(config=process_config(scripted, config)) as llm:
        llm.generate("a", PARAMS)
        assert llm.plugins.states()["first"] == {"asked": 1}
        llm.generate("a", PARAMS, tags={"fail": "yes"})
    (logged,) = [one.getMessage() for one in caplog.records if STATE in one.getMessage()]
    assert logged.endswith(f"{STATE}{{'asked': 2}}")


def test_a_step_part_that_fails(scripted, caplog):
    with LLM(config=scripted_config(scripted)) as llm:
        llm.plugins.change(enable=[telling.FailingMark], options={"failing_mark": {"mark": 3}})
        (output,) = llm.generate("a", PARAMS, tags=MARKED)
        assert "its begin() failed: RuntimeError: no plan today" in output.outputs[0].error
        llm.generate("a", PARAMS, tags=MARKED)
    logged = [one.getMessage() for one in caplog.records if STATE in one.getMessage()]
    assert [text.rpartition(STATE)[2] for text in logged] == ["{'mark': 3, 'seen': 1}"]


def test_after_sleep_the_parts_are_those_of_the_latest_generation(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        llm.plugins.change(enable=[Mark], options={"mark": {"mark": 1}})
        llm.plugins.change(options={"mark": {"mark": 5}})
        llm.sleep(level=2)
        llm.wake_up()
        (output,) = llm.generate("a", PARAMS, tags=MARKED)
        assert output.outputs[0].token_ids == [FIRST + 5] * 4
        assert llm.plugins.states()["mark"]["worker"]["mark"] == 5
        llm.plugins.change(options={"mark": {"mark": 6}})
        (output,) = llm.generate("a", PARAMS, tags=MARKED)
        assert output.outputs[0].token_ids == [FIRST + 6] * 4


def test_users_of_a_part_can_be_ended(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        engine = llm.llm_engine
        llm.plugins.change(enable=[Mark])
        engine.add_request("user", "a", PARAMS, RequestExtras(tags=MARKED))
        engine.add_request("other", "a", PARAMS)
        found = {one.request_id: one.outputs[0] for one in engine.step()}
        llm.plugins.change(disable=["mark"], running="end")
        while engine.has_unfinished_requests():
            found |= {one.request_id: one.outputs[0] for one in engine.step()}
    assert found["user"].finish_reason == "abort"
    assert found["other"].finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"enable": ["support.plugins.tapping:Raw"]},
            r"activation_taps/raw: components of kind activation_taps cannot be changed while the "
            r"engine runs: the layers and keys of cached blocks .* restart it with the new",
        ),
        (
            {"enable": ["support.broken.poolers:Largest"]},
            r"poolers/largest: components of kind poolers cannot be changed .*: the tasks of a mod",
        ),
    ],
)
def test_kinds_that_need_a_restart_are_refused_with_the_reason(scripted, change, words):
    with LLM(config=scripted_config(scripted)) as llm, pytest.raises(ConfigError, match=words):
        llm.plugins.change(**change)


def test_changed_parts_leave_nothing_behind(scripted):
    """However many changes there are, there is one instance per process."""
    changing_parts.CLOSED.clear()
    with LLM(config=scripted_config(scripted)) as llm:
        for number in range(8):
            change = {"options": {"mark": {"mark": number}}} if number else {"enable": [Mark]}
            llm.plugins.change(**change)
            llm.generate("a", PARAMS, tags=MARKED)
        llm.engines.set_config({"scheduler.max_waiting": 9})
        assert changing_parts.CLOSED.count(5) == 3
    assert all(changing_parts.CLOSED.count(number) == 3 for number in range(8))
