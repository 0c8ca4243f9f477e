"""Pairs of features that are refused: each error names both, and the documentation has them."""

from __future__ import annotations

import pytest
from support.gemma_images import write_model
from support.refused_pairs import HERE, PAGE, PAIRS, written

from hardpoint import LLM, HardpointError, SamplingParams
from hardpoint.testing import scripted_config

SLIDING = {"use": f"{HERE}.refused:SlidingModel", "name": "ScriptedForCausalLM"}

HYBRID = {
    "use": "support.builtins.state_models:HybridModel",
    "name": "ScriptedForCausalLM",
}


@pytest.fixture(scope="module")
def folders(scripted, tmp_path_factory):
    """The model of each pair, by whether it reads images."""
    one_layer = {"num_hidden_layers": 1, "layer_types": None}
    return {False: scripted, True: write_model(tmp_path_factory.mktemp("gemma3"), **one_layer)}


def config_of(pair, folders):
    if pair.images:
        return {"model": str(folders[True]), "max_model_len": 128, **pair.config}
    config = scripted_config(folders[False], pair.config)
    if pair.windows:
        config["plugins"] = {"enable": [SLIDING]}
    if pair.states:
        config["plugins"] = {"enable": [HYBRID]}
    return config


def ask(llm, pair):
    params = SamplingParams(**pair.request)
    if pair.conversation:
        with llm.open_conversation(params) as talk:
            list(talk.send(pair.prompt))
    else:
        llm.generate([pair.prompt], params, **pair.options)


def names(pair):
    return f"{pair.one} with {pair.other}"


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.request is None], ids=names)
def test_what_does_not_go_together_is_refused_at_the_start_by_name(folders, pair):
    with pytest.raises(HardpointError) as caught:
        LLM(config=config_of(pair, folders))
    assert all(name in str(caught.value) for name in pair.names), caught.value


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.request is not None], ids=names)
def test_a_request_of_what_does_not_go_together_is_refused_by_name(folders, pair):
    with LLM(config=config_of(pair, folders)) as llm:
        with pytest.raises(HardpointError) as caught:
            ask(llm, pair)
        assert all(name in str(caught.value) for name in pair.names), caught.value
        assert llm.generate(["say"], SamplingParams(max_tokens=1))[0].finished


def test_the_documented_table_is_up_to_date():
    page = PAGE.read_text()
    assert page == written(page), "run PYTHONPATH=tests python -m support.refused_pairs"
