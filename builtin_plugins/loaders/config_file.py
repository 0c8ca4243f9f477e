"""The config.json of a Hugging Face directory, which loaders of weights and of none both read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hardpoint.plugins import ModelConfig, ModelError
from hardpoint.toolkit.hf_config import (
    architecture,
    default_sampling,
    model_config,
    short,
    token_ids,
)

from .files import read_json

_CODE = ("AutoModelForCausalLM", "AutoModel")
"""Entries of `auto_map` that are of the model."""


def read_architecture(path: Path) -> str:
    """Return the architecture that a config.json names.

    Raises:
        ModelError: the file cannot be read, or names none.
    """
    return architecture(read_config(path), f"{path.parent.name}/{path.name}")


def about_code(path: Path) -> str:
    """Return that a config.json names code in the folder for its model; empty if it does not."""
    classes = read_config(path).get("auto_map")
    if not isinstance(classes, dict) or not classes:
        return ""
    named = next((classes[name] for name in _CODE if name in classes), next(iter(classes.values())))
    return f": its config.json names code for it (auto_map: {short(named)}), which is never run"


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises:
        ModelError: it cannot be read; where it is missing, the message describes the directory.
    """
    folder = path.parent
    if folder.is_dir() and not path.exists():
        names = sorted(file.name for file in folder.iterdir())
        hint = f"a model's directory has one, found {', '.join(names[:8]) or 'no file'}"
        if "adapter_config.json" in names:
            hint = "this is an adapter (LoRA), which is no model of its own"
        raise ModelError(
            f"{folder.name}/{path.name} cannot be read: No such file or directory; {hint}"
        )
    return read_json(path)


def read_model_config(path: Path) -> ModelConfig:
    """Return the ModelConfig of a config.json and the generation_config.json next to it.

    Raises:
        ModelError: a file cannot be read, or a field is invalid.
    """
    hf, source = read_config(path), f"{path.parent.name}/{path.name}"
    generation_path = path.parent / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    generation_source = f"{path.parent.name}/{generation_path.name}"
    eos = token_ids(generation.get("eos_token_id"), "eos_token_id", generation_source)
    stated = (hf, hf.get("text_config"))  # some configurations name them inside alone
    named = (part.get("eos_token_id") for part in stated if isinstance(part, dict))
    in_config = next((ids for ids in named if ids is not None), None)
    dtype = hf.get("dtype") or hf.get("torch_dtype")
    return model_config(
        hf,
        source,
        eos_token_ids=eos or token_ids(in_config, "eos_token_id", source),
        dtype=str(dtype) if dtype else None,
        sampling=default_sampling(generation, generation_source),
    )
