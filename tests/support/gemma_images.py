"""A small random Gemma 3 with images as a folder, and its prompts in transformers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .processes import ROOT

IMAGE = "<start_of_image>"
SOFT_TOKENS = 16
SHAPES = ((13, 40), (77, 31), (1, 9), (64, 64))
"""Heights and widths of images."""


def example():
    """Return examples/tiny_gemma3.py as a module."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    import tiny_gemma3

    return tiny_gemma3


def write_model(folder: Path, **text: Any) -> Path:
    """Write the model of the example; return the folder."""
    return example().write_model(folder, **text)


def config():
    return example().config()


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

        images_of = prompt.get("multi_modal_data", {}).get("image", [])
        images = [[Image.fromarray(array) for array in images_of]] if images_of else None
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
    """Return the largest difference of log-probabilities from the expected ones."""
    return max(
        abs(entry.logprob - expected[position - 1, token])
        for position, entries in enumerate(prompt_logprobs)
        for token, entry in (entries or {}).items()
    )
