"""Small random transformers models, and how llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from hardpoint.builtin_plugins.loaders.gguf import _BLOCK_NAMES, _NAMES
from hardpoint.plugins import ModelError, WeightLoader

TINY = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def random_model(family: str, **fields):
    import transformers

    torch.manual_seed(2)
    config = getattr(transformers, f"{family}Config")(**TINY | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def write_gguf(path: Path, model, architecture: str, *, changes: dict | None = None) -> None:
    """Write a transformers model as llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 16,
        "context_length": config.max_position_embeddings,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    } | (changes or {})
    for key, value in values.items():
        name = f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 5)
    inner = {hf: name for name, hf in _BLOCK_NAMES.items()}
    outer = {hf: name for name, hf in _NAMES.items()}
    for name, tensor in model.state_dict().items():
        array = tensor.detach().float().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = array.shape[0] // 16
            array = permute_as_llama_cpp(array, heads)
        if name in outer:
            writer.add_tensor(outer[name], array)
        else:
            _, _, layer, *middle, end = name.split(".")
            writer.add_tensor(f"blk.{layer}.{inner['.'.join(middle)]}.{end}", array)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute_as_llama_cpp(array: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: HF rows j and j + half of a head become neighbours 2j and 2j + 1."""
    size = array.shape[0] // heads
    out = np.empty_like(array)
    for head in range(heads):
        for j in range(size // 2):
            out[head * size + 2 * j] = array[head * size + j]
            out[head * size + 2 * j + 1] = array[head * size + j + size // 2]
    return out


def refused(loader: WeightLoader, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        loader.config()
