"""Attention backends with one mistake each, and a right one."""

from __future__ import annotations

import dataclasses

import torch

from hardpoint import plugins
from hardpoint.plugins import AttentionBackend
from hardpoint.toolkit.kv_codes import CODE_DTYPES, dequantize_heads, quantize_heads, rotate_heads
from support.samples import Sample


class Plain(Sample, AttentionBackend, contract=1):
    """Right: a loop over sequences, with a mask."""

    devices = ("cpu",)
    softcaps = True
    has_sinks = True
    sees_ahead = True

    def bytes_per_block(self, spec):
        return 2 * self.context.block_size * spec.num_kv_heads * spec.head_size * self.itemsize

    @property
    def itemsize(self):
        return self.context.dtype.itemsize

    def allocate(self, spec, num_blocks):
        shape = (2, num_blocks * self.context.block_size, spec.num_kv_heads, spec.head_size)
        return torch.zeros(shape, dtype=self.context.dtype)

    def plan(self, step):
        return step

    def attend(self, spec, cache, plan, q, k, v):
        self.write(cache, plan, k, v)
        out = torch.empty_like(q)
        for index, length in enumerate(plan.seq_lens.tolist()):
            start, end = plan.query_starts[index : index + 2].tolist()
            keys, values = self.read(cache, self.slots(plan, index, length))
            mask = self.mask(spec, length, end - start)
            if plan.sees is not None:
                mask |= self.ahead(spec, length, torch.from_numpy(plan.sees[start:end]))
            out[start:end] = self.softmax(spec, q[start:end].float(), keys, values, mask)
        return out

    def write(self, cache, plan, k, v):
        cache[0, plan.slots], cache[1, plan.slots] = k, v

    def read(self, cache, slots):
        return cache[:, slots].float()

    def slots(self, plan, index, length):
        positions = torch.arange(length)
        blocks = plan.block_table[index, positions // plan.block_size]
        return blocks * plan.block_size + positions % plan.block_size

    def mask(self, spec, length, queries):
        key, query = torch.arange(length), torch.arange(length - queries, length)[:, None]
        window = length if spec.window is None else spec.window
        return (key <= query) & (key > query - window)

    def ahead(self, spec, length, sees):
        key, query = torch.arange(length), torch.arange(length - len(sees), length)[:, None]
        return (key > query) & (key <= sees[:, None])

    def softmax(self, spec, q, keys, values, mask):
        keys, values = (self.spread(spec, side) for side in (keys, values))
        scores = self.cap(spec, torch.einsum("qhd,khd->hqk", q, keys) * spec.scale)
        scores = self.sink(spec, scores.masked_fill(~mask, -torch.inf))
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values)

    def sink(self, spec, scores):
        if spec.sinks is None:
            return scores
        return torch.cat((scores, spec.sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), -1)

    def cap(self, spec, scores):
        return scores if spec.softcap is None else spec.softcap * (scores / spec.softcap).tanh()

    def spread(self, spec, side):
        return side.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)


class Limited(Plain):
    """Right: requests may limit how many tokens each token sees."""

    sees_ahead = False

    class Arguments(plugins.Arguments):
        window: int | None = None

    def attend(self, spec, cache, plan, q, k, v):
        self.write(cache, plan, k, v)
        out = torch.empty_like(q)
        for index, length in enumerate(plan.seq_lens.tolist()):
            start, end = plan.query_starts[index : index + 2].tolist()
            keys, values = self.read(cache, self.slots(plan, index, length))
            limited = dataclasses.replace(spec, window=self.window(plan, index) or spec.window)
            mask = self.mask(limited, length, end - start)
            out[start:end] = self.softmax(spec, q[start:end].float(), keys, values, mask)
        return out

    def window(self, plan, index):
        return plan.arguments[index].window if plan.arguments else None


class LimitedByTheFirst(Limited):
    def window(self, plan, index):
        return super().window(plan, 0)


class LimitedWithoutArguments(Limited):
    def window(self, plan, index):
        return super().window(plan, index) if plan.arguments else 1


