"""Microseconds of the scheduler, compared with vLLM's Scheduler class where it is installed.

    python benchmarks/scheduler.py                          # the whole table
    python benchmarks/scheduler.py --sizes 1 --no-waiting --steps 2   # whether it runs
    python benchmarks/scheduler.py --sizes 32 256 --no-waiting --steps 50 --json result.json

No model runs. A step is `schedule`, then `update` with a token per request; both are timed, the
code between them is not. All requests decode, with prompts of 64 to 79 tokens, so that in each step
one in sixteen needs a block and fills one. Prefix caching is on, statistics are off.

* decodes: a step of N running requests, then the same with 100 000 waiting requests, which are not
  admitted since `max_num_seqs` are running.
* record: how much longer such a step takes with a step record.
* prefix: a prompt that is cached as a whole. "hashes" is creating the request and the hashes of its
  blocks, "look-up" is finding the blocks by them.
* memory: bytes of metadata of a cached block that no request holds.

The engines take turns step by step, in one process. Printed are medians of processor time, which on
an idle machine is wall time; reading that clock adds about half a microsecond to each call.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import itertools
import json
import logging
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduling_load import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    SHORTEST,
    TOKEN,
    WAITING_PROMPT,
    prompt,
    running_prompts,
    timed,
)
from scheduling_vllm import Vllm, VllmCache
from tables import show_table

from hardpoint.core.kv_cache import BlockManager, BlockMetadata, Eviction
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.policy import PolicySlot
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import (
    CachedPrefix,
    EngineConfig,
    EngineCoreRequest,
    EvictionContext,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerContext,
    StepRecord,
)
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits

SIZES = (1, 32, 256, 1024, 4096)
PROMPTS = ((4_096, 16), (32_768, 16), (4_096, 128), (32_768, 128))  # tokens, block size
WAITING = 100_000
WARM_UP = 5
MIN_TOKENS = 2_000  # steps of few requests are repeated until so many tokens were sampled
MEMORY_BLOCKS = 20_000

Step = Callable[[], tuple[float, float]]
"""Runs a step of decodes; returns the microseconds of schedule and update."""


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
        self._scheduler = plugins.create(
            plugins.one("schedulers"),
            SchedulerContext,
            limits=SchedulerLimits(
                max_num_seqs=running,
                max_num_batched_tokens=MAX_MODEL_LEN,
                max_model_len=MAX_MODEL_LEN,
            ),
            kv_cache=BlockManager(
                num_blocks,
                BLOCK_SIZE,
                eviction=Eviction(policy),
                metadata=metadata,
            ),
            policy=PolicySlot(plugins, StepFaults(), 257).policy,
            clock=time.monotonic,
        )
        context = self._scheduler.context
        self._records: list[StepRecord] = []
        self._contexts = context, dataclasses.replace(context, record=self._records.append)
        for request_id, tokens in running_prompts(running):
            self._scheduler.add_request(hardpoint_request(request_id, tokens))
        decoding = 0
        while decoding < running:
            plan = self._scheduler.schedule()
            sampled = {
                request_id: [TOKEN]
                for request_id in plan.num_scheduled_tokens
                if self._scheduler.live_request(request_id).num_tokens
                == self._scheduler.live_request(request_id).num_computed_tokens
            }
            decoding = len(sampled)
            self._scheduler.update(plan, ModelRunnerOutput(sampled))

    def step(self) -> tuple[float, float]:
        """Run a step."""
        return self._step()

    def recorded_step(self) -> tuple[float, float]:
        """Run a step with a step record."""
        plain, self._scheduler.context = self._contexts
        times = self._step()
        self._scheduler.context = plain
        assert self._records.pop().num_running > 0
        return times

    def _step(self) -> tuple[float, float]:
        scheduling, plan = timed(self._scheduler.schedule)
        result = ModelRunnerOutput({request: [TOKEN] for request in plan.num_scheduled_tokens})
        updating, _ = timed(lambda: self._scheduler.update(plan, result))
        return scheduling, updating

    def add_waiting(self, count: int) -> None:
        """Add requests that find no running slot."""
        for index in range(count):
            tokens = prompt(-1 - index, WAITING_PROMPT)
            self._scheduler.add_request(hardpoint_request(f"waiting-{index}", tokens))


def hardpoint_request(request_id: str, tokens: list[int]) -> EngineCoreRequest:
    """Return a request that does not end."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        params=SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True),
    )


