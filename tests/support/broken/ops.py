"""Operations with one mistake each, and right ones."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from hardpoint.plugins import Op, Ops
from support.samples import Sample


class Plain(Sample, Ops, contract=1):
    """Right: formulas in float64."""

    devices = ("cpu",)

    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        weight, bias = packed.view(shape).double(), 0 if bias is None else bias.double()
        out_dtype = out_dtype or self.context.dtype
        return lambda x: (x.double() @ weight.T + bias).to(out_dtype)

    def gather_rows(self, table, ids):
        return table[ids]

    def rms_norm(self, x, weight, eps):
        wide = x.double()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (wide * scale * weight.double()).to(x.dtype)

    def add_rms_norm(self, x, delta, weight, eps):
        x += delta
        return self.rms_norm(x, weight, eps)

    def rotate(self, x, angles):
        cos, sin = angles.unsqueeze(1).chunk(2, -1)
        a, b = x.float().chunk(2, -1)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))

    def silu_and_mul(self, x):
        gate, up = x.double().chunk(2, -1)
        return (F.silu(gate) * up).to(x.dtype)

    def gelu_and_mul(self, x):
        gate, up = x.double().chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


class NoContract(Plain, contract=None):
    pass


class NoDevices(Plain):
    devices = "cpu"


class ForgetsTheBias(Plain):
    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        return super().linear(packed, shape, None, out_dtype=out_dtype)


class IgnoresOutDtype(Plain):
    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        return super().linear(packed, shape, bias)


class TransposesTheMatrix(Plain):
    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        multiply = super().linear(packed, shape, bias, out_dtype=out_dtype)
        return lambda x: multiply(x).T


class ReadsContiguousRows(Plain):
    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        multiply = super().linear(packed, shape, bias, out_dtype=out_dtype)
        return lambda x: multiply(torch.as_strided(x, x.shape, (x.shape[1], 1)))


class MultipliesInBfloat16(Plain):
    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        return super().linear(packed.bfloat16(), shape, bias, out_dtype=out_dtype)


class Kept(Plain):
    """Right: packs transposed matrices, which may be kept."""

    layout = "columns"

    def pack(self, weight):
        return weight.T.contiguous()

    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        return super().linear(packed.T.reshape(shape), shape, bias, out_dtype=out_dtype)


class NamesNoBuild(Kept):
    @property
    def layout(self):
        return str(id(self))


class PacksAView(Kept):
    def pack(self, weight):
        return weight.T


class KeepsAMatrixAside(Kept):
    def pack(self, weight):
        self._weight = weight
        return torch.full(weight.shape, id(self) % 251, dtype=weight.dtype)

    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        return Plain.linear(self, self._weight, shape, bias, out_dtype=out_dtype)


class Codes(Plain):
    """Right: keeps codes as numbers in float32, with readable rows."""

    code_bits = (4, 5, 6, 8)
    layout = "numbers"

    def pack_codes(self, parts):
        return torch.cat([part.dequantize() for part in parts])

    def embedding(self, packed, shape):
        return lambda ids: packed[ids].to(self.context.dtype)


class ForgetsOffsets(Codes):
    def pack_codes(self, parts):
        parts = [replace(part, offsets=None, outer_offsets=None) for part in parts]
        return super().pack_codes(parts)


class StacksBackwards(Codes):
    def pack_codes(self, parts):
        return super().pack_codes(parts[::-1])


class ScalesPartsInPlace(Codes):
    layout = ""

    def pack_codes(self, parts):
        packed = super().pack_codes(parts)
        parts[0].scales.zero_()
        return packed


class KeepsCodesAside(Codes):
    def pack_codes(self, parts):
        packed = super().pack_codes(parts)
        packed[0, 0] = id(self) % 251
        return packed


class RecordsFirstResult(Codes):
    def record(self, run):
        result = run().clone()
        return lambda: result


class MultipliesCodesWithTheBatch(Codes):
    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        multiply = super().linear(packed, shape, bias, out_dtype=out_dtype)
        is_codes = shape[0] > 200
        return lambda x: multiply(x) * (1 + len(x) / 100 * is_codes)


class ReadsTheNextRow(Codes):
    def embedding(self, packed, shape):
        return lambda ids: packed[(ids + 1) % shape[0]].to(self.context.dtype)


class ReadsInFloat(Codes):
    def embedding(self, packed, shape):
        return lambda ids: packed[ids]


class NormalisesTheBatch(Plain):
    def rms_norm(self, x, weight, eps):
        wide = x.double()
        return (wide * (wide.square().mean() + eps).rsqrt() * weight.double()).to(x.dtype)


class NormOfTheMean(Plain):
    def rms_norm(self, x, weight, eps):
        return F.layer_norm(x, weight.shape, weight, None, eps)


class AddsToACopy(Plain):
    def add_rms_norm(self, x, delta, weight, eps):
        return self.rms_norm(x + delta, weight, eps)


class AddsToDelta(Plain):
    def add_rms_norm(self, x, delta, weight, eps):
        x += delta
        delta.zero_()
        return self.rms_norm(x, weight, eps)


class RotatesPairs(Plain):
    def rotate(self, x, angles):
        cos, sin = angles.unsqueeze(1).chunk(2, -1)
        a, b = x[..., ::2].float(), x[..., 1::2].float()
        x[..., ::2], x[..., 1::2] = a * cos - b * sin, b * cos + a * sin


class RotatesACopy(Plain):
    def rotate(self, x, angles):
        super().rotate(x.clone(), angles)


class RotatesAll(Plain):
    def rotate(self, x, angles):
        super().rotate(torch.as_strided(x, (len(x), 5, x.shape[2]), x.stride(), 0), angles)


class RotatesContiguousHeads(Plain):
    def rotate(self, x, angles):
        super().rotate(torch.as_strided(x, x.shape, (x.stride(0), x.shape[2], 1)), angles)


class ScalesACopy(Plain):
    def scale(self, x, factor):
        super().scale(x.clone(), factor)


class ScalesWiderRows(Plain):
    def scale(self, x, factor):
        super().scale(torch.as_strided(x, (len(x), x.stride(0)), x.stride()), factor)


class AddsTwice(Plain):
    def add(self, x, delta):
        super().add(x, delta * 2)


class EmptiesDelta(Plain):
    def add(self, x, delta):
        super().add(x, delta)
        delta.zero_()


class GateLast(Plain):
    def silu_and_mul(self, x):
        up, gate = x.double().chunk(2, -1)
        return (F.silu(gate) * up).to(x.dtype)


class ExactGelu(Plain):
    def gelu_and_mul(self, x):
        gate, up = x.double().chunk(2, -1)
        return (F.gelu(gate) * up).to(x.dtype)


class WritesToX(Plain):
    def silu_and_mul(self, x):
        result = super().silu_and_mul(x)
        x[:, : result.shape[1]] = result
        return result


class GathersTheFirstRows(Plain):
    def gather_rows(self, table, ids):
        return table[: len(ids)] if len(ids) <= len(table) else table[ids]


class RoundsTheTable(Plain):
    def gather_rows(self, table, ids):
        return table[ids].to(self.context.dtype)


class HasSizesBeyondTheMost(Plain):
    def record_sizes(self, max_num_seqs):
        return [1, 2, 4]


class RepeatsNothing(Plain):
    def record(self, run):
        result = run()
        return lambda: result


class ArgmaxTakesTheLast(Plain):
    def argmax(self, logits):
        return logits.shape[1] - 1 - logits.flip(-1).argmax(-1)


class ArgmaxPassesOverNaN(Plain):
    def argmax(self, logits):
        return logits.nan_to_num(-math.inf, math.inf, -math.inf).argmax(-1)


class ArgmaxInInt32(Plain):
    def argmax(self, logits):
        return super().argmax(logits).int()


class DrawsByRow(Plain):
    def draw(self, logits, seeds, positions, greedy):
        seeds = seeds + torch.arange(len(seeds))
        return super().draw(logits, seeds, positions, greedy)


class DrawsGreedyRows(Plain):
    def draw(self, logits, seeds, positions, greedy):
        return super().draw(logits, seeds, positions, torch.zeros_like(greedy))


class DrawScales(Plain):
    def draw(self, logits, seeds, positions, greedy):
        tokens = super().draw(logits, seeds, positions, greedy)
        logits /= 2
        return tokens


class TopKDropsTies(Plain):
    def keep_top_k(self, logits, k, largest_k):
        before = logits.clone()
        super().keep_top_k(logits, k, largest_k)
        for row, count in enumerate(k.flatten().tolist()):
            if 0 < count < logits.shape[1] and before[row].amax().isfinite():
                order = before[row].argsort(descending=True, stable=True)
                logits[row, order[count:]] = -math.inf


class TopKOfTheLargest(Plain):
    def keep_top_k(self, logits, k, largest_k):
        super().keep_top_k(logits, torch.full_like(k, largest_k), largest_k)


class TopPStopsBefore(Plain):
    def keep_top_p(self, logits, p):
        super().keep_top_p(logits, torch.where(p < 1, p / 2, p))


class TopPInHalf(Plain):
    def keep_top_p(self, logits, p):
        super().keep_top_p(logits.copy_(logits.bfloat16()), p)


class MinPOfTheSum(Plain):
    def keep_min_p(self, logits, p):
        limit = logits.logsumexp(-1, keepdim=True) + p.log()
        logits.masked_fill_(logits < limit, -math.inf)


class MinPReturnsACopy(Plain):
    def keep_min_p(self, logits, p):
        super().keep_min_p(logits.clone(), p)


class KeepsInTheFirstRows(Plain):
    def keep_tokens(self, logits, rows, bitmask):
        super().keep_tokens(logits, torch.arange(len(rows)), bitmask)


class KeepsWholeColumns(Plain):
    def keep_tokens(self, logits, rows, bitmask):
        super().keep_tokens(logits, rows, torch.where(bitmask == 0, 0, -1).int())


class KeepsByAdding(Plain):
    def keep_tokens(self, logits, rows, bitmask):
        zeros = torch.zeros_like(logits)
        super().keep_tokens(zeros, rows, bitmask)
        logits += zeros.nan_to_num()


class ClearsTheBitmask(Plain):
    def keep_tokens(self, logits, rows, bitmask):
        super().keep_tokens(logits, rows, bitmask)
        bitmask.zero_()


class EditsByRow(Plain):
    def edit(self, logits, op, places, values=None, rows=None):
        super().edit(logits, op, places % logits.shape[1], values, rows)


class AddsForSet(Plain):
    def edit(self, logits, op, places, values=None, rows=None):
        super().edit(logits, Op.ADD if op is Op.SET else op, places, values, rows)


class KeepsOnlyInAllRows(Plain):
    def edit(self, logits, op, places, values=None, rows=None):
        every = rows if rows is None else torch.arange(len(logits))
        super().edit(logits, op, places, values, every)


class EditsAndEmptiesValues(Plain):
    def edit(self, logits, op, places, values=None, rows=None):
        super().edit(logits, op, places, values, rows)
        if values is not None:
            values.zero_()


class DividesByTheFirst(Plain):
    def divide(self, logits, divisors):
        super().divide(logits, divisors[:1])


class MultipliesByTheInverse(Plain):
    def divide(self, logits, divisors):
        logits.mul_(1 / divisors)


class GivesExpertsEqualWeights(Plain):
    def experts(self, gate_up, down, shape):
        apply = super().experts(gate_up, down, shape)
        return lambda x, chosen, weights: apply(x, chosen, torch.full_like(weights, 0.5))


class TakesTheLastExpertForNone(Plain):
    def experts(self, gate_up, down, shape):
        apply = super().experts(gate_up, down, shape)
        return lambda x, chosen, weights: apply(x, chosen.clamp(0, len(down) - 1), weights)


class GivesAllRowsTheFirstAdapter(Plain):
    def add_lora(self, y, x, a, b, adapters, scales):
        super().add_lora(y, x, a, b, adapters.clamp(max=0), scales)


class TakesTheFirstAdapterForNone(Plain):
    def add_lora(self, y, x, a, b, adapters, scales):
        super().add_lora(y, x, a, b, adapters.clamp(min=0), scales)


class SpoilsTheInputs(Plain):
    def add_lora(self, y, x, a, b, adapters, scales):
        super().add_lora(y, x, a, b, adapters, scales)
        x *= 2


class WritesWiderRows(Plain):
    def add_lora(self, y, x, a, b, adapters, scales):
        super().add_lora(y, x, a, b, adapters, scales)
        torch.as_strided(y, (len(y), y.stride(0)), y.stride())[:, y.shape[1] :] = 0


class SeesOtherSequences(Plain):
    def attend_within(self, q, k, v, starts, scale, window=None):
        return super().attend_within(q, k, v, [0, len(q)], scale, window)


class SeesOneMore(Plain):
    def attend_within(self, q, k, v, starts, scale, window=None):
        window = None if window is None else window + 1
        return super().attend_within(q, k, v, starts, scale, window)


class AttendsInFloat64(Plain):
    def attend_within(self, q, k, v, starts, scale, window=None):
        return super().attend_within(q, k, v, starts, scale, window).double()


class ScalesTheQueries(Plain):
    def attend_within(self, q, k, v, starts, scale, window=None):
        q *= scale
        return super().attend_within(q, k, v, starts, 1.0, window)


class MultipliesByZeroForNone(Plain):
    def add_lora(self, y, x, a, b, adapters, scales):
        total = y.double()
        for number, scale in enumerate(scales.double()):
            factor = scale * (adapters == number).unsqueeze(1)
            total += factor * (x.double() @ a[number].double().T @ b[number].double().T)
        y.copy_(total)


class ReadsContiguousAdapters(Plain):
    def add_lora(self, y, x, a, b, adapters, scales):
        _, rank, width = a.shape
        a = torch.as_strided(a, a.shape, (rank * width, width, 1))
        super().add_lora(y, x, a, b, adapters, scales)


class AddsLoraByTheNumberOfRows(Plain):
    def add_lora(self, y, x, a, b, adapters, scales):
        parts = 2 if len(y) == 1 else 1
        for part, other in zip(a.chunk(parts, 1), b.chunk(parts, 2), strict=True):
            super().add_lora(y, x, part, other, adapters, scales)
