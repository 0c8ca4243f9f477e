"""Speculator with an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from hardpoint import plugins
from hardpoint.builtin_plugins.models.heads.eagle3 import Eagle3Head
from hardpoint.plugins import ConfigError, Meta, ModelError, SpeculatorContext

from .trained_head import TrainedHead

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_NO_LOGIT = -1e30


class Eagle3(TrainedHead):
    """Drafts with an EAGLE-3 head (Li et al., arXiv:2503.01840), in chains.

    The head reads hidden states after three layers, shares the embedding of the engine's model,
    and has an output layer for a part of the vocabulary.
    """

    contract = 1
    needs_layers = True

    class Options(plugins.Options):
        """Options.

        Attributes:
            model: the head, as `model` of the configuration.
            layers: three layers, by index from 0, after which it reads hidden states. None is
                those of its config, otherwise EAGLE's: 1, n // 2 - 1 and n - 4 of n layers.
        """

        model: Annotated[str, Meta(min_length=1)]
        layers: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=3, max_length=3)] | (
            None
        ) = None

    options: Options

    def __init__(self, context: SpeculatorContext) -> None:
        """Load the head.

        Raises:
            ConfigError: it cannot be loaded, or does not fit the engine's model.
        """
        super().__init__(context)
        self.hidden_layers = self._layers()

    def open(self) -> Any:
        """Return the head, and read the tokens of its vocabulary.

        Raises:
            ModelError: it cannot be loaded.
        """
        assert self.context.open_head is not None
        opened = self.context.open_head(self.options.model)
        if not isinstance(opened.model, Eagle3Head):
            architecture = opened.model.context.config.architecture
            raise ModelError(f"model: expected {_ARCHITECTURE}, got {architecture}")
        self._eagle, self._tokens = opened.model, None
        size = opened.model.draft_vocab_size
        if size != self.context.vocab_size:
            weights = dict(opened.loader.weights({"d2t": (size,)}))
            self._tokens = self._vocabulary(weights.get("d2t"), size)
        return opened

    def _vocabulary(self, offsets: Any, size: int) -> torch.Tensor:
        """Return the token of each row of the output layer, by their differences in `d2t`.

        Raises:
            ModelError: there are none, or they are no tokens of the vocabulary.
        """
        if not isinstance(offsets, torch.Tensor) or offsets.shape != (size,):
            shape = getattr(offsets, "shape", None)
            form = "none" if shape is None else f"the shape {list(shape)}"
            raise ModelError(f"model: weight 'd2t': expected {size} whole numbers, got {form}")
        tokens = torch.arange(size) + offsets.to(torch.int64)
        vocab_size = self.context.vocab_size
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
            raise ModelError(
                f"model: weight 'd2t': expected tokens from 0 to {vocab_size - 1}, got "
                f"{int(tokens.min())} to {int(tokens.max())}"
            )
        return tokens.to(self.context.device)

    def _layers(self) -> Sequence[int]:
        """Return the layers after which the head reads hidden states.

        Raises:
            ConfigError: they are not layers of the model.
        """
        assert self.context.loaded is not None
        loader = self.context.loaded.loader
        count = 0 if loader is None else int(loader.config().hf.get("num_hidden_layers", 0))
        described = self.head.context.config.hf.get("eagle_config") or {}
        stated = described.get("eagle_aux_hidden_state_layer_ids")
        layers = self.options.layers or stated or [1, count // 2 - 1, count - 4]
        if len(layers) != 3 or not all(type(n) is int and 0 <= n < count for n in layers):
            raise ConfigError(
                f"plugin.{self.name}.layers: expected three layers from 0 to {count - 1}, got "
                f"{layers}"
            )
        return tuple(layers)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return logits, with the lowest number for tokens without a row in the output layer."""
        logits = self._eagle.draft_logits(output).to(torch.float32)
        if self._tokens is None:
            return logits
        whole = logits.new_full((len(logits), self.context.vocab_size), _NO_LOGIT)
        whole[:, self._tokens] = logits
        return whole
