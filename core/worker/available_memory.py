"""Measures the memory that a rank has for the KV cache, once its model is loaded."""

from __future__ import annotations

import torch

from hardpoint.boundary.checked_attention import CheckedAttention
from hardpoint.boundary.checked_model import CheckedModel
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.plugins import WorkerInfo
from hardpoint.system.memory import MemoryEstimate, MemoryLimit, cache_share, memory_limit

from .padded_trial import PaddedTrial, trial_bytes
from .ranks import Ranks


def share_of_memory(spec: WorkerSpec, ranks: Ranks) -> MemoryLimit:
    """Return what this rank may still allocate; the CPU ranks of one host share its memory."""
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
