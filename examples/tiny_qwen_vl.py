"""Writes a small Qwen2.5-VL or Qwen3-VL of random weights as a folder that engines open."""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

IMAGE = "<|image_pad|>"
BEGIN, END = "<|vision_start|>", "<|vision_end|>"
SPECIAL = ["<pad>", "<|im_end|>", "<unk>", BEGIN, END, IMAGE, "<|video_pad|>"]
LETTERS = string.ascii_letters + string.digits + " .,:?!<>_{}\"'\n"
MIN_PIXELS, MAX_PIXELS = 16 * 16, 64 * 64
TEXT = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
TOKENS = {
    "image_token_id": SPECIAL.index(IMAGE),
    "video_token_id": SPECIAL.index("<|video_pad|>"),
    "vision_start_token_id": SPECIAL.index(BEGIN),
    "vision_end_token_id": SPECIAL.index(END),
}


def config_2_5(**text: Any) -> transformers.Qwen2_5_VLConfig:
    """Return the configuration of a Qwen2.5-VL; `text` changes the fields of the text model."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "window_size": 16,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    }
    fields = {**TEXT, "rope_parameters": rope, **text}
    return transformers.Qwen2_5_VLConfig(text_config=fields, vision_config=vision, **TOKENS)


def config_3(**text: Any) -> transformers.Qwen3VLConfig:
    """Return the configuration of a Qwen3-VL; `text` changes the fields of the text model."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    vision = {
        "depth": 4,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "num_position_embeddings": 36,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [1, 2],
    }
    fields = {**TEXT, "head_dim": 16, "rope_parameters": rope, **text}
    return transformers.Qwen3VLConfig(text_config=fields, vision_config=vision, **TOKENS)


def config_3_moe(**text: Any) -> transformers.Qwen3VLMoeConfig:
    """Return the configuration of a Qwen3-VL with experts."""
    dense = config_3(**text).to_dict()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    fields = {**dense["text_config"], **experts, "model_type": "qwen3_vl_moe_text"}
    vision = {**dense["vision_config"], "model_type": "qwen3_vl_moe_vision"}
    return transformers.Qwen3VLMoeConfig(text_config=fields, vision_config=vision, **TOKENS)


KINDS = {
    "2.5": (transformers.Qwen2_5_VLForConditionalGeneration, config_2_5),
    "3": (transformers.Qwen3VLForConditionalGeneration, config_3),
    "3-moe": (transformers.Qwen3VLMoeForConditionalGeneration, config_3_moe),
}


def write_model(folder: str | Path, kind: str = "2.5", **text: Any) -> Path:
    """Write model, tokenizer and settings of images; return the folder."""
    folder = Path(folder)
    torch.manual_seed(3)
    cls, config = KINDS[kind]
    model = cls(config(**text)).eval()
    for parameter in model.parameters():
        # Large enough that each image, and each token of it, changes the tokens after it.
        parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    settings = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters and special tokens."""
    tokens = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, [], unk_token="<unk>"))
    bpe.decoder = tokenizers.decoders.Fuse()
    names = {"image_token": IMAGE, "video_token": SPECIAL[6]}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        extra_special_tokens={**names, "vision_bos_token": BEGIN, "vision_eos_token": END},
    ).save_pretrained(folder)


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else "2.5"
    print(write_model(f"tiny-qwen-{kind}-vl", kind))
