"""Texts with the watermark are found, others are not; distributions stay as they are."""

from __future__ import annotations

import pytest
from acme_watermark import Watermark, detect, seed_of

from hardpoint import LLM, SamplingParams
from hardpoint.testing import HookSuite, scripted_config, write_scripted_model

pytest_plugins = ["hardpoint.testing"]
KEY = "a secret of sixteen letters"


class TestWatermark(HookSuite):
    hooks = Watermark
    options = {"key": KEY}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_scripted_model(tmp_path_factory.mktemp("model"))
    config = scripted_config(folder, {"plugin": {"watermark": {"key": KEY}}})
    config["plugins"]["enable"].append("watermark")
    with LLM(config=config) as llm:
        yield llm


def params(**fields):
    return SamplingParams(temperature=8.0, max_tokens=60, ignore_eos=True, **fields)


def test_outputs_are_found_with_the_key_alone(llm):
    for output in llm.generate(["one", "another", "a third prompt"], params(n=2)):
        for completion in output.outputs:
            assert detect(completion.token_ids, KEY, completions=2) < 1e-6
            assert detect(completion.token_ids, "another key of many letters") > 1e-3


def test_requests_with_a_seed_are_repeatable_and_greedy_ones_as_ever(llm):
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    first, again, plain = llm.generate(["one"] * 3, [params(seed=5), params(seed=5), greedy])
    assert first.outputs == again.outputs
    assert detect(first.outputs[0].token_ids, KEY) < 1e-6
    assert detect(plain.outputs[0].token_ids, KEY) > 1e-3


def test_outputs_of_a_prompt_differ(llm):
    texts = {tuple(o.outputs[0].token_ids) for o in llm.generate(["one"] * 12, params())}
    assert len(texts) > 4


def test_seeds_are_those_of_the_key():
    assert seed_of(KEY, 1) == seed_of(KEY, 1) != seed_of(KEY, 2)
    assert -(2**63) <= seed_of(KEY, 3) < 2**63
