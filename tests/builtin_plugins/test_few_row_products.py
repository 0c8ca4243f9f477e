"""An engine with `few_row_products = "always"`: the same tokens, and products in the kernels."""

from __future__ import annotations

import json

import pytest
from support.triton import kernel_device

from hardpoint import LLM, SamplingParams
from hardpoint.errors import ConfigError
from hardpoint.testing import write_scripted_model

pytest.importorskip("triton")

from hardpoint.kernels.triton import products

pytestmark = pytest.mark.skipif(kernel_device() != "cpu", reason="the reference is a CPU's")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 48,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
PROMPTS = [{"prompt_token_ids": list(range(1, 2 + count))} for count in (3, 1)]
"""Together with more than one row in a step, then with one, as one ends before the other."""
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
    for count in (4, 2)
]


@pytest.fixture
def model(tmp_path):
    write_scripted_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **LLAMA}))
    return str(tmp_path)


def generate(model, **config):
    settings = {"load": {"use": "dummy"}, **config}
    with LLM(model, dtype="float32", config=settings, progress=False) as llm:
        return [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]


def with_products(choice):
    return {"backend": "triton", "plugin": {"ops/triton": {"few_row_products": choice}}}


def test_tokens_are_those_of_torch(model, monkeypatch):
    counts, call = [], products.FewRowProduct.__call__
    monkeypatch.setattr(
        products.FewRowProduct, "__call__", lambda self, x: counts.append(len(x)) or call(self, x)
    )
    expected = generate(model, backend="torch")
    assert not counts
    results = generate(model, **with_products("always"))
    assert {1, 2} <= set(counts)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    for result, other in zip(results, expected, strict=True):
        for token, mine, theirs in zip(
            result.token_ids, result.logprobs, other.logprobs, strict=True
        ):
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_other_choices_are_rejected(model):
    message = r"plugin.ops/triton.few_row_products: expected .*'sometimes'"
    with pytest.raises(ConfigError, match=message):
        generate(model, **with_products("sometimes"))
