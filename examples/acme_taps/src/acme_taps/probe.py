"""Taps that read: hidden states as they are, and their products with a direction."""

from __future__ import annotations

from typing import Annotated

import torch

from hardpoint import plugins
from hardpoint.plugins import ActivationTap, Meta, TapRows, TapSite

from .directions import Directions


class Residuals(ActivationTap):
    """The residual stream after some layers, as it is."""

    contract = 1

    class Arguments(plugins.Arguments):
        """After which layers."""

        layers: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]

    @classmethod
    def sites(cls, arguments: Arguments) -> list[TapSite]:
        """Return the layers' outputs."""
        return [TapSite(layer) for layer in dict.fromkeys(arguments.layers)]

    def read(self, site: TapSite, values: torch.Tensor, rows: TapRows) -> torch.Tensor:  # noqa: ARG002
        """Return the hidden states, [tokens, hidden_size]."""
        return values


class Probe(Directions):
    """A score of each token: the product of the residual stream with a direction.

    Linear probes: Alain and Bengio, "Understanding intermediate layers using linear classifier
    probes", 2016.
    """

    contract = 1

    def read(self, site: TapSite, values: torch.Tensor, rows: TapRows) -> torch.Tensor:  # noqa: ARG002
        """Return the scores, [tokens]."""
        return (values.float() * self.of(rows)).sum(-1)
