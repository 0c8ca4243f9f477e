"""Every built-in quantisation scheme passes the public conformance kit."""

from __future__ import annotations

import math

import numpy as np
import torch
from gguf import GGMLQuantizationType
from support.builtins import quantized_checkpoints as checkpoints
from support.builtins.checkpoint_harness import quantised
from support.kit_suites import assert_tests_builtins

from hardpoint.builtin_plugins.quantizations.awq import AWQ
from hardpoint.builtin_plugins.quantizations.compressed_tensors import CompressedTensors
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
from hardpoint.builtin_plugins.quantizations.gptq import GPTQ, AutoRound
from hardpoint.builtin_plugins.quantizations.groups import Int4, Int8
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.testing import QuantizationSuite, QuantizedSample

pytest_plugins = ["hardpoint.testing"]


class Blocks(QuantizationSuite):
    """Blocks as llama.cpp's library writes and dequantises them."""

    # The scale's place in each block, of halves.
    scale_at = 0
    shape = (6, 512)

    def samples(self):
        kind = GGMLQuantizationType[self.quantization.__name__]
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


class TestIQ4_NL(Blocks):  # noqa: N801
    quantization = IQ4_NL
    name = "iq4_nl"


class TestIQ4_XS(Blocks):  # noqa: N801
    quantization = IQ4_XS
    name = "iq4_xs"


class TestQ4_0(Blocks):  # noqa: N801
    quantization = Q4_0
    name = "q4_0"


class TestQ4_1(Blocks):  # noqa: N801
    quantization = Q4_1
    name = "q4_1"


class TestQ4_K(Blocks):  # noqa: N801
    quantization = Q4_K
    name = "q4_k"


class TestQ5_0(Blocks):  # noqa: N801
    quantization = Q5_0
    name = "q5_0"


class TestQ5_1(Blocks):  # noqa: N801
    quantization = Q5_1
    name = "q5_1"


class TestQ5_K(Blocks):  # noqa: N801
    quantization = Q5_K
    name = "q5_k"


class TestQ6_K(Blocks):  # noqa: N801
    quantization = Q6_K
    name = "q6_k"
    scale_at = 208


class TestQ8_0(Blocks):  # noqa: N801
    quantization = Q8_0
    name = "q8_0"


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


def test_every_builtin_has_a_suite():
    assert_tests_builtins("quantizations", "quantization", globals())
