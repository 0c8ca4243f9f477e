"""A small Llama with random weights, as safetensors."""

import json

import torch
from safetensors.torch import save_file

from hardpoint.testing import write_scripted_model

HIDDEN, WIDTH, KEYS, VOCAB, LAYERS = 128, 256, 64, 257, 2


def random_weights():
    """Return tensors by name, the same each time."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
            f"{name}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (KEYS, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (KEYS, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{name}.mlp.gate_proj.weight": (WIDTH, HIDDEN),
            f"{name}.mlp.up_proj.weight": (WIDTH, HIDDEN),
            f"{name}.mlp.down_proj.weight": (HIDDEN, WIDTH),
        }
    source = torch.Generator().manual_seed(5)
    return {
        name: 1 + torch.randn(shape, generator=source) / 8
        if len(shape) == 1
        else torch.randn(shape, generator=source) / 8
        for name, shape in shapes.items()
    }


def write_model(folder, weights):
    """Write a checkpoint with tied embeddings, and a tokenizer of bytes; return its path."""
    folder.mkdir()
    write_scripted_model(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 256,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder
