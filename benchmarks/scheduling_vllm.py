"""The load of benchmarks/scheduler.py, and vLLM's scheduler and KV cache manager under it."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65_536
VOCABULARY = 32_000
SHORTEST, WAITING_PROMPT = 64, 8
TOKEN = 5  # the token that every request samples
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_MODEL_LEN,
}
"""The config.json that vLLM's scheduler needs."""


def prompt(index: int, length: int) -> list[int]:
    """Return a prompt that shares no block with the prompts of other indices."""
    return random.Random(index).choices(range(VOCABULARY), k=length)


def running_prompts(count: int) -> Iterator[tuple[str, list[int]]]:
    """Yield ids and prompts with lengths that reach block boundaries in different steps."""
    for index in range(count):
        yield f"running-{index}", prompt(index, SHORTEST + index % BLOCK_SIZE)


def waiting_prompts(count: int) -> Iterator[tuple[str, list[int]]]:
    """Yield ids and prompts of requests that find no running slot."""
    for index in range(count):
        yield f"waiting-{index}", prompt(-1 - index, WAITING_PROMPT)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the microseconds of processor time that a call takes, and its result."""
    time.thread_time()  # warms the caches for the clock itself
    start = time.thread_time()
    result = call()
    return (time.thread_time() - start) * 1e6, result


class Vllm:
    """vLLM's scheduler with the same requests."""

    def __init__(self, running: int, num_blocks: int) -> None:
        """Run steps until `running` requests have finished their prompts."""
        from vllm.v1.outputs import ModelRunnerOutput as VllmOutput

        self._output = VllmOutput
        self._request = vllm_requests(BLOCK_SIZE)
        self._scheduler = vllm_scheduler(running, num_blocks, BLOCK_SIZE)
        for request_id, tokens in running_prompts(running):
            self._scheduler.add_request(self._request(request_id, tokens))
        decoding = 0
        while decoding < running:
            plan = self._scheduler.schedule()
            requests = self._scheduler.requests
            done = [
                requests[request_id].num_tokens <= requests[request_id].num_computed_tokens
                for request_id in plan.num_scheduled_tokens
            ]
            decoding = sum(done)
            self._update(plan, [[TOKEN] if last else [] for last in done])

    def step(self) -> tuple[float, float]:
        """Run a step."""
        scheduling, plan = timed(self._scheduler.schedule)
        return scheduling, self._update(plan, [[TOKEN] for _ in plan.num_scheduled_tokens])

    def add_waiting(self, count: int) -> None:
        """Add requests that find no running slot."""
        for request_id, tokens in waiting_prompts(count):
            self._scheduler.add_request(self._request(request_id, tokens))

    def _update(self, plan: Any, sampled: list[list[int]]) -> float:
        ids = list(plan.num_scheduled_tokens)
        result = self._output(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        return timed(lambda: self._scheduler.update_from_output(plan, result))[0]


class VllmCache:
    """vLLM's KV cache manager, as its scheduler builds it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Create an empty cache."""
        self._request = vllm_requests(block_size)
        self._cache = vllm_scheduler(1, num_blocks, block_size).kv_cache_manager

    def fill(self, tokens: list[int]) -> None:
        """Allocate and free the blocks of a request with this prompt."""
        request = self._request("first", tokens)
        assert self._cache.allocate_slots(request, len(tokens)) is not None
        self._cache.free(request)


def vllm_requests(block_size: int) -> Callable[[str, list[int]], Any]:
    """Return a factory of vLLM's requests, with sha256 block hashes, its default."""
    from vllm import SamplingParams as VllmParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request as VllmRequest

    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)
    params = VllmParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    return lambda request_id, tokens: VllmRequest(
        request_id, tokens, params, None, block_hasher=hasher
    )


def vllm_scheduler(max_num_seqs: int, num_blocks: int, block_size: int) -> Any:
    """Return vLLM's scheduler for a small model with one group of attention layers."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, VllmConfig
    from vllm.config import SchedulerConfig as VllmLimits
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = VllmConfig(
            model_config=ModelConfig(
                model=folder,
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
            ),
            scheduler_config=VllmLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=MAX_MODEL_LEN,
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
        )
    config.cache_config.num_gpu_blocks = num_blocks
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return VllmScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
    )
