"""Engines that run on: CUDA graphs, waits of the host for the device, and sleep."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from hardpoint import LLM, SamplingParams

from .comparing import compare_greedy, continued, random_prompts
from .counted_ops import Counts, counted
from .device import Device
from .models import SMALLEST_VOCABULARY, Sizes, engine, random_model, running_model
from .recorder import Check, Recorder

_RETURNED, _GROWN = 0.8, 0.1  # of the memory that an engine takes, by level 2 and wake-up
_ENDLESS: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "detokenize": False}


def check_graphs(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check that decode steps that are repeated from CUDA graphs give the same tokens."""
    prompts = random_prompts(sizes.running_lengths, SMALLEST_VOCABULARY)
    counts = [sizes.graph_tokens - index % 3 for index in range(len(prompts))]
    limits = _limits(sizes)
    with (
        recorder.check("tokens with and without CUDA graphs, float32") as check,
        running_model(sizes) as model,
        tempfile.NamedTemporaryFile() as file,
    ):
        check.fake("CUDA graphs")
        eager = {**limits, "executor": {"enforce_eager": True}}
        with engine(model, device, dtype="float32", **eager) as llm:
            references = continued(llm, prompts, counts)
            alone = continued(llm, prompts[:1], counts[:1])
        counting = counted(Path(file.name))
        with engine(model, device, dtype="float32", **{**limits, **counting}) as llm:
            for _ in range(2):
                compare_greedy(llm, alone, check)
                compare_greedy(llm, references, check)
        graph_counts = Counts.read(Path(file.name))
        recorded = len(graph_counts.num_bytes)
        check.facts |= {"recorded": recorded, "repeated": graph_counts.repeated}
        check.measured(graphs_mib=sum(graph_counts.num_bytes) / 2**20)
        check.expect(recorded > 0, "no decode step was recorded")
        check.expect(graph_counts.repeated > 0, "no recorded step was repeated")
        check.detail += f"; {recorded} sizes recorded, {graph_counts.repeated} steps repeated"


def check_syncs(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check that the host waits for the device once in a decode step, for the tokens."""
    cases = {
        "greedy": SamplingParams(temperature=0.0, **_ENDLESS),
        "top-k, top-p, min-p": SamplingParams(
            temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=1, **_ENDLESS
        ),
        "penalties, bias": SamplingParams(
            temperature=0.8,
            presence_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias={7: 1.0},
            seed=1,
            **_ENDLESS,
        ),
    }
    with running_model(sizes) as model:
        for is_eager in (True, False):
            path = "without graphs" if is_eager else "with graphs"
            limits = {**_limits(sizes), "executor": {"enforce_eager": is_eager}}
            with (
                recorder.check(f"an engine runs {path}"),
                engine(model, device, dtype="bfloat16", **limits) as llm,
            ):
                for name, params in cases.items():
                    with recorder.check(f"waits in a decode step: {name}, {path}") as check:
                        check.fake("torch.cuda.set_sync_debug_mode")
                        _count_syncs(llm, device, params, sizes, check)


def _count_syncs(
    llm: LLM, device: Device, params: SamplingParams, sizes: Sizes, check: Check
) -> None:
    """Run four requests past their first steps, one of them to its end, then count in one step."""
    running = llm.llm_engine
    for index in range(4):
        running.add_request(f"r{index}", [10 + index] * (index + 2), params)
    running.step()
    running.abort_requests("r3")
    for _ in range(sizes.steps_before):
        running.step()
    device.wait()
    with device.counted_syncs() as places:
        running.step()
    running.abort_requests(["r0", "r1", "r2"])
    check.facts["places"] = places
    waits = f"{len(places)} ({', '.join(places)})" if places else "none"
    check.set_detail(waits)
    check.expect(len(places) <= 1, f"expected one wait, for the tokens, got {waits}")


def check_sleep(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check that sleep gives memory back, and that the same tokens follow."""
    for name, opened in (
        ("a dense model", running_model(sizes)),
        ("a mixture of experts", random_model(sizes.mixture)),
    ):
        with (
            recorder.check(f"sleep of {name}, and the same tokens after") as check,
            opened as model,
        ):
            check.fake("the free memory of the device")
            _check_sleep(model, device, sizes, check)


def _check_sleep(model: str | Path, device: Device, sizes: Sizes, check: Check) -> None:
    """Let an engine sleep at each level, and compare its tokens and the free memory."""
    prompts = random_prompts(sizes.running_lengths, SMALLEST_VOCABULARY)
    config: dict[str, Any] = {"max_model_len": 128, "kv_cache": {"num_blocks": sizes.sleep_blocks}}
    torch.ones(64, 64, device=device.name).mm(torch.ones(64, 64, device=device.name))
    before = device.free_bytes()
    with engine(model, device, dtype="float32", **config) as llm:
        references = continued(llm, prompts, [sizes.new_tokens] * len(prompts))
        awake = device.free_bytes()
        held = before - awake
        check.measured(held_gib=held / 2**30)
        llm.sleep(0)
        llm.wake_up()
        compare_greedy(llm, references, check)
        for level in (1, 2):
            llm.sleep(level)
            returned = device.free_bytes() - awake
            llm.wake_up()
            compare_greedy(llm, references, check)
            grown = awake - device.free_bytes()
            figures = {"returned_by": returned / 2**30, "grown_after": grown / 2**30}
            check.measured(**{f"{name}_level_{level}_gib": gib for name, gib in figures.items()})
            check.expect(
                returned >= _RETURNED * held,
                f"level {level} returned {returned / 2**30:.2f} GiB of {held / 2**30:.2f} GiB",
            )
            check.expect(
                grown <= _GROWN * held,
                f"{grown / 2**30:.2f} GiB less are free after level {level} and wake-up",
            )


def _limits(sizes: Sizes) -> dict[str, Any]:
    return {"max_model_len": 128, "kv_cache": {"memory_bytes": sizes.cache_bytes}}
