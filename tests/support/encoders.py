"""Small random models that attend in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hardpoint.testing import write_scripted_model

LIMIT = 40
SIZES = {
    "vocab_size": 261,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}
FAMILIES = {
    "Bert": {"max_position_embeddings": LIMIT},
    "Roberta": {"max_position_embeddings": LIMIT + 2},
    "XLMRoberta": {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1},
    "ModernBert": {
        "max_position_embeddings": LIMIT,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        **dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 2),
    },
}
LENGTHS = [1, 2, 3, 5, 6, 9, 17, LIMIT - 1, LIMIT]
PROMPTS = [[3 + (7 * n + 5 * length) % 250 for n in range(length)] for length in LENGTHS]
TABLE = {
    "dtype": "float32",
    "device": "cpu",
    "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
}


def write_encoder(folder: Path, family: str, head: str = "Model", **fields: Any) -> Any:
    """Write a random model with a head, by default none; return the transformers model."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES.get(family, {}) | fields)
    model = getattr(transformers, f"{family}{head}")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    write_scripted_model(folder)
    model.save_pretrained(folder)
    return model
