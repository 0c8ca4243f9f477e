"""Activation taps for the tests: right ones, and some with faults."""

from __future__ import annotations

import torch

from hardpoint import plugins
from hardpoint.plugins import ActivationTap, TapSite
from hardpoint.plugins.sampling.activation_tap import PLACES
from support.samples import Sample


class Raw(Sample, ActivationTap, contract=1):
    """Hidden states as they are, at all places of some layers."""

    class Arguments(plugins.Arguments):
        layers: tuple[int, ...] = (0,)

    @classmethod
    def sites(cls, arguments):
        return [TapSite(layer, place) for layer in arguments.layers for place in PLACES]

    def read(self, site, values, rows):
        return values


class Places(ActivationTap):
    """The position of each token, and whether it is of the prompt; needs not all tokens."""

    contract = 1
    needs_all = False

    @classmethod
    def sites(cls, arguments):
        return [TapSite(1)]

    def read(self, site, values, rows):
        return torch.stack([rows.positions(), rows.in_prompt().long()], 1)


class Add(Sample, ActivationTap, contract=1):
    """A ramp, added to the hidden states of a place."""

    class Arguments(plugins.Arguments):
        strength: float
        place: str = "layer_output"
        layer: int = 1

    @classmethod
    def sites(cls, arguments):
        return [TapSite(arguments.layer, arguments.place)]

    def change(self, site, values, rows):
        ramp = torch.linspace(-1, 1, values.shape[1], dtype=values.dtype)
        return values + rows.tensor("strength") * ramp


class Leave(Sample, ActivationTap, contract=1):
    """Ends the layers of some positions, or of tokens with a likely next token."""

    class Arguments(plugins.Arguments):
        layer: int = 0
        first: int = 0
        every: int = 1
        threshold: float = 0.0

    @classmethod
    def sites(cls, arguments):
        return [TapSite(arguments.layer)]

    def exits(self, site, values, rows):
        positions = rows.positions()
        first, every = (rows.tensor(name).squeeze(1) for name in ("first", "every"))
        exits = (positions >= first) & (positions % every == 0)
        thresholds = rows.tensor("threshold").squeeze(1)
        if thresholds.any():  # which ranks that share the output layer cannot
            exits &= self.context.unembed(values).softmax(-1).amax(-1) >= thresholds
        return exits


class Faulty(Sample, ActivationTap, contract=1):
    """Fails in the way that a request names."""

    class Arguments(plugins.Arguments):
        how: str

    @classmethod
    def sites(cls, arguments):
        if arguments.how == "sites":
            raise KeyError("sites")
        if arguments.how == "no sites":
            return []
        return [TapSite(0)]

    def read(self, site, values, rows):
        hows = {arguments.how for arguments in rows.arguments}
        if "raises" in hows:
            raise KeyError("direction")
        if "short" in hows:
            return values[1:]
        if "no tensor" in hows:
            return 7
        if "reads in place" in hows:
            values.zero_()
        if "grows" in hows and rows.first_positions[0]:
            return values[:, :3]
        if "squares" in hows:
            return values @ values.T
        return values[:, :2]

    def change(self, site, values, rows):
        hows = {arguments.how for arguments in rows.arguments}
        if "nan" in hows:
            return values * float("nan")
        if "narrow" in hows:
            return values[:, :3]
        return None

    def exits(self, site, values, rows):
        hows = {arguments.how for arguments in rows.arguments}
        if "exits raises" in hows:
            raise KeyError("threshold")
        if "exits by number" in hows:
            return torch.ones(len(values))
        return None


TAPS = {
    "enable": [
        {"use": f"{__name__}:{cls.__name__}", "name": cls.__name__.lower()}
        for cls in (Raw, Places, Add, Leave, Faulty)
    ]
}
"""The section `plugins` of an engine that has them."""
