"""Samplers with one mistake each, and a right one."""

from __future__ import annotations

import torch

from hardpoint.plugins import Sampler
from support.samples import Sample, spend


def noise(seed, position, vocab_size):
    generator = torch.Generator().manual_seed(hash((seed, position)))
    return -torch.empty(vocab_size).exponential_(generator=generator).log()


class Gumbel(Sample, Sampler, contract=1):
    """Right: the argmax of logits and Gumbel noise, row by row."""

    def sample(self, logits, rows):
        chosen = (logits + self.noise(logits, rows)).argmax(-1)
        return torch.where(rows.greedy, logits.argmax(-1), chosen)

    def noise(self, logits, rows):
        pairs = zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True)
        return torch.stack([noise(*pair, logits.shape[1]) for pair in pairs])


class NoContract(Gumbel, contract=None):
    pass


class TakesTheLeast(Gumbel):
    def sample(self, logits, rows):
        return logits.argmin(-1)


class LastOfEquals(Gumbel):
    def sample(self, logits, rows):
        last = logits.shape[1] - 1 - logits.flip(-1).argmax(-1)
        return torch.where(rows.greedy, last, super().sample(logits, rows))


class IgnoresGreedy(Gumbel):
    def sample(self, logits, rows):
        return (logits + self.noise(logits, rows)).argmax(-1)


class AlwaysGreedy(Gumbel):
    def sample(self, logits, rows):
        return logits.argmax(-1)


class IgnoresTheSeed(Gumbel):
    def noise(self, logits, rows):
        return torch.stack([noise(0, p, logits.shape[1]) for p in rows.positions.tolist()])


class IgnoresThePosition(Gumbel):
    def noise(self, logits, rows):
        return torch.stack([noise(s, 0, logits.shape[1]) for s in rows.seeds.tolist()])


class AddsSeedAndPosition(Gumbel):
    def noise(self, logits, rows):
        sums = (rows.seeds + rows.positions).tolist()
        return torch.stack([noise(0, each, logits.shape[1]) for each in sums])


class GlobalGenerator(Gumbel):
    def noise(self, logits, rows):
        return -torch.empty_like(logits).exponential_().log()


class SeedsTheGlobalGenerator(Gumbel):
    def noise(self, logits, rows):
        result = torch.empty_like(logits)
        for row, pair in enumerate(zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True)):
            torch.manual_seed(hash(pair))
            result[row].exponential_()
        return -result.log()


class NoiseByRow(Gumbel):
    def noise(self, logits, rows):
        pairs = zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True)
        noises = [noise(s + i, p, logits.shape[1]) for i, (s, p) in enumerate(pairs)]
        return torch.stack(noises)


class NoiseOfTheBatch(Gumbel):
    def noise(self, logits, rows):
        return noise(int(rows.seeds[0]), int(rows.positions[0]), logits.numel()).view_as(logits)


class DrawsMasked(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits.clamp(min=-3.0), rows)


class Flatter(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits * 0.8, rows)


class Int32(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits, rows).int()


class Column(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits, rows)[:, None]


class OnMeta(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits, rows).to("meta")


class OffByOne(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits, rows) + 1


class Beyond(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits, rows) + logits.shape[1]


class Lists(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits, rows).tolist()


class EditsLogits(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits.sub_(logits.amax(-1, keepdim=True)), rows)


class Multinomial(Gumbel):
    def sample(self, logits, rows):
        chosen = logits.argmax(-1)
        for row in (~rows.greedy).nonzero().flatten().tolist():
            seed = hash((int(rows.seeds[row]), int(rows.positions[row])))
            generator = torch.Generator().manual_seed(seed)
            share = logits[row].softmax(-1)
            chosen[row] = torch.multinomial(share, 1, generator=generator)
        return chosen


class HidesNan(Gumbel):
    def sample(self, logits, rows):
        return super().sample(logits.nan_to_num(-1e30, 30.0, -1e30), rows)


class Hoards(Gumbel):
    def __init__(self, context):
        super().__init__(context)
        self.seen = {}

    def sample(self, logits, rows):
        self.seen |= dict.fromkeys(rows.seeds.tolist())
        return super().sample(logits, rows)


class Slow(Gumbel):
    def sample(self, logits, rows):
        spend(0.2)
        return super().sample(logits, rows)


class Alternating(Gumbel):
    """Right: every second token of a request is the likeliest."""

    def start(self, request):
        return [len(request.output_token_ids)]

    def advance(self, state, token):
        state[0] += 1
        return state

    def sample(self, logits, rows):
        is_best = torch.tensor([state[0] % 2 == 1 for state in rows.states()])
        return torch.where(is_best, logits.argmax(-1), super().sample(logits, rows))


class SharesStates(Alternating):
    def fork(self, state):
        return state


class CountsTogether(Alternating):
    """Counts the tokens of all requests in one state."""

    def start(self, request):
        self.total = getattr(self, "total", [0])
        return self.total
