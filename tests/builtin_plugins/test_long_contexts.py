"""Long sequences in chunks: the logits of one whole pass of transformers, for each RoPE scaling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.builtins.model_harness import Runner, load_model, open_loader

from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.llama import Llama

LENGTH = 32768
SHAPE = {  # heads of the demo model, a third of them, and few layers
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": 2,
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 16.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": [1.0 + number for number in range(32)],
        "original_max_position_embeddings": 2048,
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("scaling", SCALINGS)
@torch.inference_mode()
def test_chunks_of_a_long_sequence_equal_transformers(scaling: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(5)
    parameters = {"rope_theta": 10000.0} | SCALINGS[scaling]
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, rope_parameters=parameters)
    ).eval()
    for parameter in reference.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.06)
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(0, SHAPE["vocab_size"], (LENGTH,)).tolist()
    hidden = reference.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    expected = reference.lm_head(hidden)
    loader = open_loader(SafetensorsLoader, tmp_path)
    model = load_model(Llama, loader, dtype=torch.float32, max_model_len=LENGTH)
    runner = Runner(model, dtype=torch.float32, num_blocks=LENGTH // 16 + 2)
    start, rows = 0, 1000
    while start < LENGTH:
        logits = runner.logits([("a", tokens[start : start + rows])])
        difference = (logits - expected[start : start + len(logits)]).abs().max()
        assert difference < 1e-4 * expected.abs().max(), f"positions from {start}"
        start, rows = start + len(logits), 5000 - rows  # 1000 and 4000 in turn
