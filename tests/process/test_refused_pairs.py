"""Pairs of features that are refused: each error names both, and the documentation has them."""

from __future__ import annotations

import pytest
from support.refused_pairs import HERE, PAGE, PAIRS, written

from hardpoint import LLM, HardpointError, SamplingParams
from hardpoint.testing import scripted_config

SLIDING = {"use": f"{HERE}.refused:SlidingModel", "name": "ScriptedForCausalLM"}


def config_of(pair, folder):
    config = scripted_config(folder, pair.config)
    if pair.windows:
        config["plugins"] = {"enable": [SLIDING]}
    return config


def names(pair):
    return f"{pair.one} with {pair.other}"


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.request is None], ids=names)
def test_what_does_not_go_together_is_refused_at_the_start_by_name(scripted, pair):
    with pytest.raises(HardpointError) as caught:
        LLM(config=config_of(pair, scripted))
    assert all(name in str(caught.value) for name in pair.names), caught.value


def ask(llm, pair, params):
    """Send the request of a pair, or the part of a conversation."""
    if pair.part is None:
        llm.generate(["say"], params)
        return
    with llm.open_conversation() as talk:
        list(talk.send(pair.part, params))


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.request is not None], ids=names)
def test_a_request_of_what_does_not_go_together_is_refused_by_name(scripted, pair):
    with LLM(config=config_of(pair, scripted)) as llm:
        params = SamplingParams(**pair.request)
        with pytest.raises(HardpointError) as caught:
            ask(llm, pair, params)
        assert all(name in str(caught.value) for name in pair.names), caught.value
        assert llm.generate(["say"], SamplingParams(max_tokens=1))[0].finished


def test_the_documented_table_is_up_to_date():
    page = PAGE.read_text()
    assert page == written(page), "run PYTHONPATH=tests python -m support.refused_pairs"
