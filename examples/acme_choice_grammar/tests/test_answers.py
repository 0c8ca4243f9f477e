"""An engine answers with one of the texts, by the backend's name or its FQCN."""

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model


@pytest.mark.parametrize("use", ["choice_grammar", "choice_grammar:ChoiceGrammar"])
def test_an_answer_is_one_of_the_texts(tmp_path, use):
    enable = [] if ":" in use else [use]
    config = {"plugins": {"enable": enable}, "grammar": {"use": use}}
    params = [
        SamplingParams(structured={"choice": ["yes", "no"]}, temperature=9.0, seed=n)
        for n in range(8)
    ]
    with LLM(config=scripted_config(write_scripted_model(tmp_path), config)) as llm:
        texts = {output.outputs[0].text for output in llm.generate(["x"] * 8, params)}
    assert texts == {"yes", "no"}
