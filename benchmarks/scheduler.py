"""Microseconds of the scheduler, compared with vLLM's Scheduler class where it is installed.

    python benchmarks/scheduler.py                          # the whole table
    python benchmarks/scheduler.py --sizes 1 --no-waiting --steps 2   # whether it runs
    python benchmarks/scheduler.py --sizes 32 256 --no-waiting --steps 50 --json result.json

No model runs. A step is `schedule`, then `update` with a token per request; both are timed, the
code between them is not. All requests decode, with prompts of 64 to 79 tokens, so that in each step
one in sixteen needs a block and fills one. Prefix caching is on, statistics are off.

The program measures steps of N running requests, then the same with 100 000 waiting requests, which
the scheduler does not admit because `max_num_seqs` are running.

The engines take turns step by step, in one process. Printed are medians of processor time, which on
an idle machine is wall time; reading that clock adds about half a microsecond to each call.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from options import options_of, save, show_table

from hardpoint.core.kv_cache import BlockManager, BlockMetadata, Eviction
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.policy import PolicySlot
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    EvictionContext,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerContext,
)
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65_536
VOCABULARY = 32_000
SHORTEST, WAITING_PROMPT = 64, 8
TOKEN = 5  # the token that every request samples
SIZES = [1, 32, 256, 1024, 4096]
WAITING = 100_000
WARM_UP = 5
MIN_TOKENS = 2_000  # steps of few requests are repeated until so many tokens were sampled
PARTS = ("schedule", "update", "step")

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


class Hardpoint:
    """The default scheduler as an engine builds it."""

    def __init__(self, running: int, num_blocks: int) -> None:
        """Run steps until `running` requests have finished their prompts."""
        plugins = resolve_plugins(EngineConfig())
        metadata = BlockMetadata(time.monotonic)
        policy = plugins.create(
            plugins.one("eviction_policies"),
            EvictionContext,
            blocks=metadata,
            history=metadata.start_history,
            clock=time.monotonic,
        )
        cache = BlockManager(num_blocks, BLOCK_SIZE, eviction=Eviction(policy), metadata=metadata)
        self._scheduler = plugins.create(
            plugins.one("schedulers"),
            SchedulerContext,
            limits=SchedulerLimits(
                max_num_seqs=running,
                max_num_batched_tokens=MAX_MODEL_LEN,
                max_model_len=MAX_MODEL_LEN,
            ),
            kv_cache=cache,
            policy=PolicySlot(plugins, StepFaults(), 257).policy,
            clock=time.monotonic,
        )
        for request_id, tokens in running_prompts(running):
            self._scheduler.add_request(endless_request(request_id, tokens))
        decoding = 0
        while decoding < running:
            plan = self._scheduler.schedule()
            requests = map(self._scheduler.live_request, plan.num_scheduled_tokens)
            sampled = {
                request.request_id: [TOKEN]
                for request in requests
                if request.num_tokens == request.num_computed_tokens
            }
            decoding = len(sampled)
            self._scheduler.update(plan, ModelRunnerOutput(sampled))

    def step(self) -> tuple[float, float]:
        """Run a step; return the microseconds of schedule and update."""
        scheduling, plan = timed(self._scheduler.schedule)
        result = ModelRunnerOutput({request: [TOKEN] for request in plan.num_scheduled_tokens})
        updating, _ = timed(lambda: self._scheduler.update(plan, result))
        return scheduling, updating

    def add_waiting(self, count: int) -> None:
        """Add requests that find no running slot."""
        for request_id, tokens in waiting_prompts(count):
            self._scheduler.add_request(endless_request(request_id, tokens))


def endless_request(request_id: str, tokens: list[int]) -> EngineCoreRequest:
    """Return a request that does not end."""
    params = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=tokens, params=params)


class Vllm:
    """vLLM's scheduler with the same requests."""

    def __init__(self, running: int, num_blocks: int) -> None:
        """Run steps until `running` requests have finished their prompts."""
        from vllm.v1.outputs import ModelRunnerOutput as VllmOutput

        self._output = VllmOutput
        self._request = vllm_requests()
        self._scheduler = vllm_scheduler(running, num_blocks)
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


def vllm_requests() -> Callable[[str, list[int]], Any]:
    """Return a factory of vLLM's requests, with sha256 block hashes, its default."""
    from vllm import SamplingParams as VllmParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request as VllmRequest

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    params = VllmParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    return lambda request_id, tokens: VllmRequest(
        request_id, tokens, params, None, block_hasher=hasher
    )


def vllm_scheduler(max_num_seqs: int, num_blocks: int) -> Any:
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
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        )
    config.cache_config.num_gpu_blocks = num_blocks
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return VllmScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def take_turns(engines: dict[str, Any], steps: int) -> dict[str, dict[str, float]]:
    """Return the medians of each engine's schedule, update and both."""
    gc.collect()
    gc.freeze()  # as engines do after the start: long-lived objects are not scanned again
    times_by_engine: dict[str, list[tuple[float, ...]]] = {name: [] for name in engines}
    order = list(engines)
    for number in range(WARM_UP + steps):
        random.shuffle(order)  # the order decides what is in the processor's caches
        for name in order:
            times = engines[name].step()
            if number >= WARM_UP:
                times_by_engine[name].append((*times, sum(times)))
    gc.unfreeze()
    return {
        name: dict(zip(PARTS, map(statistics.median, zip(*times, strict=True)), strict=True))
        for name, times in times_by_engine.items()
    }


def measure_decodes(
    kinds: dict[str, Any], sizes: list[int], steps: int, waiting: int
) -> list[dict[str, Any]]:
    """Measure steps of running decodes, without and with waiting requests."""
    results = []
    for running in sizes:
        counted = max(steps, MIN_TOKENS // running)
        blocks = running * ((SHORTEST + 3 * (WARM_UP + counted)) // BLOCK_SIZE + 3) + 1
        engines = {name: kind(running, blocks) for name, kind in kinds.items()}
        for num_waiting in (0, waiting) if waiting else (0,):
            for engine in engines.values():
                engine.add_waiting(num_waiting)
            medians = take_turns(engines, counted)
            results.append({"running": running, "waiting": num_waiting, **medians})
            print(f"{running} running, {num_waiting} waiting: done", file=sys.stderr)
    return results


def main() -> None:
    """Parse arguments and run."""
    options = options_of(
        __doc__,
        sizes=(SIZES, "running requests"),
        steps=(48, "counted steps"),
        no_waiting=(False, "no waiting requests"),
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
    schedulers: dict[str, Any] = {"hardpoint": Hardpoint}
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: its scheduler is not measured", file=sys.stderr)
    else:
        schedulers["vllm"] = Vllm
    waiting = 0 if options.no_waiting else WAITING
    decodes = measure_decodes(schedulers, options.sizes, options.steps, waiting)
    heads = [f"{name} {part}" for name in schedulers for part in PARTS]
    rows = []
    for result in decodes:
        cells = [f"{value:,.0f}" for name in schedulers for value in result[name].values()]
        reference, *others = (result[name]["step"] for name in schedulers)
        size = f"{result['running']} / {result['waiting']}"
        rows.append([size, *cells, *(f"{other / reference:.1f}x" for other in others)])
    heads += ["ratio"] * (len(schedulers) - 1)
    title = "microseconds per step (ratio: vLLM / Hardpoint)"
    show_table(title, ("decodes / waiting", *heads), rows)
    about = {"steps": options.steps, "cpus": os.cpu_count()}
    save(options.json, {**about, "decodes": decodes})


if __name__ == "__main__":
    main()
