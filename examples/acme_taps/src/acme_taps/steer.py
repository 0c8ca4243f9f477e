"""A tap that changes: adds a direction to the residual stream."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import torch

from hardpoint import plugins
from hardpoint.plugins import Meta, TapRows, TapSite

from .directions import Directions


class Steer(Directions):
    """A direction, added to the residual stream after a layer.

    Turner et al., "Activation addition: steering language models without optimization", 2023.
    """

    contract = 1

    class Arguments(Directions.Arguments):
        """How much of the direction is added."""

        strength: Annotated[float, Meta(ge=-1000, le=1000)] = 1.0

    class Prepared(Arguments):
        """With the hash of the file, on which the keys and values of a prompt depend."""

        content: str = ""

    @classmethod
    def prepare(cls, arguments: Any, context: plugins.PrepareContext) -> Prepared:
        """Add the content of the file."""
        prepared = super().prepare(arguments, context)
        content = hashlib.sha256(Path(context.options.path).read_bytes()).hexdigest()
        return cls.Prepared(
            direction=prepared.direction,
            layer=prepared.layer,
            strength=prepared.strength,
            content=content,
        )

    def change(self, site: TapSite, values: torch.Tensor, rows: TapRows) -> torch.Tensor:  # noqa: ARG002
        """Return the changed hidden states."""
        added = rows.tensor("strength") * self.of(rows)
        return (values.float() + added).to(values.dtype)
