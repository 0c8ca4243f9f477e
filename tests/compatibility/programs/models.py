"""Runs frozen plugins of models' parts; fails if one does not work.

They are a model with its file and its tokenizer, an attention backend, operations and schemes of
few bits. The argument is an empty folder.
"""

import json
import sys
from pathlib import Path

import torch
from acme_gpt.file_format import write
from acme_gpt.model import TinyGPT

from hardpoint import LLM, SamplingParams
from hardpoint.plugins import ModelConfig, ModelContext
from hardpoint.testing import load_ops, write_scripted_model

FOLDER = Path(sys.argv[1])
PROMPTS = ["héllo", "a" * 30, "the same beginning, then one", "the same beginning, then two"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CONFIG = {
    "architectures": ["TinyGPT"],
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_heads": 4,
    "num_layers": 2,
}
GPT_TOKENS = [
    [195, 193, 195, 195, 195, 195, 195, 195],
    [195, 195, 195, 195, 195, 195, 195, 225],
    [193, 195, 195, 39, 195, 68, 175, 68],
    [59, 180, 59, 195, 195, 195, 195, 195],
]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "hidden_act": "silu",
}


def tokens(path, **config):
    extra = {"dtype": "float32", "weight_cache": {"path": "off"}, **config}
    with LLM(str(path), config=extra) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert llm.plugins.health().fallbacks == {}
    return [list(ids) for ids in found]


def check_gpt():
    config = ModelConfig(
        architecture="TinyGPT", hf=CONFIG, vocab_size=257, max_position_embeddings=64
    )
    place = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    context = ModelContext(
        name="TinyGPT", options=None, config=config, ops=load_ops(torch.float32), **place
    )
    source = torch.Generator().manual_seed(5)
    shapes = TinyGPT(context).weight_shapes()
    weights = {name: torch.randn(size, generator=source) * 0.2 for name, size in shapes.items()}
    path = FOLDER / "model.tgpt"
    write(path, CONFIG, weights)
    given = {
        "plugins": {"enable": ["TinyGPT", "tiny_gpt_file"]},
        "tokenizer": {"use": "byte_text"},
        "kv_cache": {"block_size": 4, "num_blocks": 24},
    }
    assert tokens(path, **given) == GPT_TOKENS
    parts = {"attention": {"use": "by_sequence"}, "ops": {"use": "compat_ops"}}
    assert tokens(path, **given, **parts) == GPT_TOKENS


def check_few_bits():
    folder = write_scripted_model(FOLDER / "llama")
    config = json.loads((folder / "config.json").read_text()) | LLAMA
    (folder / "config.json").write_text(json.dumps(config))
    given = {
        "plugins": {"enable": ["nf4", "ternary"]},
        "load": {"use": "dummy"},
        "ops": {"use": "torch"},
    }
    whole = tokens(folder, **given)
    mine = {**given, "ops": {"use": "compat_ops"}, "attention": {"use": "by_sequence"}}
    assert tokens(folder, **mine) == whole
    few = [tokens(folder, **given, quantization={"use": use}) for use in ("nf4", "ternary")]
    assert whole not in few
    assert few[0] != few[1]


check_gpt()
check_few_bits()
