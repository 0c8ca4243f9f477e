"""Throughput of a GPU under the lengths of ShareGPT: offline, over HTTP, and idle time per step.

    scripts/gpu-check --only throughput
    scripts/gpu-check --only throughput --dry-run    # on a CPU: runs, and measures nothing

The model has random weights in bf16, of the shape of Llama-3-8B. The 1,000 pairs of lengths in
sharegpt_lengths.csv are drawn from log-normal distributions. Their sums are those of the sample
that vLLM's benchmark draws from ShareGPT: 217,393 prompt tokens and 201,847 output tokens. Requests
have random prompts and ignore the end token.
"""

from __future__ import annotations

import asyncio
import csv
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from http_streams import Client, Timeline, run_on_uvloop, running_server

from hardpoint import LLM, SamplingParams

from .comparing import random_prompts
from .device import AIMED, Device
from .models import Sizes, engine, has_room, limits, write_model, write_words
from .recorder import Check, Recorder

PUBLISHED = {"SGLang": 16_200.0, "LMDeploy": 16_100.0, "vLLM": 12_600.0}
"""Published output tokens per second: Llama-3.1-8B in bf16, 1,000 prompts of ShareGPT, an H100."""

AIM_OFFLINE, AIM_GAPS = 16_200.0, 0.5
_LENGTHS = Path(__file__).with_name("sharegpt_lengths.csv")
_GAP_US = 20.0
_TIMEOUT_S = 200.0

Lengths = list[tuple[int, int]]
Interval = tuple[float, float]


