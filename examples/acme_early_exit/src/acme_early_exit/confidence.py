"""A tap that ends the layers of a token once the model is sure of the next one."""

from __future__ import annotations

from typing import Annotated

import torch

from hardpoint import plugins
from hardpoint.plugins import ActivationTap, ConfigError, Meta, TapRows, TapSite


class ConfidenceExit(ActivationTap):
    """Early exit of generated tokens by the probability of the likeliest next token.

    T. Schuster et al., "Confident adaptive language modeling", 2022.
    """

    contract = 1

    class Arguments(plugins.Arguments):
        """After which layers a token may leave, and from which probability on."""

        layers: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
        threshold: Annotated[float, Meta(ge=0)] = 0.9

    def __init__(self, context: plugins.ActivationTapContext) -> None:
        """Check that the model has an output layer for hidden states of any layer.

        Raises:
            ConfigError: ranks share the output layer.
        """
        super().__init__(context)
        if context.unembed is None:
            raise ConfigError(f"{self.name}: expected a model on one rank, for its output layer")
        self._unembed = context.unembed

    @classmethod
    def sites(cls, arguments: Arguments) -> list[TapSite]:
        """Return the outputs of the layers."""
        return [TapSite(layer) for layer in dict.fromkeys(arguments.layers)]

    def exits(self, site: TapSite, values: torch.Tensor, rows: TapRows) -> torch.Tensor | None:  # noqa: ARG002
        """Return which generated tokens have a likely successor, bool [tokens]."""
        leaves = ~rows.in_prompt()
        if not leaves.any():
            return None
        logits = self._unembed(values[leaves])
        thresholds = rows.tensor("threshold").squeeze(1)[leaves]
        leaves[leaves.clone()] = logits.softmax(-1).amax(-1) >= thresholds
        return leaves
