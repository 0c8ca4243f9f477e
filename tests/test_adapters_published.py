"""A published package of logits processors, unchanged, on the demo model."""

from __future__ import annotations

import sys

import pytest
from support.driving import run
from support.internals import engine_of
from support.processes import ROOT

from hardpoint import LLM, SamplingParams

sys.path.insert(0, str(ROOT / "examples" / "hardpoint_vllm" / "src"))

pytest.importorskip("logits_processor_zoo", reason="part of the extra `test`")
pytestmark = pytest.mark.nightly

ENABLED = {
    "per_request": "per_request",
    "trigger": "trigger_in_transformers_form",
    "cite": "cite",
    "length": "length",
    "choice": "choice",
}
PROMPT = "The river flows past the old mill and the bakery. The river"


@pytest.fixture(scope="module")
def llm():
    config = {
        "device": "cpu",
        "plugins": {
            "enable": [
                "hardpoint_vllm:VLLM",
                *(
                    {"use": f"support.plugins.zoo_processors:{target}", "name": name}
                    for name, target in ENABLED.items()
                ),
            ]
        },
    }
    with LLM("smollm2", dtype="float32", max_model_len=256, config=config) as llm:
        yield llm


def job(name, prompt=PROMPT, plugin_args=None, **fields):
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | fields
    return name, prompt, SamplingParams(**params, plugin_args=plugin_args or {})


def old(which):
    """Through the factory of per-request callables."""
    return {"per_request": {"extra_args": {"which": which}}}


def new(which):
    """Through transformers' form."""
    return {which: {}}


@pytest.fixture(scope="module")
def results(llm):
    """Everything in one batch, between requests that use nothing."""
    jobs = [job("plain"), job("other", "Bread is")]
    for which in ("cite", "length", "choice", "trigger"):
        jobs += [job(f"old {which}", plugin_args=old(which))]
        jobs += [job(f"new {which}", plugin_args=new(which))]
    jobs += [job("last")]
    found = run(engine_of(llm), jobs)
    assert all(result[0][0][3] == "length" for result in found.values()), found
    return {name: (result[0][0][1], result[0][0][2]) for name, result in found.items()}


def test_bystanders_get_what_they_get_without(llm, results):
    without = run(engine_of(llm), [job("plain"), job("other", "Bread is")])
    for name in ("plain", "other"):
        assert results[name] == without[name][0][0][1:3]
    assert results["last"] == results["plain"]


@pytest.mark.parametrize("which", ["cite", "length", "choice", "trigger"])
def test_both_forms_of_a_processor_do_the_same(results, which):
    assert results[f"old {which}"] == results[f"new {which}"]
    assert results[f"old {which}"] != results["plain"]


def test_they_do_what_they_promise(llm, results):
    prompt = set(llm.tokenizer.encode(PROMPT))
    assert prompt.issuperset(results["old cite"][0])
    assert not prompt.issuperset(results["plain"][0])
    assert llm.tokenizer.eos_token_ids[0] in results["old length"][0]
    assert set(results["old choice"][1]) <= {"1", "2"}
    assert " the as we all know," in results["old trigger"][1]
