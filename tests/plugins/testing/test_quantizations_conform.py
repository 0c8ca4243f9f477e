"""Every built-in quantization scheme passes the public conformance kit."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from gguf import GGMLQuantizationType
from support.builtins import library_checkpoints as libraries
from support.builtins import quantized_checkpoints as checkpoints
from support.builtins.checkpoint_harness import quantised
from support.kit_suites import assert_tests_builtins

from hardpoint.builtin_plugins.quantizations.awq import AWQ
from hardpoint.builtin_plugins.quantizations.bitsandbytes import BitsAndBytes
from hardpoint.builtin_plugins.quantizations.compressed_tensors import CompressedTensors
from hardpoint.builtin_plugins.quantizations.fp8 import FP8
from hardpoint.builtin_plugins.quantizations.gguf import (
    IQ4_NL,
    IQ4_XS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
)
from hardpoint.builtin_plugins.quantizations.gguf_codebooks import (
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
)
from hardpoint.builtin_plugins.quantizations.gguf_low import Q2_K, Q3_K, TQ1_0, TQ2_0, MXFP4Blocks
from hardpoint.builtin_plugins.quantizations.gptq import GPTQ, AutoRound
from hardpoint.builtin_plugins.quantizations.groups import Int4, Int8
from hardpoint.builtin_plugins.quantizations.mxfp4 import MXFP4
from hardpoint.builtin_plugins.quantizations.torchao import TorchAO
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.testing import QuantizationSuite, QuantizedSample

pytest_plugins = ["hardpoint.testing"]


class Blocks(QuantizationSuite):
    """Blocks as llama.cpp's library writes and dequantizes them."""

    # The scale's place in each block, of halves.
    scale_at = 0
    shape = (6, 512)

    def samples(self):
        kind = GGMLQuantizationType[self.quantization.__name__.removesuffix("Blocks")]
        numbers = np.random.default_rng(0).normal(size=self.shape).astype(np.float32)
        blocks, weight = map(torch.from_numpy, quantised(numbers, kind))
        return [self.sample(blocks, weight)]

    def sample(self, blocks, weight):
        size = blocks.shape[1] // (self.shape[1] // self.quantization.columns)
        scales_are_nan = blocks.clone()
        scales_are_nan.view(len(blocks), -1, size)[2, 1, self.scale_at : self.scale_at + 2] = 0xFF

        def stored(blocks, shape=self.shape):
            return QuantizedWeight(self.name, shape, {"blocks": blocks})

        damaged = {
            "a scale that is NaN": stored(scales_are_nan),
            "half a block": stored(blocks, (6, 496)),
            "more rows than blocks": stored(blocks, (7, 512)),
        }
        return QuantizedSample(stored(blocks), weight, damaged)


SCHEMES = (
    IQ4_NL, IQ4_XS, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0,
    IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, Q2_K, Q3_K, TQ1_0, TQ2_0, MXFP4Blocks,
)  # fmt: skip
SCALES_AT = {Q6_K: 208, Q2_K: 80, Q3_K: 108, TQ1_0: 52, TQ2_0: 64}
"""Of schemes whose scale is not the first number of a block."""


def blocks_of(scheme):
    """Return the suite of a scheme of blocks."""
    name = "mxfp4_gguf" if scheme is MXFP4Blocks else scheme.__name__.lower()
    attributes = {"quantization": scheme, "name": name, "scale_at": SCALES_AT.get(scheme, 0)}
    return type(f"Test{scheme.__name__}", (Blocks,), {**attributes, "__module__": __name__})


globals().update({f"Test{scheme.__name__}": blocks_of(scheme) for scheme in SCHEMES})


class TestInt8(QuantizationSuite):
    quantization = Int8
    name = "int8"
    max_error = 0.01


class TestInt4(QuantizationSuite):
    quantization = Int4
    name = "int4"
    max_error = 0.1


class Packed(QuantizationSuite):
    """Packed integers as other libraries store them."""

    tensors = None
    optional = ()

    def samples(self):
        matrix = checkpoints.random_matrix(8, 128, group=32)
        tensors = type(self).tensors(matrix)
        nan = {
            name: tensor * math.nan if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        damaged = {"a scale that is NaN": checkpoints.stored(matrix, nan, self.name)}
        sample = checkpoints.stored(matrix, tensors, self.name)
        return [QuantizedSample(sample, matrix.weight, damaged, self.optional)]


class TestAWQ(Packed):
    quantization = AWQ
    name = "awq"
    config = checkpoints.awq_config()
    tensors = staticmethod(checkpoints.awq)


class TestGPTQ(Packed):
    quantization = GPTQ
    name = "gptq"
    config = checkpoints.gptq_config()
    optional = ("g_idx",)
    tensors = staticmethod(checkpoints.gptq)


class TestCompressedTensors(Packed):
    quantization = CompressedTensors
    name = "compressed_tensors"
    config = checkpoints.integers_config()
    tensors = staticmethod(checkpoints.packed_integers)


class TestAutoRound(Packed):
    quantization = AutoRound
    name = "auto_round"
    config = checkpoints.auto_round_config()
    optional = ("g_idx",)
    tensors = staticmethod(checkpoints.gptq)


class Library(QuantizationSuite):
    """A matrix that a library wrote, with the scales in a tensor."""

    case = None
    scales = None
    optional = ()

    def samples(self):
        case = self.case
        stored = QuantizedWeight(self.name, tuple(case.numbers.shape), case.tensors)
        nan = case.tensors | {self.scales: case.tensors[self.scales] * math.nan}
        damaged = {"a scale that is NaN": QuantizedWeight(self.name, stored.shape, nan)}
        return [QuantizedSample(stored, case.numbers, damaged, self.optional)]


def case_of(library, name):
    return next(case for case in libraries.read(library) if case.name == name)


class TestMXFP4(QuantizationSuite):
    """Codes that transformers reads; a checkpoint of gpt-oss has the matrices of all experts."""

    quantization = MXFP4
    name = "mxfp4"
    config: ClassVar = {"quant_method": "mxfp4"}

    def samples(self):
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        generator = torch.Generator().manual_seed(0)
        blocks = torch.randint(256, (1, 6, 4, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, (1, 6, 4), generator=generator, dtype=torch.uint8)
        numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T.contiguous()
        tensors = {"blocks": blocks[0], "scales": scales[0]}
        stored = QuantizedWeight(self.name, (6, 128), tensors)
        wrong = tensors | {"scales": torch.full_like(scales[0], 255)}
        damaged = {"a scale that is NaN": QuantizedWeight(self.name, (6, 128), wrong)}
        return [QuantizedSample(stored, numbers, damaged)]


class TestFP8(Library):
    quantization = FP8
    name = "fp8"
    case = case_of("transformers", "blocks")
    config = case.config
    scales = "weight_scale_inv"


class TestBitsAndBytes(Library):
    quantization = BitsAndBytes
    name = "bitsandbytes"
    case = case_of("bitsandbytes", "nf4")
    config = case.config
    scales = "absmax"


class TestTorchAO(Library):
    quantization = TorchAO
    name = "torchao"
    case = case_of("torchao", "int4 zeros")
    config = case.config
    scales = "_weight_scale"
    optional = ("_weight_zero_point",)


def test_every_builtin_has_a_suite():
    assert_tests_builtins("quantizations", "quantization", globals())
