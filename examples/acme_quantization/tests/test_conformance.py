"""The package keeps every rule of the engine for its kind: the conformance kit checks it."""

import torch
from acme_quantization.nf4 import NF4
from acme_quantization.ternary import Ternary

from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.testing import QuantizationSuite, QuantizedSample

pytest_plugins = ["hardpoint.testing"]


class TestNF4(QuantizationSuite):
    quantization = NF4
    name = "nf4"
    max_error = 0.11


class TestNF4InLargerGroups(QuantizationSuite):
    quantization = NF4
    name = "nf4"
    options = {"group": 128}
    max_error = 0.12


class TestTernary(QuantizationSuite):
    quantization = Ternary
    max_error = 0.5
    shapes = ((1, 256), (300, 512), (7, 100))  # of the last one, two ranks can cut no columns

    def samples(self):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(-1, 2, (6, 256), generator=generator)
        scales = torch.rand(6, 4, generator=generator)
        codes = (signs + 1).view(6, 64, 4)
        packed = sum(codes[:, :, place] << 2 * place for place in range(4)).to(torch.uint8)

        def stored(**tensors):
            tensors = {"packed": packed, "scales": scales} | tensors
            return QuantizedWeight("ternary", (6, 256), tensors)

        weight = signs * scales.repeat_interleave(64, 1)
        damaged = {
            "a code 3": stored(packed=packed | 0b11),
            "a scale that is NaN": stored(scales=scales * float("nan")),
        }
        return [QuantizedSample(stored(), weight, damaged)]
