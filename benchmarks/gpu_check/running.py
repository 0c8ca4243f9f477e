"""Engines that run on: CUDA graphs, waits of the host for the device, and sleep."""

from __future__ import annotations

from typing import Any

from hardpoint import LLM, SamplingParams

from .comparing import compare_greedy, continued, demo_references
from .counted_ops import USE, CountedOps
from .device import Device
from .models import SMOLLM2, Sizes, engine
from .recorder import Check, Recorder

_RETURNED = 0.9  # of the memory of weights and KV cache, by level 2


def check_graphs(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check that decode steps that are repeated from CUDA graphs give the same tokens."""
    prompts = [each.prompt for each in demo_references(sizes.reference_prompts, 1)]
    counts = [sizes.graph_tokens - index % 3 for index in range(len(prompts))]
    limits = _limits(sizes)
    with recorder.check("tokens with and without CUDA graphs, float32") as check:
        check.fake("CUDA graphs: steps are recorded and repeated by Python")
        eager = {**limits, "executor": {"enforce_eager": True}}
        with engine(SMOLLM2, device, dtype="float32", **eager) as llm:
            references = continued(llm, prompts, counts)
            alone = continued(llm, prompts[:1], counts[:1])
        counted = {"ops": {"use": USE}, "plugin": {"counted_ops": {"fake": device.is_fake}}}
        CountedOps.recorded.clear()
        CountedOps.repeated.clear()
        with engine(SMOLLM2, device, dtype="float32", **{**limits, **counted}) as llm:
            for _ in range(sizes.graph_rounds):
                compare_greedy(llm, alone, check)
                compare_greedy(llm, references, check)
        recorded, repeated = len(CountedOps.recorded), len(CountedOps.repeated)
        check.facts |= {"recorded": recorded, "repeated": repeated}
        check.measured(graphs_mib=sum(CountedOps.recorded) / 2**20)
        check.expect(recorded > 0, "no decode step was recorded")
        check.expect(repeated > 0, "no recorded step was repeated")
        tail = f"{recorded} sizes recorded, {repeated} steps repeated"
        check.detail = f"{check.detail or tail}; {tail}"


def check_syncs(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check that the host waits for the device once in a decode step, for the tokens."""
    sampled = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=1, **_ENDLESS)
    cases = {
        "greedy": SamplingParams(temperature=0.0, **_ENDLESS),
        "sampled, top-k and top-p": sampled,
    }
    for eager in (True, False):
        limits = {**_limits(sizes), "executor": {"enforce_eager": eager}}
        with engine(SMOLLM2, device, dtype="bfloat16", **limits) as llm:
            for name, params in cases.items():
                path = "without graphs" if eager else "with graphs"
                with recorder.check(f"host waits per decode step: {name}, {path}") as check:
                    check.fake("torch.cuda.set_sync_debug_mode")
                    _count_syncs(llm, device, params, sizes, check)


_ENDLESS: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "detokenize": False}


def _count_syncs(
    llm: LLM, device: Device, params: SamplingParams, sizes: Sizes, check: Check
) -> None:
    """Run four requests past their first steps, then count in one step."""
    running = llm.llm_engine
    for index in range(4):
        running.add_request(f"r{index}", [10 + index] * (index + 2), params)
    for _ in range(sizes.steps_before):
        running.step()
    device.wait()
    with device.counted_syncs() as places:
        running.step()
    running.abort_requests([f"r{index}" for index in range(4)])
    running.step()
    check.facts["places"] = places
    check.detail = f"{len(places)}: {', '.join(places)}" if places else "none"
    check.expect(len(places) <= 1, f"expected one, of the tokens, got {check.detail}")


def check_sleep(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check that sleep gives memory back, and that the same tokens follow."""
    references = demo_references(sizes.reference_prompts, sizes.new_tokens)
    with (
        recorder.check("sleep levels 0 and 2, and the same tokens after") as check,
        engine(SMOLLM2, device, dtype="float32", **_limits(sizes)) as llm,
    ):
        check.fake("free memory")
        compare_greedy(llm, references, check)
        awake = device.free_bytes()
        llm.sleep(0)
        llm.wake_up()
        compare_greedy(llm, references[:1], check)
        llm.sleep(2)
        returned = device.free_bytes() - awake
        held = sizes.cache_bytes + _demo_weight_bytes()
        check.measured(returned_gib=returned / 2**30, held_gib=held / 2**30)
        check.expect(
            returned >= _RETURNED * held,
            f"level 2 returned {returned / 2**30:.2f} GiB of {held / 2**30:.2f} GiB",
        )
        llm.wake_up()
        compare_greedy(llm, references, check)
        check.measured(grown_gib=(awake - device.free_bytes()) / 2**30)


def _demo_weight_bytes() -> int:
    """Return the bytes of SmolLM2's weights in float32."""
    return 134_515_008 * 4


def _limits(sizes: Sizes) -> dict[str, Any]:
    return {"max_model_len": 512, "kv_cache": {"memory_bytes": sizes.cache_bytes}}
