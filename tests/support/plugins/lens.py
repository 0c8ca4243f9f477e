"""A tap that predicts the next token after each layer, and products of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint import plugins
from hardpoint.plugins import ActivationTap, TapSite


class Lens(ActivationTap):
    """The likeliest next tokens after some layers, with their logits."""

    contract = 1

    class Options(plugins.Options):
        layers: list[int] = []

    class Arguments(plugins.Arguments):
        pass

    class Prepared(Arguments):
        layers: list[int]

    @classmethod
    def prepare(cls, arguments: Any, context: Any) -> Prepared:
        return cls.Prepared(layers=context.options.layers)

    @classmethod
    def sites(cls, arguments: Any) -> Sequence[TapSite]:
        return [TapSite(layer) for layer in arguments.layers]

    def read(self, site: TapSite, values: torch.Tensor, rows: Any) -> torch.Tensor:
        return self.context.unembed(values).topk(3).indices


class Probe(ActivationTap):
    """A random linear probe, by the products of the engine."""

    contract = 1

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(3, context.hidden_size, generator=generator)
        packed = context.ops.pack(weight)
        self.weight, self.product = weight, context.ops.linear(packed, (3, context.hidden_size))

    @classmethod
    def sites(cls, arguments: Any) -> Sequence[TapSite]:
        return [TapSite(1)]

    def read(self, site: TapSite, values: torch.Tensor, rows: Any) -> torch.Tensor:
        return self.product(values)
