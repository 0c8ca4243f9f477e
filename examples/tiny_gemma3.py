"""Writes a small Gemma 3 with images, of random weights, as a folder that engines open."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

IMAGE = "<start_of_image>"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", IMAGE, "<end_of_image>", "<image_soft_token>"]
NEWLINES = ["\n" * count for count in range(1, 7)]
LETTERS = string.ascii_letters + string.digits + " .,:?!<>_{}\"'"
SOFT_TOKENS, SIZE = 16, 32


def config(**text: Any) -> transformers.Gemma3Config:
    """Return the configuration; `text` changes the text model's."""
    fields = {
        "vocab_size": 120,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        "max_position_embeddings": 512,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": 4,
        "vision_use_head": False,
    }
    return transformers.Gemma3Config(
        text_config=fields | text,
        vision_config=vision,
        mm_tokens_per_image=SOFT_TOKENS,
        boi_token_index=SPECIAL.index(IMAGE),
        eoi_token_index=SPECIAL.index("<end_of_image>"),
        image_token_index=SPECIAL.index("<image_soft_token>"),
    )


def write_model(folder: str | Path, **text: Any) -> Path:
    """Write model, tokenizer and settings of images; return the folder."""
    folder = Path(folder)
    torch.manual_seed(3)
    model = transformers.Gemma3ForConditionalGeneration(config(**text)).eval()
    for parameter in model.parameters():
        # Large enough that each image, and each token of it, changes what comes after.
        parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    settings = {"size": {"height": SIZE, "width": SIZE}, "do_pan_and_scan": None}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters, and of newlines as one token, as Gemma's has them."""
    tokens = {token: index for index, token in enumerate([*SPECIAL, *NEWLINES, *LETTERS])}
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n"), ("\n" * 4, "\n"), ("\n" * 4, "\n\n")]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, merges, unk_token="<unk>"))
    bpe.decoder = tokenizers.decoders.Fuse()
    names = {"boi_token": IMAGE, "eoi_token": SPECIAL[5], "image_token": SPECIAL[6]}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens=names,
    ).save_pretrained(folder)


if __name__ == "__main__":
    print(write_model("tiny-gemma3"))
