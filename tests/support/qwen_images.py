"""Small random Qwen2.5-VL and Qwen3-VL as folders, and the results of transformers."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .processes import ROOT

BEGIN, IMAGE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
SHAPES = ((13, 40), (77, 31), (1, 9), (64, 64), (24, 48))
"""Heights and widths of images."""


def example():
    """Return examples/tiny_qwen_vl.py as a module."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    import tiny_qwen_vl

    return tiny_qwen_vl


def write_model(folder: Path, kind: str, **text: Any) -> Path:
    """Write the model of the example; return the folder."""
    return example().write_model(folder, kind, **text)


def image(index: int) -> np.ndarray:
    """Return an image, uint8 [height, width, 3]."""
    height, width = SHAPES[index % len(SHAPES)]
    return np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompt(*parts: str | int) -> dict[str, Any]:
    """Return a prompt of texts and of images by their indices."""
    text = "".join(part if isinstance(part, str) else f"{BEGIN}{IMAGE}{END}" for part in parts)
    images = [image(part) for part in parts if not isinstance(part, str)]
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


class Reference:
    """The same model in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self._images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def inputs(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the model: each placeholder as often as its image has tokens."""
        import torch
        from PIL import Image

        arrays = prompt.get("multi_modal_data", {}).get("image", [])
        text, pad = prompt["prompt"], self._tokenizer.convert_tokens_to_ids(IMAGE)
        if not arrays:
            return dict(self._tokenizer(text, return_tensors="pt"))
        images = self._images([Image.fromarray(array) for array in arrays], return_tensors="pt")
        pieces = text.split(IMAGE)
        for index, grid in enumerate(images["image_grid_thw"].tolist()):
            pieces[index] += IMAGE * (grid[1] * grid[2] // 4)
        tokens = self._tokenizer("".join(pieces), return_tensors="pt")
        types = (tokens["input_ids"] == pad).to(torch.int32)
        return {**tokens, **images, "mm_token_type_ids": types}

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