class KeysAlone(Plain):
    """Right: values that are part of the keys are stored once."""

    shares_values = True

    def bytes_per_block(self, spec):
        return super().bytes_per_block(spec) // (1 if spec.value_size is None else 2)

    def allocate(self, spec, num_blocks):
        return super().allocate(spec, num_blocks)[: 2 if spec.value_size is None else 1].clone()

    def write(self, cache, plan, k, v):
        cache[0, plan.slots], cache[-1, plan.slots] = k, v

    def read(self, cache, slots):
        return super().read(cache, slots).expand(2, -1, -1, -1)

    def attend(self, spec, cache, plan, q, k, v):
        out = super().attend(spec, cache, plan, q, k, v)
        return out if spec.value_size is None else self.values(out, spec.value_size)

    def values(self, out, size):
        return out[..., -size:]


class FirstElements(KeysAlone):
    def values(self, out, size):
        return out[..., :size]


class WholeHeads(KeysAlone):
    def values(self, out, size):
        return out


class NoContract(Plain, contract=None):
    pass


class NoDevices(Plain):
    devices = "cpu"


class OneBytePerBlock(Plain):
    def bytes_per_block(self, spec):
        return 1


class CountsKeysOnly(Plain):
    def bytes_per_block(self, spec):
        return super().bytes_per_block(spec) // 2


class Garbage(Plain):
    def allocate(self, spec, num_blocks):
        return super().allocate(spec, num_blocks) + 1


class Reversed(Plain):
    def attend(self, *arguments):
        return super().attend(*arguments).flip(0)


class ReversedHeads(Plain):
    def attend(self, *arguments):
        return super().attend(*arguments).flip(1)


class NotCausal(Plain):
    def mask(self, spec, length, queries):
        return torch.ones(queries, length, dtype=torch.bool)


class SeesNothingAhead(Plain):
    def ahead(self, spec, length, sees):
        return torch.zeros(len(sees), length, dtype=torch.bool)


class MovesWindow(Plain):
    def attend(self, spec, cache, plan, q, k, v):
        self.sees = plan.sees
        return super().attend(spec, cache, plan, q, k, v)

    def softmax(self, spec, q, keys, values, mask):
        if self.sees is not None and spec.window is not None:
            last = mask.long().flip(1).argmax(1)
            key, end = torch.arange(mask.shape[1]), mask.shape[1] - last[:, None]
            mask = mask & (key >= end - spec.window)
        return super().softmax(spec, q, keys, values, mask)


class IgnoresScale(Plain):
    def softmax(self, spec, q, keys, values, mask):
        return super().softmax(spec, q * spec.head_size**-0.5 / spec.scale, keys, values, mask)


class Transposed(Plain):
    def attend(self, *arguments):
        return super().attend(*arguments).transpose(0, 1)


class Double(Plain):
    def attend(self, *arguments):
        return super().attend(*arguments).double()


