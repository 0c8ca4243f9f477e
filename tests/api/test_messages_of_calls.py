"""Errors and texts that a program or a notebook shows."""

import re

import pytest

from hardpoint import LLM, RequestError, SamplingParams
from hardpoint.errors import PluginFaultError


def shown_lines(error):
    return error._render_traceback_()  # as IPython calls it


def test_the_refused_prompt_is_named(llm):
    with pytest.raises(RequestError, match=r"^prompts\[1\]: "):
        llm.generate(["a", ""])
    with pytest.raises(RequestError, match="^prompt: "):
        llm.generate([""])
    with pytest.raises(RequestError, match="^prompt: "):
        llm.generate("")


@pytest.mark.parametrize(
    ("name", "near"), [("max_token", "max_tokens"), ("top_pp", "top_p"), ("tempreature", "temp.*")]
)
def test_an_unknown_parameter_suggests_a_known_one(name, near):
    words = rf"SamplingParams: Unexpected keyword argument '{name}' \(did you mean '{near}'\?\)"
    with pytest.raises(TypeError, match=words):
        SamplingParams(**{name: 1})
    with pytest.raises(TypeError, match="^Unexpected keyword argument 'qqqqqq'$"):
        SamplingParams(qqqqqq=1)


def test_the_text_of_a_model(llm):
    assert re.fullmatch(r"LLM\('.+', max_model_len=\d+\)", repr(llm))
    assert repr(LLM.__new__(LLM)) == "<LLM>"


def test_notebooks_show_the_lines_of_the_caller_alone(llm):
    try:
        llm.generate("")
    except RequestError as error:
        lines = shown_lines(error)
    assert len(lines) == 2
    assert lines[0].startswith(f"  {__file__}:")
    assert lines[0].endswith('llm.generate("")')
    assert lines[1].startswith("RequestError: prompt: ")


def test_notebooks_show_few_lines_of_notes():
    error = PluginFaultError("it failed")
    error.add_note("\n".join(map(str, range(100))))
    assert shown_lines(error) == ["PluginFaultError: it failed", *map(str, range(10))]
