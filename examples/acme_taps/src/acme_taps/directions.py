"""Named directions in the space of hidden states, from a file of safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import safe_open

from hardpoint import plugins
from hardpoint.plugins import ActivationTap, ConfigError, Meta, TapRows, TapSite


class Directions(ActivationTap):
    """Base of taps with a direction and a layer in each request."""

    class Options(plugins.Options):
        """`path`: safetensors, each tensor a direction [hidden_size]."""

        path: str

    class Arguments(plugins.Arguments):
        """Which direction, and after which layer."""

        direction: str
        layer: Annotated[int, Meta(ge=0)]

    options: Options

    @classmethod
    def prepare(cls, arguments: Any, context: plugins.PrepareContext) -> Any:
        """Refuse a direction that the file does not have."""
        with safe_open(Path(context.options.path), "pt") as file:
            names = sorted(file.keys())
        if arguments.direction not in names:
            known = ", ".join(names)
            raise ValueError(f"direction: expected one of {known}, got {arguments.direction!r}")
        return arguments

    @classmethod
    def sites(cls, arguments: Arguments) -> list[TapSite]:
        """Return the residual stream after the layer."""
        return [TapSite(arguments.layer)]

    def __init__(self, context: plugins.ActivationTapContext) -> None:
        """Read the directions."""
        super().__init__(context)
        self._directions: dict[str, torch.Tensor] = {}
        with safe_open(Path(self.options.path), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name).float()
                if list(tensor.shape) != [context.hidden_size]:
                    raise ConfigError(
                        f"{self.options.path}: {name}: expected [{context.hidden_size}], the "
                        f"model's hidden size, got {list(tensor.shape)}"
                    )
                self._directions[name] = tensor.to(context.device)

    def of(self, rows: TapRows) -> torch.Tensor:
        """Return the direction of each token, float32 [tokens, hidden_size]."""
        parts = [
            self._directions[arguments.direction].expand(len(tokens), -1)
            for arguments, tokens in rows.spans()
        ]
        return torch.cat(parts)
