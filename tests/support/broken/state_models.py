"""Models with states and one mistake each, and a right one."""

from __future__ import annotations

import torch

from hardpoint.plugins import TensorSpec
from support.broken.models import HIDDEN, Tiny


class Summing(Tiny):
    """Right: the second layer adds a decayed sum of earlier inputs."""

    def kv_specs(self):
        return super().kv_specs()[:1]

    def state_specs(self):
        return [(TensorSpec((HIDDEN,), "float32"),)]

    def forward(self, batch):
        x = self.embedded(batch)
        x = torch.tanh(x + self.attended(batch, 0, x))
        qkv = x @ self.weights["1.qkv.weight"].T
        mixed = self.recurred(batch, qkv[:, :HIDDEN]) * qkv[:, HIDDEN : 2 * HIDDEN].sigmoid()
        return torch.tanh(x + mixed.to(x.dtype) @ self.weights["1.out.weight"].T)

    def weight_shapes(self):
        return super().weight_shapes() | {"1.qkv.weight": (2 * HIDDEN, HIDDEN)}

    def recurred(self, batch, x):
        return batch.recur(0, self.advance, x)

    def advance(self, states, starts, x):
        (sums,), out = states, torch.empty_like(x, dtype=torch.float32)
        for row in range(len(sums)):
            for token in range(starts[row], starts[row + 1]):
                sums[row] = out[token] = 0.8 * sums[row] + x[token].float()
        return out, (sums,)


class LeaksBetweenRows(Summing):
    def advance(self, states, starts, x):
        out, (sums,) = super().advance(states, starts, x)
        return out, (sums - 0.01 * sums.sum(0),)


class BeginsAnew(Summing):
    """Ignores the chunks before."""

    def advance(self, states, starts, x):
        return super().advance([state.zero_() for state in states], starts, x)


class KeepsItInTheModel(Summing):
    """Not restored after a preemption."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.kept = torch.zeros(HIDDEN)

    def advance(self, states, starts, x):
        out, (sums,) = super().advance(states, starts, x)
        self.kept = 0.5 * self.kept + out[-1]
        return out + self.kept, (sums,)


class ReturnsHalf(Summing):
    def advance(self, states, starts, x):
        out, (sums,) = super().advance(states, starts, x)
        return out, (sums.half(),)


class RecursTwice(Summing):
    def recurred(self, batch, x):
        super().recurred(batch, x)
        return super().recurred(batch, x)


class ForgetsToRecur(Summing):
    def recurred(self, batch, x):
        return x.float()


class NamesADevice(Summing):
    def state_specs(self):
        return [(TensorSpec((HIDDEN,), "cuda"),)]


class StatesAfterLoading(Summing):
    def state_specs(self):
        return super().state_specs() if hasattr(self, "weights") else []