class TilesHeads(Plain):
    def spread(self, spec, side):
        return side.repeat(1, spec.num_heads // spec.num_kv_heads, 1)


class FirstHeadOnly(Plain):
    def spread(self, spec, side):
        return side[:, :1].expand(-1, spec.num_heads, -1)


class IgnoresWindow(Plain):
    def mask(self, spec, length, queries):
        return torch.ones(queries, length, dtype=torch.bool).tril(length - queries)


class WiderWindow(Plain):
    def mask(self, spec, length, queries):
        key, query = torch.arange(length), torch.arange(length - queries, length)[:, None]
        window = length if spec.window is None else spec.window
        return (key <= query) & (key >= query - window)


class IgnoresSoftcap(Plain):
    def cap(self, spec, scores):
        return scores


class CapsBeforeScaling(Plain):
    def cap(self, spec, scores):
        return super().cap(spec, scores / spec.scale) * spec.scale


class ClampsScores(Plain):
    def cap(self, spec, scores):
        return scores if spec.softcap is None else scores.clamp(-spec.softcap, spec.softcap)


class IgnoresSinks(Plain):
    def sink(self, spec, scores):
        return scores


class ScalesSinks(Plain):
    def sink(self, spec, scores):
        scaled = None if spec.sinks is None else spec.sinks * spec.scale
        return super().sink(dataclasses.replace(spec, sinks=scaled), scores)


class CopiesSinks(Plain):
    """Reads the sinks once, before they have changed."""

    def allocate(self, spec, num_blocks):
        self.sinks = None if spec.sinks is None else spec.sinks.clone()
        return super().allocate(spec, num_blocks)

    def sink(self, spec, scores):
        return super().sink(dataclasses.replace(spec, sinks=self.sinks), scores)


class WritesNothing(Plain):
    def attend(self, spec, cache, plan, q, k, v):
        cache = cache.clone()
        return super().attend(spec, cache, plan, q, k, v)


class StepOnly(Plain):
    def mask(self, spec, length, queries):
        return super().mask(spec, length, queries) & (torch.arange(length) >= length - queries)


class ReadsByPosition(Plain):
    def slots(self, plan, index, length):
        return torch.arange(length)

    def write(self, cache, plan, k, v):
        for index, length in enumerate(plan.seq_lens.tolist()):
            start, end = plan.query_starts[index : index + 2].tolist()
            cache[0, length - end + start : length] = k[start:end]
            cache[1, length - end + start : length] = v[start:end]


class FirstBlockOnwards(Plain):
    """Takes a sequence's blocks for consecutive ones."""

    def slots(self, plan, index, length):
        return plan.block_table[index, 0] * plan.block_size + torch.arange(length)


class ReadsWholeBlocks(Plain):
    """Reads leftovers of an earlier sequence in the last block."""

    def slots(self, plan, index, length):
        return super().slots(plan, index, -(-length // plan.block_size) * plan.block_size)

    def mask(self, spec, length, queries):
        mask = super().mask(spec, length, queries)
        rest = -length % self.context.block_size
        return torch.cat((mask, torch.ones(queries, rest, dtype=torch.bool)), 1)


class MixesSequences(Plain):
    def attend(self, spec, cache, plan, q, k, v):
        self.write(cache, plan, k, v)
        mask = self.mask(spec, len(q), len(q))
        return self.softmax(spec, q, k, v, mask)


class TableOfTheFirst(Plain):
    def slots(self, plan, index, length):
        width = plan.block_table.shape[1] * plan.block_size
        return super().slots(plan, 0, min(length, width))


class KeepsTheLastPlan(Plain):
    """Attends with the plan that it made last, whichever it gets."""

    def plan(self, step):
        self.step = step
        return step

    def attend(self, spec, cache, plan, q, k, v):
        return super().attend(spec, cache, self.step, q, k, v)


class CachesTheMask(Plain):
    """Computes the mask of a step's shape once, whatever the window."""

    def __init__(self, context):
        super().__init__(context)
        self.masks = {}

    def mask(self, spec, length, queries):
        key = (length, queries)
        if key not in self.masks:
            self.masks[key] = super().mask(spec, length, queries)
        return self.masks[key]


class InFloat8(Plain):
    """Loses the precision of bfloat16."""

    def softmax(self, spec, q, keys, values, mask):
        if self.context.dtype is torch.bfloat16:
            values = values.to(torch.float8_e5m2).float()
        return super().softmax(spec, q, keys, values, mask)


class ScalesInPlace(Plain):
    def attend(self, spec, cache, plan, q, k, v):
        q *= 2.0
        return super().attend(spec, cache, plan, q / 2.0, k, v)


class RotatesKeys(Plain):
    def attend(self, spec, cache, plan, q, k, v):
        out = super().attend(spec, cache, plan, q, k, v)
        k.zero_()
        return out


class Hoards(Plain):
    def __init__(self, context):
        super().__init__(context)
        self.plans = []

    def plan(self, step):
        self.plans.append(step)
        return step


class Viewed(Plain):
    """Right, with views of its blocks."""

    def block_views(self, cache):
        size = self.context.block_size
        return [side.view(len(side) // size, -1).view(torch.uint8) for side in cache]


class ViewsOfKeys(Viewed):
    def block_views(self, cache):
        return super().block_views(cache)[:1]


class CopiesTheBlocks(Viewed):
    def block_views(self, cache):
        return [view.clone() for view in super().block_views(cache)]


class ViewsByToken(Viewed):
    def block_views(self, cache):
        return [side.flatten(1).view(torch.uint8) for side in cache]


class ViewsInItsDtype(Viewed):
    def block_views(self, cache):
        size = self.context.block_size
        return [side.view(len(side) // size, -1) for side in cache]


class KeysTwice(Viewed):
    def block_views(self, cache):
        keys, _ = super().block_views(cache)
        return [keys, keys]


class OneView(Viewed):
    def block_views(self, cache):
        return torch.cat(super().block_views(cache), 1)


class RotatesQueriesOnly(Plain):
    rotates = True

    def rotate_and_attend(self, spec, cache, plan, q, k, v, angles):
        return self.attend(spec, cache, plan, rotated(q, angles), k, v)


class RotatesPairs(Plain):
    """Rotates neighbours, not halves."""

    rotates = True

    def rotate_and_attend(self, spec, cache, plan, q, k, v, angles):
        q, k = (torch.stack(x.unflatten(-1, (-1, 2)).unbind(-1), -2).flatten(-2) for x in (q, k))
        return self.attend(spec, cache, plan, rotated(q, angles), rotated(k, angles), v)


def rotated(x, angles):
    half, x = angles.shape[1] // 2, x.clone()
    cos, sin = (part.unsqueeze(1) for part in (angles[:, :half], angles[:, half:]))
    a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
    x[..., :half], x[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    return x


class Padded(Plain):
    """Right: reads the tensors of a step when it runs."""

    replayable = True
    pads = True

    def write(self, cache, plan, k, v):
        real = plan.slots >= 0
        super().write(cache, dataclasses.replace(plan, slots=plan.slots[real]), k[real], v[real])

    def attend(self, spec, cache, plan, q, k, v):
        now = dataclasses.replace(plan, seq_lens=plan.lens.numpy())
        return super().attend(spec, cache, now, q, k, v)


class WritesPadding(Padded):
    def write(self, cache, plan, k, v):
        Plain.write(self, cache, plan, k, v)


class PlansLengths(Padded):
    def plan(self, step):
        return dataclasses.replace(step, on_device=(step.starts.clone(), step.lens.clone()))


class ReadsBounds(Padded):
    def attend(self, spec, cache, plan, q, k, v):
        return Plain.attend(self, spec, cache, plan, q, k, v)


class MarksBlocks(Viewed):
    """Remembers outside the cache which slots were written."""

    def allocate(self, spec, num_blocks):
        cache = super().allocate(spec, num_blocks)
        cache.written = torch.zeros(cache.shape[1], dtype=torch.bool)
        return cache

    def attend(self, spec, cache, plan, q, k, v):
        cache.written[plan.slots] = True
        cache[:, ~cache.written] = 0
        return super().attend(spec, cache, plan, q, k, v)


class Coded(Viewed):
    """Right, with codes of 8 bits."""

    cache_dtypes = ("auto", *CODE_DTYPES)

    @property
    def is_coded(self):
        return self.context.cache_dtype != "auto"

    @property
    def itemsize(self):
        return 1 if self.is_coded else super().itemsize

    def bytes_per_block(self, spec):
        scales = 8 * self.context.block_size * spec.num_kv_heads if self.is_coded else 0
        return super().bytes_per_block(spec) + scales

    def allocate(self, spec, num_blocks):
        if not self.is_coded:
            return super().allocate(spec, num_blocks)
        shape = (2, num_blocks * self.context.block_size, spec.num_kv_heads)
        return torch.zeros(*shape, spec.head_size, dtype=torch.uint8), torch.zeros(shape)

    def block_views(self, cache):
        parts = cache if self.is_coded else (cache,)
        return [view for part in parts for view in super(Coded, self).block_views(part)]

    def write(self, cache, plan, k, v):
        if not self.is_coded:
            return super().write(cache, plan, k, v)
        for side, x in enumerate((rotate_heads(k), v)):
            codes, scales = self.quantize(x)
            cache[0][side, plan.slots] = codes.view(torch.uint8)
            self.write_scales(cache[1][side], plan.slots, scales)

    def quantize(self, x):
        return quantize_heads(x, self.context.cache_dtype)

    def write_scales(self, to, slots, scales):
        to[slots] = scales

    def read(self, cache, slots):
        if not self.is_coded:
            return super().read(cache, slots)
        codes = cache[0][:, slots].view(CODE_DTYPES[self.context.cache_dtype])
        keys = dequantize_heads(codes, self.read_scales(cache[1], slots), torch.float32)
        keys[0] = rotate_heads(keys[0])
        return keys

    def read_scales(self, scales, slots):
        return scales[:, slots]


class ScalesTokens(Coded):
    """One scale for all heads of a token."""

    def quantize(self, x):
        codes, scales = quantize_heads(x.flatten(1)[:, None], self.context.cache_dtype)
        return codes.view(x.shape), scales.expand(x.shape[:2])


class OwnUncoded(Coded):
    """Attends to the tokens of the step as they are."""

    def write(self, cache, plan, k, v):
        super().write(cache, plan, k, v)
        self.own = plan.slots, torch.stack((k, v)).float()

    def read(self, cache, slots):
        sides_of, (own_slots, sides) = super().read(cache, slots), self.own
        at, index = (slots[:, None] == own_slots).nonzero().unbind(1)
        sides_of[:, at] = sides[:, index]
        return sides_of


class KeepsScales(Coded):
    """Leaves the scales that an earlier token of the slot has written."""

    def write_scales(self, to, slots, scales):
        to[slots] = torch.where(to[slots] == 0, scales, to[slots])


class ScalesOfValues(Coded):
    def read_scales(self, scales, slots):
        return scales[1:, slots].expand(2, -1, -1)


class RowByRow(Plain):
    """Right, and each row has the same bits in any step: attends one query after the other."""

    def softmax(self, spec, q, keys, values, mask):
        rows = zip(q, mask, strict=True)
        return torch.stack([self.attend_row(spec, row, keys[m], values[m]) for row, m in rows])

    def attend_row(self, spec, q, keys, values):
        visible = torch.ones(1, len(keys), dtype=torch.bool)
        return super().softmax(spec, q[None], keys, values, visible)[0]


class SplitsByRows(RowByRow):
    """Sums the keys in as many parts as the sequence has rows."""

    has_sinks = False

    def softmax(self, spec, q, keys, values, mask):
        self.parts = len(q)
        return super().softmax(spec, q, keys, values, mask)

    def attend_row(self, spec, q, keys, values):
        keys, values = (self.spread(spec, side) for side in (keys, values))
        scores = self.cap(spec, torch.einsum("hd,khd->hk", q, keys) * spec.scale)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        parts = zip(weights.chunk(self.parts, 1), values.chunk(self.parts), strict=True)
        total = sum(torch.einsum("hk,khd->hd", w, v) for w, v in parts)
        return total / weights.sum(-1, keepdim=True)


class OwnUnrounded(RowByRow):
    """Stores keys and values without their last 6 bits; attends to the step's as they are."""

    def write(self, cache, plan, k, v):
        step_sides = torch.stack((k, v))
        self.own = plan.slots, step_sides.float()
        bits = step_sides.float().view(torch.int32) & ~0x3F
        cache[:, plan.slots] = bits.view(torch.float32).to(cache.dtype)

    def read(self, cache, slots):
        sides_of, (own_slots, sides) = super().read(cache, slots), self.own
        at, index = (slots[:, None] == own_slots).nonzero().unbind(1)
        sides_of[:, at] = sides[:, index]
        return sides_of
