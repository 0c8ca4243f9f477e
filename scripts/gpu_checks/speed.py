"""Speed on a GPU: decode and prefill next to transformers, shares of the bounds, and the start.

    scripts/gpu-check --only benchmark
    scripts/gpu-check --only benchmark --dry-run    # on a CPU: runs, and measures nothing

Models have random weights in bf16, of the shapes of Llama-3-8B and Qwen3-0.6B. Hardpoint and
transformers run in this process, in turns, the same prompts of random tokens, greedily; printed are
medians. A decode step is a request's time less that of its first token, by the other tokens. It
reads the weights, but for the embedding's table, and keys and values of the tokens before: by the
time, that is the bandwidth which is reached. Prefill counts the FLOP of matrix products and causal
attention. Both are shares of what the data sheet of the GPU lists, where that is known, and of what
a copy and a large matrix product reach in the same run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bounds import ModelSize

from hardpoint import LLM, SamplingParams

from .comparing import random_prompts
from .counted_ops import Counts, counted
from .device import AIMED, DATA_SHEETS, Device
from .models import Sizes, engine, has_room, limits, write_model
from .recorder import Check, Recorder

AIM_BANDWIDTH, AIM_TOKENS, AIM_PEAK = 0.75, 9500.0, 0.65
_POLL_S, _QUIET_S, _PATIENCE_S = 0.2, 3.0, 30.0


@dataclass(frozen=True)
class Rates:
    """The rates that the device reaches, and the rates of its data sheet; else the former again.

    Attributes:
        bandwidth: memory bandwidth, bytes per second.
        peak: rate of matrix products in bf16, FLOP per second.
        copied, multiplied: the same, as measured here.
        has_aims: whether the aims are for this device.
    """

    bandwidth: float
    peak: float
    copied: float
    multiplied: float
    has_aims: bool


@dataclass(frozen=True)
class Load:
    """Prompts of one length, continued by as many tokens.

    Attributes:
        name: name of the figures.
        count: number of prompts.
        prompt: tokens of each.
        output: tokens that follow.
    """

    name: str
    count: int
    prompt: int
    output: int


Runner = Callable[[list[list[int]], int], None]


def check_benchmark(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Measure the device, both shapes next to transformers, and the start."""
    rates = measure_device(recorder, device)
    with tempfile.TemporaryDirectory() as folder:
        for name, fields in (("Llama-3-8B", sizes.llama), ("Qwen3-0.6B", sizes.qwen)):
            model = write_model(Path(folder) / name, fields)
            has_aims = name.startswith("Llama")
            title, cache = f"{name}, bf16: next to transformers", 2 * sizes.cache_bytes
            # Both engines are open at once, as they take turns.
            if not has_room(recorder, device, title, fields, cache_bytes=cache, copies=2):
                continue
            with recorder.check(title) as check:
                check.fake("speeds")
                _compare(model, fields, device, sizes, rates, check, has_aims=has_aims)
        _check_start(recorder, device, sizes, Path(folder))


def measure_device(recorder: Recorder, device: Device) -> Rates:
    """Measure copies and products, as a check."""
    with recorder.check("memory and matrix products") as check:
        check.fake("rates of copies and products")
        copied, multiplied = device.copy_rate(), device.product_rate()
        name = device.describe()["gpu"]
        bandwidth, peak = DATA_SHEETS.get(name, (copied, multiplied))
        source = "data sheet" if name in DATA_SHEETS else "measured"
        check.measured(
            copy_tb_per_s=copied / 1e12,
            product_tflop_per_s=multiplied / 1e12,
            copy_share_of_data_sheet=copied / bandwidth,
            product_share_of_data_sheet=multiplied / peak,
        )
        check.set_detail(
            f"shares are those of the {source}'s {bandwidth / 1e12:.2f} TB/s and "
            f"{peak / 1e12:.0f} TFLOP/s"
            if not device.is_fake
            else ""
        )
        has_aims = name in DATA_SHEETS and name.startswith(AIMED)
        return Rates(bandwidth, peak, copied, multiplied, has_aims)
    return Rates(1.0, 1.0, 1.0, 1.0, has_aims=False)  # the check has failed, and has the reason


