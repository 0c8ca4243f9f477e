"""Trial steps of checked models, to measure memory on a GPU; one is of padding alone."""

from __future__ import annotations

import logging

import numpy as np
import torch

from hardpoint.host.registry.blame import describe
from hardpoint.host.system.memory import is_out_of_memory
from hardpoint.plugins import AttentionStep, ForwardBatch

from .checked_attention import CheckedAttention
from .checked_model import CheckedModel

_log = logging.getLogger("hardpoint")

_BLOCKS = 2  # of the cache: nothing is written to it


class PaddedTrial:
    """Runs a padded step with the attention backend, with memory for the longest sequences.

    The attention of `CheckedModel.run_trial` needs none.
    """

    def __init__(
        self,
        model: CheckedModel,
        attention: CheckedAttention,
        device: torch.device,
        *,
        num_seqs: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        """Allocate inputs and a small cache.

        Args:
            attention: attention of its layers, which pads.
            num_seqs: sequences of the step, each with one token.
            max_model_len: tokens of a sequence.
            block_size: tokens per block.
        """
        self._model, self._num_seqs = model, num_seqs
        zeros = torch.zeros(num_seqs, dtype=torch.int64, device=device)
        starts = torch.arange(num_seqs + 1, device=device)
        shape = num_seqs, -(-max_model_len // block_size)
        steps = [
            AttentionStep(
                query_starts=np.arange(num_seqs + 1),
                seq_lens=np.full(num_seqs, max_model_len),
                num_single=num_seqs,
                block_table=torch.zeros(shape, dtype=torch.int64, device=device),
                slots=torch.full_like(zeros, -1),
                block_size=block_size,
                group=group,
                on_device=(starts, zeros),
            )
            for group in range(len(attention.groups))
        ]
        attend = attention.of_step(attention.allocate(_BLOCKS), steps)
        self._batch = ForwardBatch(zeros, zeros, attend)

    def run(self) -> None:
        """Run the step. A failure is logged alone: steps are not measured by it then."""
        try:
            self._model.forward(self._batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _log.warning(
                "a trial step of %d sequences of padding failed: %s",
                self._num_seqs,
                describe(error),
            )


@torch.inference_mode()
def decode_bytes(
    model: CheckedModel,
    attention: CheckedAttention,
    device: torch.device,
    max_model_len: int,
    block_size: int,
    num_seqs: int,
) -> int:
    """Return the bytes that a decode step needs at once; 0 on a CPU, where it is not measured.

    Args:
        model: as for `PaddedTrial`, as the following ones.
        attention: attention of its layers.
        device: device of the model.
        max_model_len: tokens of a sequence.
        block_size: tokens per block.
        num_seqs: sequences of the step.
    """
    if device.type != "cuda":
        return 0
    trial = PaddedTrial(
        model,
        attention,
        device,
        num_seqs=num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
    )
    return trial_bytes(model, device, num_seqs, 1, trial)


@torch.inference_mode()
def trial_bytes(
    model: CheckedModel,
    device: torch.device,
    num_tokens: int,
    num_rows: int,
    padded: PaddedTrial | None,
) -> int:
    """Return the bytes that trial steps need at once on a GPU.

    Args:
        model: model with loaded weights.
        device: device of the model.
        num_tokens: tokens of a step without a cache.
        num_rows: hidden states to compute logits of.
        padded: another step; None if there is none.
    """
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model.run_trial(num_tokens, num_rows)
    if padded is not None:
        padded.run()
    return torch.cuda.max_memory_allocated(device) - before
