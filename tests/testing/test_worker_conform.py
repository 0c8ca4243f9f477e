"""Every built-in sampler, attention backend and model passes the public conformance kit."""

from __future__ import annotations

import torch
from support.searching import kit_examples

from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.builtin_plugins.models.qwen import Qwen2, Qwen3
from hardpoint.builtin_plugins.sampler import DefaultSampler
from hardpoint.plugins import ModelConfig
from hardpoint.testing import (
    AttentionBackendSuite,
    HistoryAttention,
    ModelSuite,
    SamplerSuite,
    ScriptedModel,
    history_hash,
)

pytest_plugins = ["hardpoint.testing"]


class TestDefaultSampler(SamplerSuite):
    examples = kit_examples()
    sampler = DefaultSampler


class TestTorchAttention(AttentionBackendSuite):
    examples = kit_examples()
    backend = TorchAttention


def hash_of_history(spec, query, keys, values):
    value = history_hash(keys[:, 0, 0].long().tolist())
    return torch.tensor([[value >> 16, value & 0xFFFF]], dtype=torch.float64)


class TestHistoryAttention(AttentionBackendSuite):
    """Attention of another function, over whole numbers."""

    examples = kit_examples(0.3)
    backend = HistoryAttention
    dtypes = (torch.float32,)
    heads = ((1, 1),)
    head_sizes = (2,)
    windows = (None,)
    tolerance = 1e-9

    def draw(self, generator, shape):
        return torch.randint(0, 257, shape[:2], generator=generator)[..., None].expand(shape)

    reference = staticmethod(hash_of_history)


def config(family, **fields):
    hf = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return ModelConfig(
        architecture=f"{family}ForCausalLM",
        hf=hf | fields,
        vocab_size=61,
        max_position_embeddings=64,
    )


class TestLlama(ModelSuite):
    examples = kit_examples()
    model = Llama
    config = config("Llama", attention_bias=True, mlp_bias=True)


class TestMistral(ModelSuite):
    examples = kit_examples(0.3)
    model = Llama
    config = config("Mistral", sliding_window=7, tie_word_embeddings=True)


class TestQwen2(ModelSuite):
    examples = kit_examples(0.3)
    model = Qwen2
    config = config("Qwen2")


class TestQwen3(ModelSuite):
    examples = kit_examples(0.3)
    model = Qwen3
    config = config("Qwen3", head_dim=16)


class TestScriptedModel(ModelSuite):
    examples = kit_examples(0.3)
    model = ScriptedModel
    config = ModelConfig(
        architecture="ScriptedForCausalLM", hf={}, vocab_size=257, max_position_embeddings=64
    )
    dtypes = (torch.float32,)
    uses_positions = False
    tolerance = 1e-12
    attention = staticmethod(hash_of_history)
