"""Tokens of engines with Triton's kernels, compared with transformers and torch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .comparing import (
    Continuation,
    compare_forced,
    compare_greedy,
    continued,
    demo_references,
    demo_texts,
    mean_distance,
    random_prompts,
    read,
)
from .device import Device
from .models import (
    SMALLEST_VOCABULARY,
    SMOLLM2,
    Sizes,
    engine,
    has_room,
    running_model,
    write_model,
)
from .recorder import Check, Recorder

_ALONE = 5  # every so many-th prompt runs alone
_WORSE = 1.5  # times as far from float32 as torch in bf16
_NO_REFERENCE = "torch's operations and attention failed in float32"


def check_equality(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check the demo model, then two shapes with random weights."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    check_demo_model(recorder, device, sizes)
    check_scheduling(recorder, device, sizes)
    with tempfile.TemporaryDirectory() as folder:
        few = {**sizes.llama, "num_hidden_layers": sizes.few_layers}
        _check_shape(recorder, device, sizes, "Qwen3-0.6B", sizes.qwen, Path(folder) / "qwen")
        name = f"Llama-3-8B, {sizes.few_layers} layers"
        _check_shape(recorder, device, sizes, name, few, Path(folder) / "few")
        _check_whole(recorder, device, sizes, Path(folder) / "llama")


def check_demo_model(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check SmolLM2 in float32 and bf16, its matrices as numbers, then as its file's codes."""
    references = demo_references(sizes.reference_prompts, sizes.demo_tokens)
    for quantization in sizes.quantizations:
        held = "codes" if quantization == "auto" else "numbers"
        config = {**_demo_limits(sizes), "quantization": {"use": quantization}}
        name = f"SmolLM2, matrices of {held}"
        with (
            recorder.check(f"{name}, float32: as transformers") as check,
            engine(SMOLLM2, device, dtype="float32", **config) as llm,
        ):
            compare_greedy(llm, references, check)
        with (
            recorder.check(f"{name}, bf16: choices of float32") as check,
            engine(SMOLLM2, device, dtype="bfloat16", **config) as llm,
        ):
            texts = demo_texts(sizes.forced_texts, sizes.forced_length)
            compare_forced(llm, texts, sizes.forced_positions, check)


def check_scheduling(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check a model in float32 against torch's operations: together, alone and preempted."""
    prompts = [item.prompt for item in demo_references(None, 1)][: sizes.together]
    prompts = [[token % SMALLEST_VOCABULARY for token in prompt] for prompt in prompts]
    limits, references = _demo_limits(sizes), []
    with recorder.check("float32: as torch's operations and attention") as check:
        with (
            running_model(sizes) as model,
            engine(model, device, "torch", dtype="float32", **limits) as llm,
        ):
            references = continued(llm, prompts, [sizes.new_tokens] * len(prompts))
        with running_model(sizes) as model, engine(model, device, dtype="float32", **limits) as llm:
            compare_greedy(llm, references, check)
            with recorder.check("float32: alone") as alone:
                for item in references[::_ALONE]:
                    compare_greedy(llm, [item], alone)
    preempted = "float32: preempted"
    if not references:
        recorder.skip(preempted, _NO_REFERENCE)
        return
    with recorder.check(preempted) as check:
        small = {**limits, **sizes.small_pool}
        with running_model(sizes) as model, engine(model, device, dtype="float32", **small) as llm:
            compare_greedy(llm, references, check)
            preemptions = llm.engines.scheduler_stats().num_preemptions
        check.facts["preemptions"] = preemptions
        check.expect(preemptions > 0, "no request was preempted: nothing was shown")
        check.set_detail(f"{check.detail}; {preemptions} preemptions")


def _demo_limits(sizes: Sizes) -> dict[str, Any]:
    return {
        "max_model_len": 512,
        "kv_cache": {"memory_bytes": sizes.cache_bytes},
        "quantization": {"use": "none"},
    }


def _check_shape(
    recorder: Recorder,
    device: Device,
    sizes: Sizes,
    name: str,
    fields: Mapping[str, Any],
    folder: Path,
) -> None:
    """Check a shape with random weights: float32 against torch, bf16 against float32."""
    model = write_model(folder, fields)
    prompts = random_prompts(sizes.lengths, fields["vocab_size"])
    counts = [sizes.new_tokens] * len(prompts)
    limits = _limits(sizes)
    logprobs: dict[tuple[str, str], list[float]] = {}
    with recorder.check(f"{name}, float32: as torch, mixed lengths") as check:
        with engine(model, device, "torch", dtype="float32", **limits) as llm:
            references = continued(llm, prompts, counts)
            logprobs["torch", "float32"] = read(llm, prompts)[1]
        with engine(model, device, dtype="float32", **limits) as llm:
            compare_greedy(llm, references, check)
            for item in references[::_ALONE]:
                compare_greedy(llm, [item], check)
    near = f"{name}, bf16: as near to float32 as torch"
    if not logprobs:
        recorder.skip(near, _NO_REFERENCE)
        return
    with recorder.check(near) as check:
        for kernels in ("torch", "triton"):
            with engine(model, device, kernels, dtype="bfloat16", **limits) as llm:
                logprobs[kernels, "bfloat16"] = read(llm, prompts)[1]
        _compare_distances(
            logprobs["triton", "bfloat16"],
            logprobs["torch", "bfloat16"],
            logprobs["torch", "float32"],
            check,
        )


def _check_whole(recorder: Recorder, device: Device, sizes: Sizes, folder: Path) -> None:
    """Check the whole 8B shape: Triton computes token by token, and torch all at once."""
    name = "Llama-3-8B, bf16: tokens after prompts, as near to float32 as torch"
    cache = sizes.cache_bytes
    if not has_room(recorder, device, name, sizes.llama, cache_bytes=cache, copies=2):
        return
    model = write_model(folder, sizes.llama)
    prompts = random_prompts(sizes.lengths, sizes.llama["vocab_size"], seed=1)
    limits = _limits(sizes)
    with recorder.check(name) as check:
        with engine(model, device, dtype="bfloat16", **limits) as llm:
            outputs = continued(llm, prompts, [sizes.new_tokens] * len(prompts))
        ours = [value for item in outputs for value in item.logprobs]
        theirs, exact = (
            _last_logprobs(model, device, outputs, dtype=dtype, **limits)
            for dtype in ("bfloat16", "float32")
        )
        _compare_distances(ours, theirs, exact, check)


def _last_logprobs(
    model: Path, device: Device, outputs: Sequence[Continuation], **config: Any
) -> list[float]:
    """Return the log-probabilities of the tokens after prompts, as torch's operations read them."""
    with engine(model, device, "torch", **config) as llm:
        read_ones = ((item, read(llm, [item.prompt + item.tokens])[1]) for item in outputs)
        return [value for item, values in read_ones for value in values[-len(item.tokens) :]]


def _compare_distances(
    ours: Sequence[float], theirs: Sequence[float], exact: Sequence[float], check: Check
) -> None:
    """Compare how far two ways to compute in bf16 are from float32."""
    near, far = mean_distance(ours, exact), mean_distance(theirs, exact)
    check.facts |= {"mean_distance": near, "torch_mean_distance": far}
    check.detail = f"log-probabilities are off by {near:.1e} on average, torch's by {far:.1e}"
    check.expect(near <= _WORSE * far + 1e-4, check.detail)


def _limits(sizes: Sizes) -> dict[str, Any]:
    return {
        "max_model_len": sizes.max_model_len,
        "kv_cache": {"memory_bytes": sizes.cache_bytes, "prefix_caching": False},
    }
