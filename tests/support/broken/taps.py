"""Activation taps with one mistake each, and two right ones."""

from __future__ import annotations

import torch

from hardpoint import plugins
from hardpoint.plugins import ActivationTap, TapSite
from support.samples import Sample


class Norms(Sample, ActivationTap, contract=1):
    """Right: the norm of each hidden state."""

    @classmethod
    def sites(cls, arguments):
        return [TapSite(1), TapSite(2, "mlp_output")]

    def read(self, site, values, rows):
        return values.norm(dim=-1)


class Scaled(Sample, ActivationTap, contract=1):
    """Right: hidden states of the answer, multiplied."""

    class Arguments(plugins.Arguments):
        factor: float = 2.0
        layer: int = 0

    @classmethod
    def sites(cls, arguments):
        return [TapSite(arguments.layer, "attention_output")]

    def change(self, site, values, rows):
        factors = torch.where(rows.in_prompt()[:, None], 1.0, rows.tensor("factor"))
        return values * factors


class NoContract(Norms, contract=None):
    pass


class Neither(Norms):
    read = ActivationTap.read


class NoSites(Norms):
    @classmethod
    def sites(cls, arguments):
        return []


class WrongPlace(Norms):
    @classmethod
    def sites(cls, arguments):
        return [TapSite(0, "logits")]


class Sums(Norms):
    def read(self, site, values, rows):
        return values.sum(0)


class Cuts(Scaled):
    def change(self, site, values, rows):
        return values[:, :3]


class Infinite(Scaled):
    def change(self, site, values, rows):
        return values / 0


class Centred(Norms):
    def read(self, site, values, rows):
        return values - values.mean(0)


class Counts(Norms):
    count = 0

    def read(self, site, values, rows):
        self.count += 1
        return values[:, 0] + self.count


class InPlace(Scaled):
    def change(self, site, values, rows):
        return values.mul_(2)


class OneKey(Scaled):
    @classmethod
    def cache_key(cls, arguments):
        return b"scaled"


class TextKey(Scaled):
    @classmethod
    def cache_key(cls, arguments):
        return "scaled"


class Fails(Norms):
    def read(self, site, values, rows):
        raise KeyError("direction")
