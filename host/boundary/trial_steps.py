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


def padded_step(
    attention: CheckedAttention,
    device: torch.device,
    max_model_len: int,
    block_size: int,
    num_seqs: int,
) -> ForwardBatch:
    """Return a step of padding with the attention backend, with memory for the longest sequences.

    The attention of `CheckedModel.run_trial` needs none.

    Args:
        max_model_len: tokens of a sequence.
        block_size: tokens per block.
        num_seqs: sequences of the step, each with one token.
    """
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
    return ForwardBatch(zeros, zeros, attend)


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
        model: model with loaded weights; the other arguments are of `padded_step`.
    """
    if device.type != "cuda":
        return 0
    padded = padded_step(attention, device, max_model_len, block_size, num_seqs)
    return trial_bytes(model, device, num_seqs, 1, padded)


@torch.inference_mode()
def trial_bytes(
    model: CheckedModel,
    device: torch.device,
    num_tokens: int,
    num_rows: int,
    padded: ForwardBatch | None,
) -> int:
    """Return the bytes that trial steps need at once on a GPU.

    Args:
        num_tokens: tokens of a step without a cache.
        num_rows: hidden states to compute logits of.
        padded: another step, of padding; None if there is none. Its failure is logged alone, and
            steps are not measured by it then.
    """
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model.run_trial(num_tokens, num_rows)
    if padded is not None:
        _run_padded(model, padded)
    return torch.cuda.max_memory_allocated(device) - before


def _run_padded(model: CheckedModel, step: ForwardBatch) -> None:
    try:
        model.forward(step)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        _log.warning(
            "a trial step of %d sequences of padding failed: %s",
            len(step.token_ids),
            describe(error),
        )