def _compare(
    model: Path,
    fields: Mapping[str, Any],
    device: Device,
    sizes: Sizes,
    rates: Rates,
    check: Check,
    *,
    has_aims: bool,
) -> None:
    """Run the loads in both engines, in turns."""
    loads = [Load(*load) for load in sizes.loads]
    with engine(model, device, dtype="bfloat16", **_config(sizes)) as llm:
        engines = {"hardpoint": _hardpoint(llm), "transformers": _transformers(fields, device)}
        seconds = {
            load.name: _seconds(engines, load, fields["vocab_size"], device, sizes.rounds)
            for load in loads
        }
        del engines
    size = ModelSize.read(model)
    for load in loads:
        step = _prefill if load.output == 1 else _decode
        step(load, size, seconds[load.name], rates, check)
    if has_aims:
        single, batch, prefill = (load.name for load in loads)
        for aim, figure, at_least in (
            ("decode at batch 1, share of the bandwidth", f"{single}_bandwidth", AIM_BANDWIDTH),
            ("decode at batch 64, tokens per second", f"{batch}_tok_per_s", AIM_TOKENS),
            ("prefill, share of the peak", f"{prefill}_peak", AIM_PEAK),
        ):
            check.aim(aim, figure, at_least, is_judged=rates.has_aims)
    settings = f"{sizes.rounds} rounds; max_num_batched_tokens {sizes.step_tokens}; no prefix cache"
    check.set_detail(settings)


def _config(sizes: Sizes) -> dict[str, Any]:
    return limits(sizes.max_model_len, sizes.num_seqs, sizes.step_tokens, 2 * sizes.cache_bytes)


def _hardpoint(llm: LLM) -> Runner:
    def run(prompts: list[list[int]], output: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompts, params)
        assert all(len(output_.outputs[0].token_ids) == output for output_ in outputs)

    return run


def _transformers(fields: Mapping[str, Any], device: Device) -> Runner:
    """Return `generate` of a model with as many weights, random ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {name: value for name, value in fields.items() if name != "model_type"}
    config = AutoConfig.for_model(fields["model_type"], **known)
    with torch.device(device.name):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def run(prompts: list[list[int]], output: int) -> None:
        ids = torch.tensor(prompts, device=device.name)
        with torch.inference_mode():
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output,
                max_new_tokens=output,
                pad_token_id=0,
            )
        assert result.shape[1] == len(prompts[0]) + output

    return run


def _seconds(
    engines: Mapping[str, Runner], load: Load, vocab_size: int, device: Device, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return median seconds to the first tokens, and of a step after them, by engine.

    A first round warms up, so that kernels are compiled and steps recorded.
    """
    firsts: dict[str, list[float]] = {name: [] for name in engines}
    steps: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, run in engines.items():
            whole = []
            for output in sorted({1, load.output}):
                prompts = random_prompts(
                    [load.prompt] * load.count, vocab_size, hash((number, output))
                )
                device.wait()
                start = time.perf_counter()
                run(prompts, output)
                device.wait()
                whole.append(time.perf_counter() - start)
            firsts[name].append(whole[0])
            steps[name].append((whole[-1] - whole[0]) / max(load.output - 1, 1))
    return {
        name: (statistics.median(firsts[name][1:]), statistics.median(steps[name][1:]))
        for name in engines
    }


def _decode(
    load: Load,
    size: ModelSize,
    seconds: Mapping[str, tuple[float, float]],
    rates: Rates,
    check: Check,
) -> None:
    """Add tokens per second of a decode step, and the bandwidth that it reaches."""
    ours, theirs = (seconds[name][1] for name in ("hardpoint", "transformers"))
    weights = 2 * (size.layer_weights + size.head_weights)
    context = load.prompt + load.output / 2
    read = weights + load.count * context * size.kv_bytes
    check.measured(
        **{
            f"{load.name}_tok_per_s": _per(load.count, ours),
            f"{load.name}_transformers_tok_per_s": _per(load.count, theirs),
            f"{load.name}_times_transformers": _per(theirs, ours),
            f"{load.name}_gb_per_step": read / 1e9,
            f"{load.name}_bandwidth": _per(read, ours) / rates.bandwidth,
            f"{load.name}_share_of_copy": _per(read, ours) / rates.copied,
        }
    )


