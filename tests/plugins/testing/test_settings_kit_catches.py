"""Components of every kind that runs in steps fail the kit if they change torch's settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support.broken import (
    attention,
    grammars,
    models,
    ops,
    policies,
    poolers,
    processors,
    samplers,
    schedulers,
    speculators,
    step_parts,
    taps,
)
from support.kit_suites import assert_fails, message_of

from hardpoint.testing import (
    ActivationTapSuite,
    AttentionBackendSuite,
    EvictionPolicySuite,
    GrammarSample,
    GrammarSuite,
    LogitsProcessorSuite,
    ModelSuite,
    OpsSuite,
    PoolerSuite,
    SamplerSuite,
    SchedulerSuite,
    SchedulingPolicySuite,
    SpeculatorSuite,
    StepPartSuite,
)

CHANGES = {
    "default dtype from torch.float32 to torch.float64": lambda: torch.set_default_dtype(
        torch.float64
    ),
    "default device from none to cpu": lambda: torch.set_default_device("cpu"),
    "number of threads from": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "use of deterministic algorithms from False to True": lambda: (
        torch.use_deterministic_algorithms(True)
    ),
    "inference mode from False to True": lambda: enter(torch.inference_mode()),
    "recording of gradients from True to False": lambda: torch.set_grad_enabled(False),
}
ENTERED = []
DTYPE = next(iter(CHANGES))
SAMPLES = [
    GrammarSample({"choice": ["yes", "no"]}, language=["yes", "no"], invalid=["maybe"]),
    GrammarSample({"json": {"enum": ["a<eos>b", "a"]}}, language=['"a<eos>b"', '"a"']),
]


def enter(mode):
    """Enter a mode, which lasts as long as the object, and leave it on."""
    mode.__enter__()
    ENTERED.append(mode)


def changing(cls, method, change):
    """Return a class that changes a setting in each call of a method."""

    def call(self, *args, **named):
        change()
        return getattr(cls, method)(self, *args, **named)

    return type("Changes", (cls,), {method: call, "__module__": cls.__module__})


def changing_half(half):
    """Return a function like `changing` for one half of a step part."""

    def make(cls, method, change):
        return type("Changes", (cls,), {half: changing(getattr(cls, half), method, change)})

    return make


# suite, attribute, right component, method that changes a setting, test, further attributes
KINDS: list[tuple[Any, ...]] = [
    (LogitsProcessorSuite, "processor", processors.Bias, "apply", "bystanders"),
    (SamplerSuite, "sampler", samplers.Gumbel, "sample", "result"),
    (SchedulingPolicySuite, "policy", policies.Fcfs, "key", "keys"),
    (EvictionPolicySuite, "eviction", policies.Oldest, "released", "candidates"),
    (SchedulerSuite, "scheduler", schedulers.Default, "schedule", "limits"),
    (StepPartSuite, "part", step_parts.GoodWorker, "begin", "steps", changing_half("half")),
    (StepPartSuite, "part", step_parts.GoodWorker, "begin", "steps", changing_half("worker")),
    (ActivationTapSuite, "tap", taps.Norms, "read", "shape"),
    (PoolerSuite, "pooler", poolers.Largest, "start", "shape"),
    (GrammarSuite, "grammar", grammars.Finite, "compile", "mask"),
    (SpeculatorSuite, "speculator", speculators.LastPair, "propose", "drafts"),
    (OpsSuite, "ops", ops.Plain, "linear", "linear"),
    (ModelSuite, "model", models.Tiny, "forward", "batch"),
    (AttentionBackendSuite, "backend", attention.Plain, "attend", "causal"),
]
MORE: dict[Any, dict[str, Any]] = {
    LogitsProcessorSuite: {"arguments": st.just({"by": 1.0})},
    StepPartSuite: {"calls": [("live", {})], "prompts": [{"letters": 3}]},
    GrammarSuite: {"samples": SAMPLES},
    ModelSuite: {"config": models.CONFIG},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].__name__}-{kind[2].__name__}")
def test_a_component_that_changes_the_default_dtype_is_caught(kind):
    suite, attribute, right, method, test, *make = kind
    shared = {"examples": 0.2, **MORE.get(suite, {})}
    assert message_of(suite, {attribute: right, **shared}, test) is None
    broken = (make[0] if make else changing)(right, method, CHANGES[DTYPE])
    pattern = f"observed: it changed torch's {DTYPE}"
    assert_fails(suite, {attribute: broken, **shared}, test, "settings", pattern)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("setting", CHANGES)
def test_each_setting_is_compared(setting):
    sampler = changing(samplers.Gumbel, "sample", CHANGES[setting])
    with torch.inference_mode(False):
        pattern = f"observed: it changed torch's {setting}"
        assert_fails(SamplerSuite, {"sampler": sampler}, "result", "settings", pattern)


def test_a_setting_that_is_restored_is_not_a_change():
    def change(self, *args):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return super(cls, self).sample(*args)
        finally:
            torch.set_default_dtype(before)

    cls = type("Restores", (samplers.Gumbel,), {"sample": change})
    assert message_of(SamplerSuite, {"sampler": cls}, "result") is None
