"""A small random Gemma 3 with images as a folder, and what transformers makes of its prompts."""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SOFT_TOKENS = 16
SIZE = 32
IMAGE = "<start_of_image>"
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", IMAGE, "<end_of_image>", "<image_soft_token>")
SHAPES = ((13, 40), (77, 31), (1, 9), (64, 64))
"""Heights and widths of images."""


def config(**text: Any):
    import transformers

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
    return transformers.Gemma3Config(
        text_config=fields | text,
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": SIZE,
            "patch_size": 4,
            "vision_use_head": False,
        },
        mm_tokens_per_image=SOFT_TOKENS,
        boi_token_index=SPECIAL.index(IMAGE),
        eoi_token_index=5,
        image_token_index=6,
    )


def write_model(folder: Path, **text: Any) -> Path:
    """Write model, tokenizer and settings of images; return the folder."""
    import torch
    import transformers

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
    import tokenizers
    import transformers

    letters = string.ascii_letters + string.digits + " .,:?!<>_{}\"'"
    words = {
        token: index for index, token in enumerate([*SPECIAL, *("\n" * n for n in range(1, 7))])
    }
    words |= {letter: len(words) + index for index, letter in enumerate(letters)}
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n"), ("\n" * 4, "\n"), ("\n" * 4, "\n\n")]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges, unk_token="<unk>"))
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


def image(index: int) -> np.ndarray:
    """Return an image, uint8 [height, width, 3]."""
    height, width = SHAPES[index % len(SHAPES)]
    return np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompt(*parts: str | int) -> dict[str, Any]:
    """Return a prompt of texts and of images by their indices."""
    text = "".join(part if isinstance(part, str) else IMAGE for part in parts)
    images = [image(part) for part in parts if not isinstance(part, str)]
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


class Reference:
    """The same model in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        images = Gemma3ImageProcessorPil.from_pretrained(folder)
        self._processor = Gemma3Processor(images, tokenizer, image_seq_length=SOFT_TOKENS)
        self._model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def inputs(self, prompt: dict[str, Any]):
        from PIL import Image

        given = prompt.get("multi_modal_data", {}).get("image", [])
        images = [[Image.fromarray(array) for array in given]] if given else None
        return self._processor(
            images=images, text=[prompt["prompt"]], return_tensors="pt", add_special_tokens=False
        )

    def logprobs(self, prompt: dict[str, Any]) -> tuple[list[int], np.ndarray]:
        """Return the prompt's tokens, and log-probabilities after each, [tokens, vocab]."""
        import torch

        inputs = self.inputs(prompt)
        with torch.inference_mode():
            logits = self._model(**inputs).logits[0]
        return inputs["input_ids"][0].tolist(), logits.float().log_softmax(-1).numpy()

    def greedy(self, prompt: dict[str, Any], count: int) -> list[int]:
        """Return the likeliest tokens that follow."""
        import torch

        inputs = self.inputs(prompt)
        with torch.inference_mode():
            out = self._model.generate(
                **inputs, max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        return out[0, inputs["input_ids"].shape[1] :].tolist()


@functools.cache
def reference(folder: Path) -> Reference:
    """Return the reference of a folder, loaded once."""
    return Reference(folder)


def distance(prompt_logprobs: Sequence[Any], expected: np.ndarray) -> float:
    """Return the largest difference of log-probabilities from those after each token."""
    return max(
        abs(found.logprob - expected[position - 1, token])
        for position, entries in enumerate(prompt_logprobs)
        for token, found in (entries or {}).items()
    )
