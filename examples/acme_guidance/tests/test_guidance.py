"""Guided requests get the tokens of combined logits, and pass the conformance kit."""

from __future__ import annotations

import pytest
from acme_guidance import Contrast, Guidance
from hypothesis import strategies as st

from hardpoint import LLM, RequestError, SamplingParams
from hardpoint.testing import StepPartSuite, scripted_config, serve, write_scripted_model

pytest_plugins = ["hardpoint.testing"]

ENABLED = {"plugins": {"enable": ["guidance", "contrast"]}}


class TestGuidance(StepPartSuite):
    part = Guidance
    arguments = st.builds(
        dict,
        negative_prompt=st.sampled_from(["no", [1, 2]]),
        scale=st.sampled_from([0.0, 1.0, 3.0]),
    )


class TestContrast(StepPartSuite):
    part = Contrast
    arguments = st.builds(dict, alpha=st.sampled_from([0.1, 1.0]), beta=st.sampled_from([0.0, 1.0]))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_scripted_model(tmp_path_factory.mktemp("model") / "scripted")
    with LLM(config=scripted_config(folder, ENABLED)) as llm:
        yield llm


def tokens(llm, prompt, **plugin_args):
    params = SamplingParams(temperature=0.0, max_tokens=6, plugin_args=plugin_args)
    return llm.generate([prompt], params)[0].outputs[0].token_ids


def test_a_scale_chooses_between_the_prompts(llm):
    plain, other = tokens(llm, "a prompt"), tokens(llm, "another")
    guidance = {"negative_prompt": "another"}
    assert tokens(llm, "a prompt", guidance={**guidance, "scale": 1.0}) == plain
    first = tokens(llm, "a prompt", guidance={**guidance, "scale": 0.0})[0]
    assert first == other[0]


def test_equal_prompts_change_nothing(llm):
    plain = tokens(llm, "a prompt")
    assert tokens(llm, "a prompt", contrast={"beta": 2.0}) == plain
    assert tokens(llm, "a prompt", guidance={"negative_prompt": "a prompt", "scale": 9}) == plain


def test_a_wrong_prompt_is_refused_by_name(llm):
    with pytest.raises(RequestError, match="prompt: expected at least one token"):
        tokens(llm, "a prompt", guidance={"negative_prompt": []})
    with pytest.raises(RequestError, match=r"plugin_args\.guidance\.scale: expected .*-1"):
        tokens(llm, "a prompt", guidance={"negative_prompt": "b", "scale": -1})


def test_the_server_guides_requests(llm):
    arguments = {"negative_prompt": "another", "scale": 2.0}
    expected = tokens(llm, "a prompt", guidance=arguments)
    with serve(ENABLED) as server:
        body = {
            "prompt": "a prompt",
            "max_tokens": 6,
            "temperature": 0,
            "return_token_ids": True,
            "plugin_args": {"guidance": arguments},
        }
        answer = server.ask("/v1/completions", body)
        assert answer.status == 200, server.log
        assert answer.json()["choices"][0]["token_ids"] == expected
        assert answer.json()["usage"]["completion_tokens"] == 6
