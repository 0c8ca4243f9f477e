"""Live changes of step parts: requests of two generations, each with the halves of its own."""

from __future__ import annotations

import pytest
from support.plugins import changing_parts
from support.plugins.changing_parts import FIRST, Breaking, Fixed, Keyed, Mark

from hardpoint import LLM, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.errors import ConfigError, HardpointError
from hardpoint.testing import scripted_config

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
WITH_FIGURES = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, include=["mark"])
MARKED = {"marked": "yes"}
EXTRAS = RequestExtras(tags=MARKED)
MODES = {
    "in process": {},
    "own process": {"engine": {"in_process": False}},
    "tensor 2": {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}},
}


@pytest.fixture(
    params=[
        "in process",
        pytest.param("own process", marks=pytest.mark.nightly),
        pytest.param("tensor 2", marks=pytest.mark.nightly),
    ]
)
def llm(request, scripted):
    changing_parts.CLOSED.clear()
    with LLM(config=scripted_config(scripted, MODES[request.param])) as opened:
        yield opened


def run(engine, earlier=()):
    """Run all requests to their end; return their outputs by id, with those of earlier steps."""
    found = {one.request_id: one.outputs[0] for one in earlier if one.finished}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output.outputs[0]
    return found


def tokens(llm, params=PARAMS, tags=MARKED):
    (output,) = llm.generate("a", params, tags=tags)
    return output.outputs[0].token_ids


def test_enabled_changed_replaced_and_disabled(llm):
    plain = tokens(llm)
    llm.plugins.change(enable=[Mark])
    assert tokens(llm) == [FIRST] * 5
    assert tokens(llm, tags={}) == plain
    llm.plugins.change(options={"mark": {"mark": 4}})
    assert tokens(llm) == [FIRST + 4] * 5
    states = llm.plugins.states()["mark"]
    assert {name: state["mark"] for name, state in states.items()} == {
        "frontend": 4,
        "engine": 4,
        "worker": 4,
    }
    llm.plugins.change(disable=["mark"])
    assert tokens(llm) == plain


def test_requests_finish_with_theirs(llm):
    engine = llm.llm_engine
    llm.plugins.change(enable=[Mark], options={"mark": {"mark": 1}})
    engine.add_request("first", "a", WITH_FIGURES, EXTRAS)
    earlier = engine.step()
    llm.plugins.change(options={"mark": {"mark": 2}})
    engine.add_request("second", "a", WITH_FIGURES, EXTRAS)
    earlier += engine.step()
    llm.plugins.change(disable=["mark"])
    engine.add_request("third", "a", PARAMS, EXTRAS)
    found = run(engine, earlier)
    assert found["first"].token_ids == [FIRST + 1] * 5
    assert found["second"].token_ids == [FIRST + 2] * 5
    assert found["first"].part_figures["mark"] == {"mark": 1}
    assert found["second"].part_figures["mark"] == {"mark": 2}
    assert {one.finish_reason for one in found.values()} == {"length"}
    assert {one.error for one in found.values()} == {None}


def test_what_no_request_uses_is_closed(scripted):
    changing_parts.CLOSED.clear()
    with LLM(config=scripted_config(scripted)) as llm:
        engine = llm.llm_engine
        llm.plugins.change(enable=[Mark], options={"mark": {"mark": 1}})
        engine.add_request("first", "a", PARAMS, EXTRAS)
        engine.step()
        llm.plugins.change(options={"mark": {"mark": 2}})
        assert changing_parts.CLOSED == []
        run(engine)
        engine.add_request("next", "a", PARAMS)  # its plan reports the end to the part
        run(engine)
        llm.engines.set_config({"scheduler.max_waiting": 7})
        assert changing_parts.CLOSED == [1, 1, 1]  # of engine, worker and frontend
    assert sorted(changing_parts.CLOSED) == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("part", "error", "words"),
    [
        (Fixed, ConfigError, r"'fixed'.*: it cannot be changed while .*its class does not set ch"),
        (Keyed, ConfigError, r"'keyed'.*: its engine_half has block_key, on which the keys of cac"),
        (Breaking, HardpointError, r"'breaking'.*its worker_half\(\) failed: .*no worker half tod"),
    ],
)
def test_one_that_cannot_be_changed_is_refused_by_name(scripted, part, error, words):
    with LLM(config=scripted_config(scripted)) as llm:
        before = llm.engines.settings()
        with pytest.raises(error, match=words):
            llm.plugins.change(enable=[part])
        assert llm.engines.settings() == before
        llm.plugins.change(enable=[Mark])
        assert tokens(llm) == [FIRST] * 5


def test_one_that_was_there_at_the_start(scripted):
    tables = {"plugins": {"enable": [changing_parts.__name__ + ":Mark"]}}
    with LLM(config=scripted_config(scripted, tables)) as llm:
        engine = llm.llm_engine
        engine.add_request("first", "a", PARAMS, EXTRAS)
        engine.step()
        llm.plugins.change(options={"mark": {"mark": 3}})
        engine.add_request("second", "a", PARAMS, EXTRAS)
        found = run(engine)
    assert found["first"].token_ids == [FIRST] * 5
    assert found["second"].token_ids == [FIRST + 3] * 5
