"""Matrices written and dequantized by other libraries, and the files with them.

    python -m support.builtins.library_checkpoints LIBRARY...

writes the files again, for which the libraries have to be installed: transformers, bitsandbytes,
compressed_tensors or torchao. `read` needs none of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
FOLDER = Path(__file__).parent / "library_files"
_NUMBERS = "="
"""Name of the numbers that the library dequantizes a matrix to."""
SHAPE = (16, 64)


@dataclass(frozen=True)
class Case:
    """A matrix.

    Attributes:
        name: which of the library's forms.
        config: `quantization_config` of a checkpoint.
        tensors: what the library stores, by the last parts of their names.
        numbers: what it dequantizes them to, float32 [rows, columns].
    """

    name: str
    config: dict[str, Any]
    tensors: Tensors
    numbers: torch.Tensor


def weight(shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 8


def transformers() -> Iterator[Case]:
    """FP8 as transformers writes it, in the form of DeepSeek."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    for name, block, scales in (
        ("blocks", (8, 32), "float"),
        ("powers of two", (8, 32), "ue8m0"),
        ("matrix", None, "float"),
    ):
        options = SimpleNamespace(weight_block_size=block, scale_fmt=scales)
        quantize = Fp8Quantize(SimpleNamespace(quantization_config=options))
        converted = quantize.convert({"weight": weight()})
        scales_as_numbers = {"weight_scale_inv": converted["weight_scale_inv"].float()}
        numbers = Fp8Dequantize(None).convert(converted | scales_as_numbers)["weight"]
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": scales}
        config["weight_block_size"] = None if block is None else list(block)
        yield Case(name, config, converted, numbers)


def compressed_tensors() -> Iterator[Case]:
    """Integers and float8 of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    numbers = weight((20, 72))  # blocks at the ends are smaller
    rows, columns = numbers.shape
    largest = numbers.abs()
    floats, ints = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"}
    tensor = largest.max().reshape(1) / 448
    of_groups = largest.view(rows, 3, 24).amax(2) / 7
    zeros = torch.arange(rows * 3).view(rows, 3).remainder(5).to(torch.int8) - 2
    for name, form, fields, scales, extra in (
        ("float row", "float-quantized", {"strategy": "channel"} | floats, None, {}),
        ("float matrix", "float-quantized", {"strategy": "tensor"} | floats, tensor, {}),
        (
            "float blocks",
            "naive-quantized",
            {"strategy": "block", "block_structure": [8, 32]} | floats,
            torch.linspace(0.001, 0.003, 9).view(3, 3),
            {},
        ),
        (
            "packed groups",
            "pack-quantized",
            {"strategy": "group", "group_size": 24, "symmetric": False} | ints,
            of_groups,
            {"weight_zero_point": zeros},
        ),
        ("int8 row", "int-quantized", {"strategy": "channel", "num_bits": 8}, None, {}),
    ):
        arguments = QuantizationArgs(**fields)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        if scales is None:
            scales = largest.amax(1, keepdim=True) / (448 if "type" in fields else 127)
        compressor = BaseCompressor.get_value_from_registry(form)
        compressed = compressor.compress(
            {"weight": numbers, "weight_scale": scales} | extra, scheme
        )
        expected = compressor.decompress(compressed, scheme)["weight"].float()
        group = json.loads(scheme.model_dump_json())
        if form == "int-quantized":
            group["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
        config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
        yield Case(name, config | {"format": form}, compressed, expected.view(rows, columns))


def bitsandbytes() -> Iterator[Case]:
    """Four bits and int8 of bitsandbytes."""
    import bitsandbytes.functional as bnb

    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            shape = (18, 100) if nested else SHAPE  # blocks that go over the ends of rows
            codes, state = bnb.quantize_4bit(
                weight(shape), blocksize=64, compress_statistics=nested, quant_type=kind
            )
            parts = {k.rpartition(".")[2]: t for k, t in state.as_dict(packed=True).items()}
            config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
            config |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
            numbers = bnb.dequantize_4bit(codes, state)
            name = f"{kind} nested" if nested else kind
            yield Case(name, config, {"weight": codes} | parts, numbers)
    codes, scales, _ = bnb.int8_vectorwise_quant(weight().half())
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    yield Case("int8", config, tensors, bnb.int8_vectorwise_dequant(codes, scales))


def torchao() -> Iterator[Case]:
    """Integers and float8 of torchao."""
    import torchao.quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from transformers import TorchAoConfig

    groups, four = ao.PerGroup(32), torch.int4
    for name, config in {
        "int8": ao.Int8WeightOnlyConfig(),
        "int8 groups": ao.Int8WeightOnlyConfig(granularity=groups),
        "int8 activations": ao.Int8DynamicActivationInt8WeightConfig(),
        "int4": ao.IntxWeightOnlyConfig(four, granularity=groups),
        "int4 zeros": ao.IntxWeightOnlyConfig(
            four, granularity=groups, mapping_type=ao.MappingType.ASYMMETRIC
        ),
        "int4 activations": ao.Int8DynamicActivationIntxWeightConfig(
            four, weight_granularity=groups
        ),
        "float8": ao.Float8WeightOnlyConfig(),
    }.items():
        linear = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        linear.weight.data.copy_(weight())
        model = torch.nn.Sequential(linear)
        ao.quantize_(model, config)
        tensors, _ = flatten_tensor_state_dict(model.state_dict())
        parts = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items()}
        numbers = linear.weight.dequantize().detach()
        yield Case(name, TorchAoConfig(config).to_dict(), parts, numbers)


LIBRARIES: dict[str, Callable[[], Iterator[Case]]] = {
    "transformers": transformers,
    "compressed_tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
}


def read(library: str) -> list[Case]:
    """Return the matrices of a library's file."""
    with safe_open(FOLDER / f"{library}.safetensors", framework="pt") as file:
        configs = {name: json.loads(text) for name, text in file.metadata().items()}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    cases = []
    for name, config in configs.items():
        parts = {k.partition("/")[2]: t for k, t in tensors.items() if k.startswith(f"{name}/")}
        numbers = parts.pop(_NUMBERS)
        cases.append(Case(name, config, parts, numbers))
    return sorted(cases, key=lambda case: case.name)


def write(library: str) -> None:
    """Write a library's file."""
    cases = list(LIBRARIES[library]())
    tensors = {f"{c.name}/{k}": t.contiguous() for c in cases for k, t in c.tensors.items()}
    tensors |= {f"{c.name}/{_NUMBERS}": c.numbers.contiguous() for c in cases}
    metadata = {case.name: json.dumps(case.config) for case in cases}
    save_file(tensors, FOLDER / f"{library}.safetensors", metadata)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(name)
