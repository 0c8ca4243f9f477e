"""The package's own tests: the executor changes no token, in one process or two, and logs."""

import re

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("model"), {"say abc": " abc abc abc"})


def text(folder, **extra):
    with LLM(config=scripted_config(folder, extra)) as llm:
        return llm.generate("say abc", PARAMS)[0].outputs[0].text


@pytest.mark.parametrize("in_process", [True, False])
def test_it_changes_no_token_and_logs_each_step(folder, tmp_path, in_process):
    options = {"log": str(tmp_path / "steps.log")}
    config = {"executor": {"use": "timed"}, "plugin": {"timed": options}}
    assert text(folder, engine={"in_process": in_process}, **config) == " abc abc"
    lines = (tmp_path / "steps.log").read_text().splitlines()
    assert lines[0].startswith("step 1: 7 tokens, ")
    assert all(re.fullmatch(r"step \d+: [01] tokens, 0\.\d{6} s", line) for line in lines[1:])
