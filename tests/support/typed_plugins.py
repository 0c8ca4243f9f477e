"""Plugins and calls with types that a checker finds; see scripts/check-examples.

`assert_type` is an error of the checker where the type is another one, or unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import assert_type

import torch

from hardpoint import LLM, plugins
from hardpoint.async_llm import AsyncLLM
from hardpoint.plugins import (
    AdmissionGate,
    AttentionBackend,
    AttentionStep,
    Edits,
    EngineCoreRequest,
    KVSpec,
    OutputParser,
    ParserRequest,
    Phase,
    Request,
    RequestFilter,
    ResourceCost,
    Rows,
    Sampler,
    SamplingRows,
    SchedulingPolicy,
    SparseLogitsProcessor,
    StepPart,
)
from hardpoint.plugins.output_parser import (
    OutputState,
)
from hardpoint.plugins.step_part import EngineHalfContext


class Processor(SparseLogitsProcessor):
    contract = 1
    phase = Phase.MASK

    class Options(plugins.Options):
        most: int = 3

    class Arguments(plugins.Arguments):
        steps: int

    options: Options

    def edits(self, rows: Rows[Arguments, deque[int]]) -> Edits | None:
        assert_type(self.options.most, int)
        assert_type(rows.arguments(), Sequence[Processor.Arguments])
        assert_type(rows.arguments()[0].steps, int)
        assert_type(rows.states(), Sequence[deque[int]])
        return None


class Policy(SchedulingPolicy):
    contract = 1

    class Arguments(plugins.Arguments):
        weight: float = 1.0

    def key(self, request: Request[Arguments]) -> float:
        assert_type(request.arguments, Policy.Arguments)
        return request.arguments.weight

    def victim(self, running: Sequence[Request[Arguments]], load: plugins.Load) -> Request:
        assert_type(running[0].arguments.weight, float)
        return running[0]


class Greedy(Sampler):
    contract = 1

    class Arguments(plugins.Arguments):
        rank: int = 0

    def sample(self, logits: torch.Tensor, rows: SamplingRows[Arguments]) -> torch.Tensor:
        assert_type(rows.arguments()[0].rank, int)
        return logits.argmax(-1)


class Parser(OutputParser):
    contract = 1
    roles = ("reasoning",)

    class Arguments(plugins.Arguments):
        tag: str = "think"

    arguments: Arguments

    def open(self, request: ParserRequest) -> OutputState:
        assert_type(self.arguments.tag, str)
        raise NotImplementedError


class Backend(AttentionBackend[list[torch.Tensor], AttentionStep]):
    contract = 1
    devices = ("cpu",)

    def bytes_per_block(self, spec: KVSpec) -> int:
        return 4 * self.context.block_size

    def allocate(self, spec: KVSpec, num_blocks: int) -> list[torch.Tensor]:
        return [torch.zeros(num_blocks)]

    def plan(self, step: AttentionStep) -> AttentionStep:
        return step

    def attend(
        self,
        spec: KVSpec,
        cache: list[torch.Tensor],
        plan: AttentionStep,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        return q


def use(backend: Backend, spec: KVSpec, step: AttentionStep) -> None:
    """A caller's view: the results of `allocate` and `plan` have known types."""
    base: AttentionBackend[list[torch.Tensor], AttentionStep] = backend
    assert_type(base.allocate(spec, 1), list[torch.Tensor])
    assert_type(base.plan(step), AttentionStep)


def bare(rows: Rows, request: Request, sampled: SamplingRows, backend: AttentionBackend) -> None:
    """Without parameters they are right, too."""


class Slots(RequestFilter, ResourceCost, AdmissionGate):
    """Implements the required members of the protocols; the rest has defaults."""

    def __init__(self, running: int) -> None:
        self.capacity = {"slots": running}

    def uses(self, request: EngineCoreRequest) -> bool:
        return "batch" in request.tags

    def cost(self, request: Request) -> Mapping[str, int]:
        return {"slots": 1}

    def gate(self, request: Request) -> str | None:
        return None


class NoCost(ResourceCost):
    capacity = {"slots": 1}


class NoCapacity(ResourceCost):
    def cost(self, request: Request) -> Mapping[str, int]:
        return {"slots": 1}


class OneCost(ResourceCost):
    capacity = {"slots": 1}

    def cost(self, request: Request) -> int:  # type: ignore[override]
        return 1


class NoHook:
    def costs(self, request: Request) -> Mapping[str, int]:
        return {"slots": 1}


class Limit(StepPart):
    contract = 1

    def engine_half(self, context: EngineHalfContext) -> Slots:
        NoCost()  # type: ignore[abstract]
        NoCapacity()  # type: ignore[abstract]
        return Slots(1)


class NoLimit(StepPart):
    contract = 1

    def engine_half(self, context: EngineHalfContext) -> NoHook:  # type: ignore[override]
        return NoHook()


def call(llm: LLM, async_llm: AsyncLLM) -> None:
    """Keywords of calls have types, and wrong ones are errors, each of them expected here."""
    llm.generate(["Hi", "You"], priority=[1, 2], timeout=None, tags={"tenant": "acme"})
    llm.chat([{"role": "user", "content": "Hi"}], tools=[call], tool_choice="none", priority=1)
    async_llm.chat([], parallel_tool_calls=False, cache_salt="salt")
    llm.generate("Hi", priorty=1)  # type: ignore[call-arg]
    llm.generate("Hi", tools=[])  # type: ignore[call-arg]
    llm.stream("Hi", priority=[1, 2])  # type: ignore[arg-type]
    llm.chat([], tool_choice="always")  # type: ignore[arg-type]
    async_llm.generate("Hi", timeout="soon")  # type: ignore[arg-type]
