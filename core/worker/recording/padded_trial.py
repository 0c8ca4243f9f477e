"""A decode step of padding alone, which needs as much memory as one of the longest sequences."""

from __future__ import annotations

import logging

import torch

from hardpoint.boundary.checked_attention import CheckedAttention
from hardpoint.boundary.checked_model import CheckedModel
from hardpoint.plugins import ForwardBatch
from hardpoint.registry.blame import describe
from hardpoint.system.memory import is_out_of_memory

from .decode_inputs import DecodeInputs, DecodeShape

_log = logging.getLogger("hardpoint")

_BLOCKS = 2  # of the cache: nothing is written to it


class PaddedTrial:
    """Runs a step with the attention backend, whose results need memory for the longest sequences.

    The attention of `CheckedModel.run_trial` needs none.
    """

    def __init__(
        self,
        model: CheckedModel,
        attention: CheckedAttention,
        shape: DecodeShape,
        device: torch.device,
    ) -> None:
        """Allocate inputs and a small cache.

        Args:
            model: whose weights are loaded.
            attention: of its layers, which pads.
            shape: of the step.
            device: of the model.
        """
        self._model = model
        self._size = shape.max_num_seqs
        self._inputs = inputs = DecodeInputs(shape, device)
        caches = attention.allocate(_BLOCKS)
        self._attend = attention.of_step(caches, inputs.attention(self._size))

    def run(self) -> None:
        """Run the step. A failure is logged alone: steps are not measured by it then."""
        token_ids, positions = self._inputs.tokens(self._size)
        try:
            self._model.forward(ForwardBatch(token_ids, positions, self._attend))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _log.warning(
                "a trial step of %d sequences of padding failed: %s", self._size, describe(error)
            )
