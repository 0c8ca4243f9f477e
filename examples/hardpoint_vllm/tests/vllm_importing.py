"""Logits processors that import vLLM's classes and helpers, as most that are published do."""

from __future__ import annotations

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
)
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

logger = init_logger(__name__)


class NoRepeat:
    """A callable of V0: bans tokens that followed the last tokens before.

    Method: `no_repeat_ngram_size`, Paulus et al. 2017, arXiv:1705.04304.
    """

    def __init__(self, size: int = 2) -> None:
        self.size = size

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        last = output_ids[len(output_ids) + 1 - self.size :]
        for start in range(len(output_ids) + 1 - self.size):
            if output_ids[start : start + self.size - 1] == last:
                logits[output_ids[start + self.size - 1]] = -torch.inf
        return logits


class NoRepeatV1(AdapterLogitsProcessor):
    """The same in V1, by the class that wraps callables."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        size = (params.extra_args or {}).get("size")
        if size is not None and size < 1:
            raise VLLMValidationError(f"size: expected at least 1, got {size}")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        size = (params.extra_args or {}).get("size")
        return NoRepeat(size) if size else None


class NoRepeatBatch(LogitsProcessor):
    """The same in V1, with states by row."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.rows: dict[int, tuple[NoRepeat, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def state(params, prompt_ids, output_ids):
            size = (params.extra_args or {}).get("size")
            return (NoRepeat(size), output_ids) if size else None

        process_dict_updates(self.rows, batch_update, state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (call, output_ids) in self.rows.items():
            call(output_ids, logits[row])
        return logits


class NoRepeatV2(SlotProcessor):
    """The same in V2, with sizes on host and device in vLLM's own kinds of tensors."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState):
        self.states = req_states
        self.sizes = UvaBackedTensor(req_states.max_num_reqs, dtype=torch.int32)
        self.copies = StagedWriteTensor(
            (req_states.max_num_reqs, 2), dtype=torch.int32, device=req_states.device
        )

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        size = (sampling_params.extra_args or {}).get("size")
        self.sizes.np[req_idx] = size or 0
        self.copies.stage_write(req_idx, 0, [0, size or 0])
        return bool(size)

    def apply_staged_writes(self) -> None:
        self.sizes.copy_to_uva()
        self.copies.apply_write()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        assert np.count_nonzero(self.sizes.np[ctx.idx_mapping_np]) == len(logits)
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            first = int(self.states.prompt_len.gpu[slot])
            length = int(ctx.seq_lens_upper_bound_np[row])
            assert self.copies.gpu[slot].tolist() == [0, self.sizes.gpu[slot]]
            outputs = self.states.all_token_ids.gpu[slot, first:length].tolist()
            NoRepeat(int(self.sizes.gpu[slot]))(outputs, logits[row])
        return logits
