"""An attention backend from outside: built, installed, and named by configuration alone."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.processes import ROOT, run
from support.strangers import RESOLVE

# A program: texts that the model continues prompts with, by a backend each.
GENERATE = """
import json, sys
from hardpoint import LLM, SamplingParams

texts = {}
prompts = ["The capital of France is", "Once upon a time", "One, two, three, four,"]
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
for use in sys.argv[1:]:
    config = {"dtype": "float32", "max_model_len": 512, "kv_cache": {"num_blocks": 64}}
    config["attention"] = {"use": use}
    with LLM("smollm2", config=config) as llm:
        texts[use] = [output.outputs[0].text for output in llm.generate(prompts, greedy)]
print(json.dumps(texts))
"""


@pytest.mark.nightly
def test_its_own_tests_pass(acme_attention, tmp_path):
    shutil.copytree(ROOT / "examples" / "acme_attention" / "tests", tmp_path / "tests")
    pytest_run = (sys.executable, "-m", "pytest", "-q", "tests")
    assert "passed" in run(*pytest_run, path=acme_attention, cwd=tmp_path, examples=0.1)


def test_installed_is_not_enabled(acme_attention, tmp_path):
    done = run(sys.executable, "-c", RESOLVE, "{}", path=acme_attention, cwd=tmp_path)
    result = json.loads(done)
    labels = {label.split(" ")[0] for label in result["not_enabled"]}
    assert labels == {"attention_backends/by_sequence"}
    assert result["imported"] == []


def test_configuration_alone_replaces_the_default(acme_attention, tmp_path):
    """A real model gives the same text, whether the backend is named or its class is."""
    uses = ("auto", "by_sequence", "acme_attention.by_sequence:BySequence")
    done = run(sys.executable, "-c", GENERATE, *uses, path=acme_attention, cwd=tmp_path)
    texts = json.loads(done)
    assert "Paris" in texts["auto"][0]
    assert [texts[use] for use in uses] == [texts["auto"]] * len(uses)
