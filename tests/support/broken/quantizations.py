"""Quantisation schemes with one mistake each, and right ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from hardpoint.plugins import Quantization
from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix, QuantizedWeight
from hardpoint.testing import QuantizedSample
from support.samples import Sample

GROUP = 32
SHAPES = ((2, 64), (5, 128))


class Right(Sample, Quantization, contract=1):
    """Right: eight bits, and a scale for 32 columns."""

    def quantize(self, weight):
        return AffineCodes(*self.codes(weight))

    def codes(self, weight):
        if weight.shape[1] % GROUP:
            raise ValueError(f"expected groups of {GROUP} columns, got {weight.shape[1]} columns")
        groups = weight.reshape(len(weight), -1, GROUP)
        scales = groups.abs().amax(2) / 127
        codes = self.rounded(groups / scales.clamp(min=1e-45).unsqueeze(2)).flatten(1)
        return codes.to(torch.int8), 8, GROUP, scales

    def rounded(self, numbers):
        return numbers.round().clamp(-127, 127)

    def read(self, stored):
        rows, columns = stored.shape
        scales = stored.tensor("scales", torch.float32, (rows, columns // GROUP))
        return AffineCodes(stored.tensor("codes", torch.int8, (rows, columns)), 8, GROUP, scales)

    def stored_bytes(self, shape):
        return shape[0] * shape[1] // GROUP * (GROUP + 4)


class NoContract(Right, contract=None):
    pass


class ReturnsNumbers(Right):
    def quantize(self, weight):
        return super().quantize(weight).dequantize()


class Transposes(Right):
    def quantize(self, weight):
        return super().quantize(weight.repeat(GROUP, 1).T.contiguous())


class Dithers(Right):
    def rounded(self, numbers):
        return (numbers + torch.rand(numbers.shape)).floor().clamp(-127, 127)


class RoundsToSixteens(Right):
    def rounded(self, numbers):
        return super().rounded((numbers / 16).round() * 16)


class ScalesInPlace(Right):
    def quantize(self, weight):
        matrix = super().quantize(weight)
        weight /= 127
        return matrix


class HalfScales(Right):
    def codes(self, weight):
        codes, bits, group, scales = super().codes(weight)
        return codes, bits, group, scales.half()


class NeverZero(Right):
    def codes(self, weight):
        codes, bits, group, scales = super().codes(weight)
        return codes, bits, group, scales, torch.full_like(scales, 1e-5)


class SilentlyRefuses(Right):
    def quantize(self, weight):
        if weight.abs().max() > 1e10:
            raise ValueError
        return super().quantize(weight)


class ForgetsTheSign(Right):
    def read(self, stored):
        matrix = super().read(stored)
        return replace(matrix, codes=matrix.codes.clamp(min=0))


class ReadsInPlace(Right):
    def read(self, stored):
        stored.tensors["scales"].abs_()
        return super().read(stored)


class ScaleOfTheRow(Right):
    def codes(self, weight):
        scales = (weight.abs().amax(1, keepdim=True) / 127).expand(-1, weight.shape[1] // GROUP)
        unit = weight / scales[:, :1].clamp(min=1e-45)
        return self.rounded(unit).to(torch.int8), 8, GROUP, scales.contiguous()


class WideCodes(Right):
    def quantize(self, weight):
        codes, _, group, scales = self.codes(weight)
        offsets = scales * -128
        return AffineCodes((codes.int() + 128).to(torch.uint8), 4, group, scales, offsets)


class CountsBits(Right):
    def stored_bytes(self, shape):
        return super().stored_bytes(shape) * 8


class SaysWiderGroups(Right):
    def alignment(self, shape, stored=None):
        return 2 * GROUP


class SaysHalfGroups(Right):
    def alignment(self, shape, stored=None):
        return None if stored is None else GROUP // 2


class SaysNothing(Right):
    def alignment(self, shape, stored=None):
        return 0


class SaysItReads(Right):
    """A worker does not quantise with it."""

    quantizes = False


@dataclass(eq=False)
class Numbers(QuantizedMatrix):
    """Right: numbers, which are no fewer bits."""

    weight: torch.Tensor

    @property
    def shape(self):
        return tuple(self.weight.shape)

    @property
    def alignment(self):
        return GROUP

    def rows(self, start, stop):
        return type(self)(self.weight[start:stop])

    def columns(self, start, stop):
        self.check(start, stop)
        return type(self)(self.weight[:, start:stop])

    def check(self, start, stop):
        if start % GROUP or (stop % GROUP and stop != self.shape[1]):
            raise ValueError(f"columns {start} to {stop} are no groups of {GROUP}")

    def dequantize(self):
        return self.weight.clone()

    def linear(self, bias, out_dtype):
        weight, bias = self.weight.double(), 0 if bias is None else bias.double()
        return lambda x: (x.double() @ weight.T + bias).to(out_dtype)


class Own(Sample, Quantization, contract=1):
    """Right: its matrices multiply themselves."""

    matrix = Numbers

    def quantize(self, weight):
        return self.matrix(weight.clone())

    def read(self, stored):
        rows, columns = stored.shape
        scales = stored.tensor("scales", torch.float32, (rows, columns // GROUP))
        codes = stored.tensor("codes", torch.int8, (rows, columns))
        return self.matrix(codes * scales.repeat_interleave(GROUP, 1))


class LooksUp(Own):
    def read(self, stored):
        stored.tensors["codes"], stored.tensors["scales"]
        return super().read(stored)


class RefusesWithoutNames(Own):
    def read(self, stored):
        try:
            return super().read(stored)
        except ValueError:
            raise ValueError("the stored matrix is damaged") from None


class TakesAnyDtype(Own):
    def read(self, stored):
        tensors = {n: t.to(SAMPLE.tensors[n].dtype) for n, t in stored.tensors.items()}
        return super().read(replace(stored, tensors=tensors))


def own(**members):
    """Return a scheme with other methods of its matrices."""
    matrix = type("Matrix", (Numbers,), members)
    return type("Own", (Own,), {"matrix": matrix, "__module__": __name__})


def named(name, **members):
    cls = own(**members)
    cls.__name__ = cls.__qualname__ = name
    return cls


def _multiply_with(change):
    """Return a `linear` with its function wrapped by `change`."""
    return lambda self, bias, out_dtype: change(Numbers.linear(self, bias, out_dtype))


def _edits_x(multiply):
    def run(x):
        y = multiply(x)
        x.zero_()
        return y

    return run


TrustsScales = named("TrustsScales", is_finite=lambda self: True)
Doubts = named("Doubts", is_finite=lambda self: False)
SaysNoAlignment = named("SaysNoAlignment", alignment=None)
CutsAnywhere = named("CutsAnywhere", check=lambda self, start, stop: None)
RowsFromTheStart = named(
    "RowsFromTheStart", rows=lambda self, start, stop: type(self)(self.weight[: stop - start])
)
AllColumns = named("AllColumns", columns=lambda self, start, stop: self)
JoinsBackwards = named(
    "JoinsBackwards",
    joined=lambda self, parts, dim: type(self)(torch.cat([p.weight for p in parts[::-1]], dim)),
)
InHalf = named("InHalf", dequantize=lambda self: self.weight.half())
SharesMemory = named("SharesMemory", dequantize=lambda self: self.weight)
ForgetsTheBias = named(
    "ForgetsTheBias", linear=lambda self, _, out_dtype: Numbers.linear(self, None, out_dtype)
)
IgnoresOutDtype = named(
    "IgnoresOutDtype",
    linear=_multiply_with(lambda multiply: lambda x: multiply(x).to(x.dtype)),
)
TransposesResults = named(
    "TransposesResults",
    linear=_multiply_with(lambda multiply: lambda x: multiply(x).T.contiguous().T),
)
FlattensSingleRows = named(
    "FlattensSingleRows",
    linear=_multiply_with(lambda multiply: lambda x: multiply(x) if len(x) > 1 else multiply(x)[0]),
)
EditsX = named("EditsX", linear=_multiply_with(_edits_x))
ReadsContiguousRows = named(
    "ReadsContiguousRows",
    linear=_multiply_with(
        lambda multiply: lambda x: multiply(torch.as_strided(x, x.shape, (x.shape[1], 1)))
    ),
)
AddsTheBatch = named(
    "AddsTheBatch", linear=_multiply_with(lambda multiply: lambda x: multiply(x) + 1e-5 * len(x))
)


class AssertsAlignment(Own):
    class matrix(Numbers):  # noqa: N801
        def check(self, start, stop):
            assert start % GROUP == stop % GROUP == 0


SAMPLE = QuantizedWeight(
    "right",
    (4, 64),
    {
        "codes": (torch.arange(256) - 128).to(torch.int8).view(4, 64),
        "scales": torch.tensor([0.5, -1.0, 2.0, 0.25]).repeat(2).view(4, 2),
    },
)


def samples(_self=None):
    """Return a stored matrix, and the mistakes of others."""
    scales = SAMPLE.tensors["scales"].clone()
    weight = SAMPLE.tensors["codes"] * scales.repeat_interleave(GROUP, 1)
    bad = {"codes": SAMPLE.tensors["codes"], "scales": scales * math.nan}
    copy = replace(SAMPLE, tensors={name: t.clone() for name, t in SAMPLE.tensors.items()})
    return [QuantizedSample(copy, weight, {"NaN scales": replace(SAMPLE, tensors=bad)})]
