"""Small random vision-language models as folders, and the results of transformers."""

from __future__ import annotations

import functools
import string
from pathlib import Path
from typing import Any

import numpy as np

from .qwen_images import image

LETTERS = string.ascii_letters + string.digits + " .,:?!<>_{}\"'\n"
PLACEHOLDERS = {
    "llava": "<image>",
    "pixtral": "[IMG]",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "internvl": "<IMG_CONTEXT>",
}
SPECIAL = {
    "llava": [],
    "pixtral": ["[IMG_BREAK]", "[IMG_END]"],
    "idefics3": [
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    ],
    "internvl": ["<img>", "</img>", "<video>"],
}
SPECIAL["smolvlm"] = SPECIAL["idefics3"]
NAMES = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
}
TEXT = {
    "vocab_size": 140,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def tokens(family: str) -> list[str]:
    """Return the vocabulary of a family."""
    return ["<pad>", "<eos>", "<unk>", PLACEHOLDERS[family], *SPECIAL[family], *LETTERS]


def _llava(transformers: Any) -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=48),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=3,
        vision_feature_layer=-2,
        image_seq_length=16,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _pixtral(transformers: Any) -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.PixtralVisionConfig(**VISION, head_dim=12),
        text_config=transformers.MistralConfig(**TEXT),
        image_token_index=3,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config)


def _idefics(transformers: Any, name: str) -> Any:
    vision = getattr(transformers, f"{name}VisionConfig")(**VISION)
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=3,
        scale_factor=2,
        pad_token_id=0,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _internvl(transformers: Any) -> Any:
    vision = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**vision),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=3,
        image_seq_length=4,
    )
    return transformers.InternVLForConditionalGeneration(config)


MODELS = {
    "llava": _llava,
    "pixtral": _pixtral,
    "idefics3": functools.partial(_idefics, name="Idefics3"),
    "smolvlm": functools.partial(_idefics, name="SmolVLM"),
    "internvl": _internvl,
}


def _processor(family: str, tokenizer: Any) -> Any:
    import transformers as t

    size = {"height": 32, "width": 32}
    if family == "llava":
        images = t.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
        options = {"patch_size": 8, "vision_feature_select_strategy": "default"}
        return t.LlavaProcessor(images, tokenizer, num_additional_image_tokens=1, **options)
    if family == "pixtral":
        images = t.PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=8)
        return t.PixtralProcessor(images, tokenizer, patch_size=8)
    if family == "internvl":
        images = t.GotOcr2ImageProcessorPil(
            size=size, crop_to_patches=True, min_patches=1, max_patches=4
        )
        return t.InternVLProcessor(
            images, tokenizer, t.InternVLVideoProcessor(), image_seq_length=4
        )
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family]
    images = getattr(t, f"{name}ImageProcessorPil")(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 32}
    )
    options = {"video_processor": t.SmolVLMVideoProcessor()} if name == "SmolVLM" else {}
    return getattr(t, f"{name}Processor")(images, tokenizer, image_seq_len=4, **options)


def write_model(folder: Path, family: str) -> Path:
    """Write model, tokenizer and processor; return the folder."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(3)
    model = MODELS[family](transformers).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    vocabulary = {token: index for index, token in enumerate(tokens(family))}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    bpe.decoder = tokenizers.decoders.Fuse()
    names = {"image_token": PLACEHOLDERS[family], **NAMES.get(family, {})}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=names,
        additional_special_tokens=None,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[family]})
    tokenizer.save_pretrained(folder)
    processor(family, tokenizer).save_pretrained(folder)
    return folder


def processor(family: str, tokenizer: Any) -> Any:
    """Return the processor of a family."""
    return _processor(family, tokenizer)


def prompt(family: str, *parts: str | int) -> dict[str, Any]:
    """Return a prompt of texts and of images by their indices."""
    placeholder = PLACEHOLDERS[family]
    text = "".join(part if isinstance(part, str) else placeholder for part in parts)
    images = [image(part) for part in parts if not isinstance(part, str)]
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


class Reference:
    """The same model in transformers, in float32."""

    def __init__(self, folder: Path, family: str) -> None:
        import torch
        import transformers

        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self._processor = processor(family, tokenizer)
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def inputs(self, prompt: dict[str, Any]) -> Any:
        """Return the inputs of the model."""
        from PIL import Image

        arrays = prompt.get("multi_modal_data", {}).get("image", [])
        images = [[Image.fromarray(array) for array in arrays]] if arrays else None
        options = {"return_tensors": "pt", "add_special_tokens": False}
        return self._processor(text=[prompt["prompt"]], images=images, **options)

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