class HardpointCache:
    """The KV cache manager alone."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Create an empty cache."""
        self._cache = BlockManager(num_blocks, block_size)
        self._numbers = itertools.count()

    def fill(self, tokens: list[int]) -> None:
        """Allocate and free the blocks of a request with this prompt."""
        request = Request(self._source(tokens))
        assert self._cache.admit(request, CachedPrefix(), len(tokens))
        self._end(request)

    def look_up(self, tokens: list[int]) -> tuple[float, float]:
        """Return the microseconds of creating a request with hashes, and of finding its blocks."""
        source = self._source(tokens)

        def make_and_look_up() -> Request:
            request = Request(source)
            self._cache.lookup(request)
            return request

        both, request = timed(make_and_look_up)
        looking_up, prefix = timed(lambda: self._cache.lookup(request))
        size = self._cache.block_size
        assert prefix.num_tokens == (len(tokens) - 1) // size * size
        self._end(request)
        return both - looking_up, looking_up

    def _source(self, tokens: list[int]) -> EngineCoreRequest:
        return hardpoint_request(f"request-{next(self._numbers)}", tokens)

    def _end(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        self._cache.free(request)


def take_turns(engines: dict[str, Step], steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return the times of each engine's steps."""
    gc.collect()
    gc.freeze()  # as engines do after the start: long-lived objects are not scanned again
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    order = list(engines)
    for number in range(WARM_UP + steps):
        random.shuffle(order)  # the order decides what is in the processor's caches
        for name in order:
            times = engines[name]()
            if number >= WARM_UP:
                found[name].append(times)
    gc.unfreeze()
    return found


def medians(times: list[tuple[float, float]]) -> dict[str, float]:
    """Return the medians of schedule, update and both."""
    return {
        "schedule": statistics.median(schedule for schedule, _ in times),
        "update": statistics.median(update for _, update in times),
        "step": statistics.median(schedule + update for schedule, update in times),
    }


def measure_record(engine: Hardpoint, steps: int) -> dict[str, float]:
    """Return the extra time of a step with a record, in microseconds and as a share."""
    both: dict[str, Step] = {"plain": engine.step, "recorded": engine.recorded_step}
    times = {name: medians(times)["step"] for name, times in take_turns(both, steps).items()}
    more = times["recorded"] - times["plain"]
    return {"microseconds": more, "share": more / times["plain"]}


def measure_decodes(
    sizes: list[int], steps: int, waiting: int, with_vllm: bool
) -> list[dict[str, Any]]:
    """Measure steps of running decodes, without and with waiting requests."""
    results = []
    for running in sizes:
        counted = max(steps, MIN_TOKENS // running)
        rounds = 4 * (WARM_UP + counted)
        blocks = running * ((SHORTEST + BLOCK_SIZE + rounds) // BLOCK_SIZE + 2) + 1
        ours = Hardpoint(running, blocks)
        engines: dict[str, Step] = {"hardpoint": ours.step}
        theirs = Vllm(running, blocks) if with_vllm else None
        if theirs is not None:
            engines["vllm"] = theirs.step
        record = measure_record(ours, counted)
        for num_waiting in (0, waiting) if waiting else (0,):
            ours.add_waiting(num_waiting)
            if theirs is not None:
                theirs.add_waiting(num_waiting)
            times = take_turns(engines, counted)
            result: dict[str, Any] = {"running": running, "waiting": num_waiting, "record": record}
            results.append(result | {name: medians(values) for name, values in times.items()})
            print(f"{running} running, {num_waiting} waiting: done", file=sys.stderr)
    return results


def measure_prefixes(rounds: int, with_vllm: bool) -> list[dict[str, Any]]:
    """Measure look-ups of prompts that are cached as a whole."""
    results = []
    for length, block_size in PROMPTS:
        tokens = prompt(0, length)
        blocks = length // block_size + 2
        caches: dict[str, Any] = {"hardpoint": HardpointCache(blocks, block_size)}
        if with_vllm:
            caches["vllm"] = VllmCache(blocks, block_size)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in caches}
        for cache in caches.values():
            cache.fill(tokens)
        for _ in range(rounds):
            for name, cache in caches.items():
                found[name].append(cache.look_up(tokens))
        result: dict[str, Any] = {"tokens": length, "block_size": block_size}
        for name, times in found.items():
            hashing, looking_up = zip(*times, strict=True)
            result[name] = {
                "hashes": statistics.median(hashing),
                "look_up": statistics.median(looking_up),
            }
        results.append(result)
    return results


def measure_memory(with_vllm: bool) -> dict[str, float]:
    """Return the bytes of a cached block's metadata, its entry in the pool included, by engine."""
    makers: dict[str, Callable[[int, int], Any]] = {"hardpoint": HardpointCache}
    if with_vllm:
        makers["vllm"] = VllmCache
    result = {}
    for name, make in makers.items():
        make(2, BLOCK_SIZE)  # imports modules on first use
        gc.collect()
        tracemalloc.start()
        cache = make(MEMORY_BLOCKS + 1, BLOCK_SIZE)
        cache.fill(prompt(0, MEMORY_BLOCKS // 2 * BLOCK_SIZE))
        cache.fill(prompt(1, MEMORY_BLOCKS // 2 * BLOCK_SIZE))
        gc.collect()
        result[name] = tracemalloc.get_traced_memory()[0] / MEMORY_BLOCKS
        tracemalloc.stop()
    return result


def ratio(result: dict[str, Any], key: str) -> str:
    """Return the ratio of vLLM's time to Hardpoint's."""
    return f"{result['vllm'][key] / result['hardpoint'][key]:.1f}x" if "vllm" in result else ""


def show_decodes(results: list[dict[str, Any]], names: list[str]) -> None:
    """Print the table of steps."""
    heads = [title for name in names for title in (f"{name} schedule", "update", "step")]
    rows = []
    for result in results:
        cells = [f"{value:,.0f}" for name in names for value in result[name].values()]
        record = f"{result['record']['microseconds']:+.1f} ({result['record']['share']:+.1%})"
        size = f"{result['running']} / {result['waiting']}"
        rows.append([size, *cells, ratio(result, "step"), record])
    title = "microseconds per step (ratio: vLLM / Hardpoint)"
    show_table(title, ("decodes / waiting", *heads, "ratio", "record"), rows)


def show_prefixes(results: list[dict[str, Any]], names: list[str]) -> None:
    """Print the table of look-ups."""
    heads = [title for name in names for title in (f"{name} hashes", "look-up")]
    rows = []
    for result in results:
        cells = [f"{value:,.1f}" for name in names for value in result[name].values()]
        ratios = f"{ratio(result, 'hashes')} {ratio(result, 'look_up')}"
        rows.append([f"{result['tokens']} / {result['block_size']}", *cells, ratios])
    title = "prefix cache, full hit, microseconds"
    show_table(title, ("tokens / block", *heads, "ratios"), rows)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), help="running")
    parser.add_argument("--steps", type=int, default=48, help="counted steps (default 48)")
    parser.add_argument("--no-waiting", action="store_true", help="no waiting requests")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with_vllm = importlib.util.find_spec("vllm") is not None
    logging.disable(logging.WARNING)
    if not with_vllm:
        print("vLLM is not installed: its scheduler is not measured", file=sys.stderr)
    names = ["hardpoint", "vllm"] if with_vllm else ["hardpoint"]
    waiting = 0 if arguments.no_waiting else WAITING
    decodes = measure_decodes(arguments.sizes, arguments.steps, waiting, with_vllm)
    prefixes = measure_prefixes(arguments.steps, with_vllm)
    memory = measure_memory(with_vllm)
    show_decodes(decodes, names)
    show_prefixes(prefixes, names)
    for name, size in memory.items():
        print(f"{name}: {size:.0f} bytes per cached block of {BLOCK_SIZE} tokens")
    if arguments.json:
        about = {"steps": arguments.steps, "cpus": os.cpu_count()}
        about |= {"decodes": decodes, "prefixes": prefixes, "bytes_per_cached_block": memory}
        arguments.json.write_text(json.dumps(about, indent=2))


if __name__ == "__main__":
    main()
