"""The index of safetensors files: tensors and their files, former names, the scheme."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from hardpoint.plugins import ModelError
from hardpoint.toolkit.hf_config import short

from .files import read_json

INDEX = "model.safetensors.index.json"
_VISION, _FORMER_VISION = "vision_tower.", "vision_tower.vision_model."
"""Beginnings of names, as transformers 5 writes them, and as earlier ones did."""
_BODIES = ("transformer.", "model.")
"""Beginnings of names that checkpoints of a body alone leave out, as GPT-2's and embedders'."""
_TEXT, _TEXT_OF_WHOLE = "model.", "model.language_model."
"""Beginnings of names of text models, and in checkpoints that have images as well."""


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index in a folder has them.

    Raises:
        ModelError: the index is no table of names to names.
    """
    weight_map = read_json(folder / INDEX).get("weight_map")
    where = f"{folder.name}/{INDEX}: weight_map"
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{where}: expected a table of tensor names to files, got {short(weight_map)}"
        )
    if wrong := [name for name in weight_map.values() if not isinstance(name, str)]:
        raise ModelError(f"{where}: expected names of files, got {short(wrong[0])}")
    return weight_map


def former_names(
    names: Iterable[str], read_present: Callable[[], Container[str]]
) -> dict[str, str]:
    """Return the names of weights in files, for weights with other names there.

    Args:
        names: names of weights.
        read_present: returns the names in the files; called if one may have another.
    """
    may_differ = [name for name in names if name.startswith((_VISION, *_BODIES))]
    present = read_present() if may_differ else ()
    former = {name: former_name(name, present) for name in may_differ if name not in present}
    return {name: former for name, former in former.items() if former is not None}


def former_name(name: str, present: Container[str]) -> str | None:
    """Return the other name of a weight in files; None if it has none there."""
    others = []
    if name.startswith(_VISION):
        others = [_FORMER_VISION + name.removeprefix(_VISION)]
    elif name.startswith(_BODIES):
        others = [name.partition(".")[2]]
    if name.startswith(_TEXT):
        others.append(_TEXT_OF_WHOLE + name.removeprefix(_TEXT))
    return next((other for other in others if other in present), None)


def module_of(name: str) -> str:
    """Return the name of a tensor's module, also for a tensor that belongs to a weight."""
    module, below, _ = name.partition(".weight.")
    return module if below else name.rpartition(".")[0]


def last_of(name: str) -> str:
    """Return the last part of a tensor's name."""
    return name.rpartition(".")[2]


def scheme_of(hf: Mapping[str, Any], where: str) -> str | None:
    """Return the scheme of quantized weights, a component's name; None if they are not quantized.

    Raises:
        ModelError: config.json does not name it.
    """
    described = hf.get("quantization_config")
    method = described.get("quant_method") if isinstance(described, Mapping) else None
    if isinstance(method, str) and method:
        return method.lower().replace("-", "_")
    # Of transformers, of MLX, and of early llm-compressor.
    for name in ("quantization_config", "quantization", "compression_config"):
        if (settings := hf.get(name)) is not None:
            raise ModelError(
                f"{where}/config.json: {name}: safetensors that are quantized without a "
                f"quant_method are not supported, expected none (bfloat16, float16 or float32 "
                f"weights), a quant_method such as awq, or a .gguf file; got {short(settings)}"
            )
    return None