def _prefill(
    load: Load,
    size: ModelSize,
    seconds: Mapping[str, tuple[float, float]],
    rates: Rates,
    check: Check,
) -> None:
    """Add tokens per second of prompts, and the share of the peak."""
    ours, theirs = (seconds[name][0] for name in ("hardpoint", "transformers"))
    tokens = load.count * load.prompt
    # Scores and their products with values, of half of the pairs of tokens: 2 FLOP each.
    attention = 4 * size.layers * size.linears[1][1] * tokens * load.prompt / 2
    flop = 2 * tokens * size.layer_weights + 2 * load.count * size.head_weights + attention
    check.measured(
        **{
            f"{load.name}_tok_per_s": _per(tokens, ours),
            f"{load.name}_transformers_tok_per_s": _per(tokens, theirs),
            f"{load.name}_times_transformers": _per(theirs, ours),
            f"{load.name}_tflop": flop / 1e12,
            f"{load.name}_peak": _per(flop, ours) / rates.peak,
            f"{load.name}_share_of_product": _per(flop, ours) / rates.multiplied,
        }
    )


def _per(amount: float, seconds: float) -> float:
    """Return a rate; 0 where noise is larger than the time, as in dry runs."""
    return amount / seconds if seconds > 0 else 0.0


def _check_start(recorder: Recorder, device: Device, sizes: Sizes, folder: Path) -> None:
    """Measure the start of the small shape, its first token, and the recording of graphs."""
    model = folder / "Qwen3-0.6B"
    prompt = random_prompts([sizes.loads[0][2]], sizes.qwen["vocab_size"])
    for name, is_eager in (("with_graphs", False), ("without_graphs", True)):
        with recorder.check(
            f"Qwen3-0.6B: start and first token, {name.replace('_', ' ')}"
        ) as check:
            check.fake("speeds")
            config = {**_config(sizes), "executor": {"enforce_eager": is_eager}}
            start = time.perf_counter()
            with engine(model, device, dtype="bfloat16", **config) as llm:
                ready, run = time.perf_counter() - start, _hardpoint(llm)
                times = []
                for _ in range(sizes.rounds + 2):
                    device.wait()
                    began = time.perf_counter()
                    run(prompt, 1)
                    times.append(time.perf_counter() - began)
                check.measured(
                    **{
                        f"start_s_{name}": ready,
                        f"first_request_s_{name}": times[0],
                        f"time_to_first_token_ms_{name}": statistics.median(times[1:]) * 1e3,
                    }
                )
    with recorder.check("Qwen3-0.6B: graphs are recorded while the engine is idle") as check:
        check.fake("CUDA graphs")
        _record_ahead(model, device, sizes, prompt, folder / "recorded", check)


def _record_ahead(
    model: Path, device: Device, sizes: Sizes, prompt: list[list[int]], file: Path, check: Check
) -> None:
    """Let an engine in a process of its own record after its first answer; wait for the end."""
    config = {**_config(sizes), **counted(file), "engine": {"in_process": False}}
    start = time.time()
    with engine(model, device, dtype="bfloat16", **config) as llm:
        ready = time.time()
        _hardpoint(llm)(prompt, 2)
        answered = time.time()
        counts = Counts.read(file)
        while time.time() < max([answered, *counts.times]) + _QUIET_S:
            if time.time() > answered + _PATIENCE_S:
                break
            time.sleep(_POLL_S)
            counts = Counts.read(file)
    recorded = len(counts.times)
    check.facts["recorded"] = recorded
    check.measured(
        process_start_s=ready - start,
        first_answer_s=answered - ready,
        recorded_s_after_first_answer=max([answered, *counts.times]) - answered,
        recorded_mib=sum(counts.num_bytes) / 2**20,
    )
    check.set_detail(f"{recorded} sizes recorded after the first answer, no other request came")
    check.expect(recorded > 0, "nothing was recorded")
    check.expect(
        all(at >= ready for at in counts.times), "a size was recorded before the engine was ready"
    )
