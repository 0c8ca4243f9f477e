"""SnapKV (arXiv:2404.14469): the blocks of a prompt that its last tokens attend to most."""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec
import torch

from hardpoint import plugins
from hardpoint.plugins import (
    ConfigError,
    EngineCoreRequest,
    Meta,
    ModelRunnerOutput,
    Request,
    RequestError,
    SchedulerOutput,
    StepPart,
)
from hardpoint.plugins.step_part import (
    AdmissionGate,
    EngineHalfContext,
    LayerWrapper,
    PlanData,
    RequestFilter,
    RequestLifecycle,
    StepObserver,
    WorkerStep,
)
from hardpoint.plugins.worker_half import WorkerHalfContext


class SnapKV(StepPart):
    """Releases the KV blocks of a prompt that its last tokens attend to least."""

    contract = 1
    named_only = releases_blocks = True

    class Arguments(plugins.Arguments):
        """The part of the prompt that is kept.

        Attributes:
            budget: tokens of the prompt that keep their blocks, `observed` ones included.
            observed: last tokens of the prompt, whose attention weights are added up.
            delay: output tokens that still attend to the whole prompt. The weights of a step are
                known after the next steps are planned.
        """

        budget: Annotated[int, Meta(ge=1)] = 1024
        observed: Annotated[int, Meta(ge=1)] = 32
        delay: Annotated[int, Meta(ge=8)] = 16

    def engine_half(self, context: EngineHalfContext) -> "Selection":
        """Return the half that releases blocks."""
        if context.world_size > 1:
            raise ConfigError(
                f"{self.name}: expected one rank, because each has weights of its own layers and "
                f"heads, got {context.world_size}"
            )
        return Selection(context, self.name)

    def worker_half(self, context: WorkerHalfContext) -> "Weights":  # noqa: ARG002
        """Return the half that adds up attention weights."""
        return Weights()


class Observed(msgspec.Struct, array_like=True):
    """Tokens of a request in a step, with attention weights to add up.

    Attributes:
        count: last tokens of the step.
        is_first, is_last: whether these are the first and the last observed tokens.
    """

    count: int
    is_first: bool
    is_last: bool


class Selection(RequestFilter, AdmissionGate, PlanData, StepObserver, RequestLifecycle):
    """Chooses the blocks of each prompt once its weights are known."""

    def __init__(self, context: EngineHalfContext, name: str) -> None:
        self._context, self._name = context, name
        self._waiting: dict[str, Request] = {}  # requests without a selection

    def check(self, request: EngineCoreRequest) -> None:
        """Reject a request that another engine has begun, with a selection of its own."""
        if request.resumed is not None:
            raise RequestError(f"{self._name}: expected a new request, got one from another engine")

    def gate(self, request: Request) -> None:
        """Let the observed tokens of a prompt be computed, not found in the prefix cache."""
        if len(request.source.prompt_token_ids) > self._arguments(request)["budget"]:
            self._waiting[request.request_id] = request
            start = self._first_observed(request)
            self._context.release_blocks(request, range(start, start), start)

    def _arguments(self, request: Request) -> dict[str, Any]:
        arguments: dict[str, Any] = request.source.plugin_args[f"step_parts/{self._name}"]
        return arguments

    def _first_observed(self, request: Request) -> int:
        observed: int = self._arguments(request)["observed"]
        return max(request.num_prompt_tokens - observed, 1)

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return the observed tokens of the step."""
        observed: dict[str, Observed] = {}
        computed = plan.num_computed_tokens()
        for request_id in plan.num_scheduled_tokens.keys() & self._waiting.keys():
            request = self._waiting[request_id]
            start, end = computed[request_id], computed[request_id]
            end += plan.num_scheduled_tokens[request_id]
            first = self._first_observed(request)
            if first < end and start < request.num_prompt_tokens:
                is_last = end == request.num_prompt_tokens
                observed[request_id] = Observed(end - max(start, first), start <= first, is_last)
        return msgspec.msgpack.encode(observed) if observed else None

    def result(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, Any]:  # noqa: ARG002
        """Release the blocks with the smallest sums of weights."""
        for data in result.part_reports.get(self._name, {}).values():
            for request_id, weights in msgspec.msgpack.decode(data).items():
                if (request := self._waiting.pop(request_id, None)) is not None:
                    self._select(request, weights)
        return {}

    def _select(self, request: Request, weights: Sequence[float]) -> None:
        size, arguments = self._context.block_size, self._arguments(request)
        blocks = range(self._first_observed(request) // size)  # others are kept
        sums = [sum(weights[block * size : (block + 1) * size]) for block in blocks]
        room = (arguments["budget"] - request.num_prompt_tokens) // size + len(blocks)
        best = set(heapq.nlargest(max(room, 0), blocks, key=sums.__getitem__))
        at = request.num_prompt_tokens + arguments["delay"]
        for is_best, group in groupby(blocks, best.__contains__):
            run = list(group)
            if not is_best:
                span = range(run[0] * size, (run[-1] + 1) * size)
                self._context.release_blocks(request, span, at)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._waiting.pop(request_id, None)


class Weights(WorkerStep, LayerWrapper):
    """Adds up the attention weights of the observed tokens, over layers and heads."""

    def __init__(self) -> None:
        self._observed: Mapping[str, Observed] = {}
        self._sums: dict[str, torch.Tensor] = {}  # float32 [tokens]

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        """Take the observed tokens of the step."""
        self._observed = msgspec.msgpack.decode(data, type=dict[str, Observed])
        for request_id, observed in self._observed.items():
            if observed.is_first:
                self._sums.pop(request_id, None)

    def take_attention_weights(self, weights: Callable[..., torch.Tensor]) -> None:
        """Take the weights of the step."""
        self._weights = weights

    def around_layers(self, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return `attend` with the sums of its weights."""

        def attend_and_add(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            angles: torch.Tensor | None = None,
        ) -> torch.Tensor:
            out = attend(layer, q, k, v, angles)
            for request_id, observed in self._observed.items():
                weights = self._weights(layer, q, request_id, observed.count).sum(0)
                if (before := self._sums.get(request_id)) is not None:
                    weights[: len(before)] += before
                self._sums[request_id] = weights
            return out

        return attend_and_add

    def report(self) -> bytes | None:
        """Return the sums of prompts that are computed."""
        ready = [name for name, observed in self._observed.items() if observed.is_last]
        sums = {name: self._sums.pop(name).tolist() for name in ready}
        return msgspec.msgpack.encode(sums) if sums else None

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget requests that ended before their prompt was computed."""
        for request_id in request_ids:
            self._sums.pop(request_id, None)
