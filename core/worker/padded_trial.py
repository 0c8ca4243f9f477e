"""Trial steps, whose memory is measured on a GPU; one of them is of padding alone."""

from __future__ import annotations

import logging

import numpy as np
import torch

from hardpoint.boundary.checked_attention import CheckedAttention
from hardpoint.boundary.checked_model import CheckedModel
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.plugins import AttentionStep, ForwardBatch, WorkerInfo
from hardpoint.registry.blame import describe
from hardpoint.system.memory import (
    MemoryEstimate,
    MemoryLimit,
    cache_share,
    is_out_of_memory,
    memory_limit,
)

from .ranks import Ranks

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
        device: torch.device,
        *,
        num_seqs: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        """Allocate inputs and a small cache.

        Args:
            model: model whose weights are loaded.
            attention: attention of its layers, which pads.
            device: device of the model.
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
        model: as for `PaddedTrial`, like those that follow.
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
        model: model whose weights are loaded.
        device: device of the model.
        num_tokens: tokens of a step without a cache.
        num_rows: hidden states of it whose logits are computed.
        padded: another step; None if there is none.
    """
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model.run_trial(num_tokens, num_rows)
    if padded is not None:
        padded.run()
    return torch.cuda.max_memory_allocated(device) - before


def share_of_memory(spec: WorkerSpec, ranks: Ranks) -> MemoryLimit:
    """Return the memory that this rank may still allocate; CPU ranks of one host share theirs."""
    limit = memory_limit(spec.device)
    if spec.device.type != "cpu" or ranks.num_local == 1:
        return limit
    share = f"{limit.source}, divided by {ranks.num_local} ranks"
    return MemoryLimit(limit.available // ranks.num_local, share)


@torch.inference_mode()
def measure(
    model: CheckedModel,
    spec: WorkerSpec,
    ranks: Ranks,
    attention: CheckedAttention,
    estimate: MemoryEstimate,
) -> WorkerInfo:
    """Return the memory that is available for the KV cache.

    On a GPU, trial steps of the largest size are measured, one of them of decodes with the
    attention backend, so that the cache can have nearly all of the rest. On a CPU, it is what the
    limits of this process leave.
    """
    bytes_per_block = attention.bytes_per_block
    windows = tuple(group.window for group in attention.groups)
    reserved = sum(estimate.parts.values())
    if spec.device.type != "cuda":
        available = share_of_memory(spec, ranks).available - estimate.step - reserved
        return WorkerInfo(bytes_per_block, max(available, 0), windows=windows)
    max_num_seqs, padded = spec.config.scheduler.max_num_seqs, None
    tokens = min(spec.config.scheduler.max_num_batched_tokens, spec.max_model_len)
    if attention.pads and not ranks.are_many:  # where one fails, others would wait for it
        padded = PaddedTrial(
            model,
            attention,
            spec.device,
            num_seqs=max_num_seqs,
            max_model_len=spec.max_model_len,
            block_size=spec.config.kv_cache.block_size,
        )
    num_rows = max_num_seqs * (1 + spec.num_draft_tokens)
    peak = trial_bytes(model, spec.device, tokens, num_rows, padded)
    del padded
    torch.cuda.empty_cache()
    free = int(torch.cuda.mem_get_info(spec.device)[0])
    share = cache_share(spec.device)
    available = max(free - peak - reserved, 0)
    return WorkerInfo(bytes_per_block, available, share, windows=windows)
