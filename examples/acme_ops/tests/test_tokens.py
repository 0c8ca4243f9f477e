"""A small model with random weights generates the tokens that it does with other operations."""

import json

from hardpoint import LLM, SamplingParams
from hardpoint.testing import write_scripted_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


def tokens(folder, use):
    settings = {"load": {"use": "dummy"}, "dtype": "float32", "device": "cpu", "ops": {"use": use}}
    with LLM(str(folder), config={**settings, "attention": {"use": "torch"}}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        return [o.outputs[0].token_ids for o in llm.generate(["one", "another prompt"], params)]


def test_tokens_are_equal(tmp_path):
    folder = write_scripted_model(tmp_path)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert tokens(folder, "one_call") == tokens(folder, "torch")
