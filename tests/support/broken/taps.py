"""Activation taps with one mistake each, and two right ones."""

from __future__ import annotations

import torch

from hardpoint import plugins
from hardpoint.plugins import ActivationTap, TapSite


class Norms(ActivationTap):
    """Right: the norm of each hidden state."""

    contract = 1

    @classmethod
    def sites(cls, arguments):
        return [TapSite(1), TapSite(2, "mlp_output")]

    def read(self, site, values, rows):
        return values.norm(dim=-1)


class Scaled(ActivationTap):
    """Right: hidden states of the answer, multiplied."""

    contract = 1

    class Arguments(plugins.Arguments):
        factor: float = 2.0
        layer: int = 0

    @classmethod
    def sites(cls, arguments):
        return [TapSite(arguments.layer, "attention_output")]

    def change(self, site, values, rows):
        factors = torch.where(rows.in_prompt()[:, None], 1.0, rows.tensor("factor"))
        return values * factors


class NoContract(Norms):
    pass


class Neither(Norms):
    contract = 1
    read = ActivationTap.read


class NoSites(Norms):
    contract = 1

    @classmethod
    def sites(cls, arguments):
        return []


class WrongPlace(Norms):
    contract = 1

    @classmethod
    def sites(cls, arguments):
        return [TapSite(0, "logits")]


class Sums(Norms):
    contract = 1

    def read(self, site, values, rows):
        return values.sum(0)


class Cuts(Scaled):
    contract = 1

    def change(self, site, values, rows):
        return values[:, :3]


class Infinite(Scaled):
    contract = 1

    def change(self, site, values, rows):
        return values / 0


class Centred(Norms):
    contract = 1

    def read(self, site, values, rows):
        return values - values.mean(0)


class Counts(Norms):
    contract = 1
    count = 0

    def read(self, site, values, rows):
        self.count += 1
        return values[:, 0] + self.count


class InPlace(Scaled):
    contract = 1

    def change(self, site, values, rows):
        return values.mul_(2)


class OneKey(Scaled):
    contract = 1

    @classmethod
    def cache_key(cls, arguments):
        return b"scaled"


class TextKey(Scaled):
    contract = 1

    @classmethod
    def cache_key(cls, arguments):
        return "scaled"


class Fails(Norms):
    contract = 1

    def read(self, site, values, rows):
        raise KeyError("direction")