def check_throughput(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Measure the three figures; print the published ones beside the first."""
    name = "Llama-3-8B, bf16, lengths of ShareGPT"
    load, (longest_prompt, longest_output) = sizes.throughput, sizes.throughput.longest
    lengths = [
        (min(prompt, longest_prompt), min(output, longest_output))
        for prompt, output in sharegpt_lengths()[: load.num_requests]
    ]
    if not has_room(recorder, device, name, sizes.llama, cache_bytes=load.cache_bytes):
        return
    is_judged = str(device.describe()["gpu"]).startswith(AIMED)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", sizes.llama)
        write_words(model, sizes.llama["vocab_size"])
        config = _config(sizes)
        with engine(model, device, dtype="bfloat16", **config) as llm:
            with recorder.check(f"{name}: offline, {load.num_seqs} sequences") as check:
                check.fake("speeds")
                _measure_offline(llm, lengths, sizes, device, check, is_judged=is_judged)
            with recorder.check("idle time of the device between decode steps") as check:
                check.fake("speeds")
                _measure_idle(llm, sizes, device, check)
        with recorder.check(f"{name}: over HTTP, {load.num_streams} streams") as check:
            check.fake("speeds")
            _measure_http(model, lengths, sizes, device, check, is_judged=is_judged)


def sharegpt_lengths() -> Lengths:
    """Return pairs of prompt tokens and output tokens."""
    with _LENGTHS.open() as file:
        return [(int(row["prompt"]), int(row["output"])) for row in csv.DictReader(file)]


def _config(sizes: Sizes) -> dict[str, Any]:
    load = sizes.throughput
    return limits(load.max_model_len, load.num_seqs, sizes.step_tokens, load.cache_bytes)


def _params(outputs: Iterable[int]) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        for output in outputs
    ]


def _measure_offline(
    llm: LLM, lengths: Lengths, sizes: Sizes, device: Device, check: Check, *, is_judged: bool
) -> None:
    """Generate for all requests at once, after a warm-up that records the steps."""
    vocabulary = sizes.llama["vocab_size"]
    seconds = 0.0
    for seed, requests in enumerate((lengths[: 2 * sizes.throughput.num_seqs], lengths)):
        prompts = random_prompts([prompt for prompt, _ in requests], vocabulary, seed)
        params = _params(output for _, output in requests)
        device.wait()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        device.wait()
        seconds = time.perf_counter() - start
        num_tokens = [len(output.outputs[0].token_ids) for output in outputs]
        check.expect(
            num_tokens == [output for _, output in requests], "an answer has another length"
        )
    total = sum(output for _, output in lengths)
    check.measured(
        requests_per_s=len(lengths) / seconds,
        output_tok_per_s=total / seconds,
        total_tok_per_s=(total + sum(prompt for prompt, _ in lengths)) / seconds,
    )
    check.aim(
        "offline, output tokens per second", "output_tok_per_s", AIM_OFFLINE, is_judged=is_judged
    )
    published = ", ".join(f"{name} {figure:.0f}" for name, figure in PUBLISHED.items())
    check.set_detail(f"published output tokens/s of an H100: {published}")


def _measure_idle(llm: LLM, sizes: Sizes, device: Device, check: Check) -> None:
    """Profile decode steps of a full batch; count steps before which the device had no work."""
    running = llm.llm_engine
    count, warm_up = sizes.throughput.num_seqs, sizes.steps_before
    steps = sizes.throughput.profiled_steps
    prompts = random_prompts([8] * count, sizes.llama["vocab_size"])
    (params,) = _params([sizes.throughput.max_model_len - 8])
    names = [f"idle-{index}" for index in range(count)]
    for name, prompt in zip(names, prompts, strict=True):
        running.add_request(name, prompt, params)
    for _ in range(warm_up + 1):
        running.step()
    activity = torch.profiler.ProfilerActivity
    kind = activity.CPU if device.is_fake else activity.CUDA
    device.wait()
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(steps):
            running.step()
        device.wait()
    running.abort_requests(names)
    work = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type is not torch.profiler.DeviceType.CPU or device.is_fake
    ]
    check.expect(bool(work), "the profiler saw no work of the device")
    if work:
        busy, gaps = busy_and_gaps(work)
        whole = max(end for _, end in work) - min(start for start, _ in work)
        check.measured(
            step_ms=whole / steps / 1e3,
            idle_share=1 - busy / whole,
            share_of_steps_with_a_wait=min(1.0, sum(gap > _GAP_US for gap in gaps) / steps),
        )
    check.set_detail(f"{steps} steps of {count} sequences; a wait is a gap above {_GAP_US:.0f} us")


def busy_and_gaps(work: Sequence[Interval]) -> tuple[float, list[float]]:
    """Return the time that intervals cover, and the gaps between them.

    Args:
        work: pairs of start and end, in any order; they may overlap.
    """
    merged: list[Interval] = []
    for start, end in sorted(work):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(merged)]
    return sum(end - start for start, end in merged), gaps


def _measure_http(
    model: Path,
    lengths: Lengths,
    sizes: Sizes,
    device: Device,
    check: Check,
    *,
    is_judged: bool,
) -> None:
    """Stream completions of a server in a process of its own, 64 at once."""
    count, vocabulary = sizes.throughput.num_streams, sizes.llama["vocab_size"]
    settings = [f"device={device.name}", "dtype=bfloat16", "load.use=dummy", *_flat(_config(sizes))]
    with running_server(str(model), settings) as server:
        start = time.perf_counter()
        timelines = run_on_uvloop(_streams(server.url, lengths[: 8 * count], count, vocabulary))
        seconds = time.perf_counter() - start
    errors = {timeline.error for timeline in timelines} - {""}
    check.expect(not errors, f"streams failed: {', '.join(sorted(errors)[:3])}")
    gaps = sorted(gap for timeline in timelines for gap in timeline.gaps)
    firsts = sorted(timeline.first - timeline.sent for timeline in timelines if timeline.first)
    if len(gaps) < 2 or not firsts:
        check.expect(device.is_fake, "no stream has two chunks with text")
        gaps, firsts = [1.0, 1.0], [1.0, 1.0]
    total = sum(timeline.output_tokens or 0 for timeline in timelines)
    middle, slowest = statistics.median(gaps), gaps[int(0.99 * (len(gaps) - 1))]
    check.measured(
        http_output_tok_per_s=total / seconds,
        time_to_first_token_p50_ms=1e3 * statistics.median(firsts),
        gap_p50_ms=1e3 * middle,
        gap_p99_ms=1e3 * slowest,
        gap_p50_over_p99=middle / slowest if slowest else 1.0,
    )
    check.aim(
        f"gaps of {count} streams, p50 over p99",
        "gap_p50_over_p99",
        AIM_GAPS,
        is_judged=is_judged,
    )


def _flat(config: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield settings as `--set` takes them."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}={str(value).lower() if isinstance(value, bool) else value}"


async def _streams(url: str, lengths: Lengths, count: int, vocabulary: int) -> list[Timeline]:
    """Send all requests, `count` at once; return the course of each."""
    client, timelines = Client(url), list[Timeline]()
    waiting = iter(lengths)

    async def send_requests() -> None:
        for prompt, output in waiting:
            body = {
                "prompt": random_prompts([prompt], vocabulary)[0],
                "max_tokens": output,
                "ignore_eos": True,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            timelines.append(await client.send("/v1/completions", body, _TIMEOUT_S))

    await asyncio.gather(*(send_requests() for _ in range(count)))
    await client.close()
    return timelines
