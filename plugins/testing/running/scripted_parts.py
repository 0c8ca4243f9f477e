"""Step parts for the scripted model: one scatters embeddings, one changes linear layers by request.

They show what adapters and encoders need of the engine. Their effect can be computed in advance,
since embeddings of the scripted model are token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from hardpoint.errors import RequestError
from hardpoint.plugins import (
    BlockKey,
    EngineCoreRequest,
    InputEmbeddings,
    LinearProducts,
    PlanData,
    Request,
    RequestFilter,
    RequestLifecycle,
    ResourceCost,
    SchedulerOutput,
    StepPart,
    WorkerStep,
)
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.plugins.worker_half import StepRows, WorkerHalfContext

if TYPE_CHECKING:
    import torch

EMBEDDINGS_TAG = "embeddings"
ADAPTER_TAG = "adapter"


class ScriptedEmbeddings(StepPart):
    """Replaces the embeddings of some tokens of a prompt, as an encoder of images does.

    A request with the tag `embeddings`, such as "2:70,71", gets embeddings of which all elements
    are 70 and 71 in place of those of its tokens 2 and 3: on the scripted model, those of the
    tokens 70 and 71.
    """

    contract = 1

    def engine_half(self, context: EngineHalfContext) -> _EmbeddingsPlanner:  # noqa: ARG002
        """Return the half that sends the embeddings of a step."""
        return _EmbeddingsPlanner()

    def worker_half(self, context: WorkerHalfContext) -> _EmbeddingsWorker:  # noqa: ARG002
        """Return the half that scatters them."""
        return _EmbeddingsWorker()


def _embeddings_of(request: EngineCoreRequest) -> dict[int, int]:
    """Return the values by position.

    Raises:
        ValueError: the tag has none, or there are no such tokens.
    """
    offset, _, values = request.tags[EMBEDDINGS_TAG].partition(":")
    by_position = {int(offset) + i: int(value) for i, value in enumerate(values.split(","))}
    if min(by_position) < 0 or max(by_position) >= len(request.prompt_token_ids):
        raise ValueError(f"the prompt has {len(request.prompt_token_ids)} tokens")
    return by_position


class _EmbeddingsPlanner(RequestFilter, RequestLifecycle, BlockKey, PlanData):
    def __init__(self) -> None:
        self._values: dict[str, dict[int, int]] = {}

    def uses(self, request: EngineCoreRequest) -> bool:
        return EMBEDDINGS_TAG in request.tags

    def check(self, request: EngineCoreRequest) -> None:
        """Read the embeddings of a request.

        Raises:
            RequestError: they are not valid.
        """
        try:
            self._values[request.request_id] = _embeddings_of(request)
        except ValueError as error:
            raise RequestError(
                f"tags.{EMBEDDINGS_TAG}: expected a position and values such as '2:70,71', got "
                f"{request.tags[EMBEDDINGS_TAG]!r}: {error}"
            ) from None

    def refused(self, request_id: str) -> None:
        self._values.pop(request_id, None)

    def block_key(self, request: EngineCoreRequest, span: range) -> bytes | None:
        if EMBEDDINGS_TAG not in request.tags:
            return None
        try:
            values = _embeddings_of(request)
        except ValueError:  # refused by `check`
            return None
        step_embeddings = sorted(
            (position, value) for position, value in values.items() if position in span
        )
        return msgspec.msgpack.encode(step_embeddings) if step_embeddings else None

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return the embeddings of a step: by request, the index of a token and its value."""
        data: dict[str, dict[int, int]] = {}
        computed = plan.num_computed_tokens()
        for name in plan.num_scheduled_tokens.keys() & self._values.keys():
            start, count = computed[name], plan.num_scheduled_tokens[name]
            values = {
                position - start: value
                for position, value in self._values[name].items()
                if start <= position < start + count
            }
            if values:
                data[name] = values
        return msgspec.msgpack.encode(data) if data else None

    def ended(self, request_id: str) -> None:
        self._values.pop(request_id, None)


class _EmbeddingsWorker(WorkerStep, InputEmbeddings):
    def __init__(self) -> None:
        self._values: Mapping[str, Mapping[int, int]] = {}

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        self._values = msgspec.msgpack.decode(data, type=dict[str, dict[int, int]])

    def embedded(self, embedded: torch.Tensor, rows: StepRows) -> torch.Tensor:
        embedded = embedded.clone()
        for name, start in zip(rows.request_ids, rows.starts, strict=False):
            for index, value in self._values.get(name, {}).items():
                embedded[start + index] = value
        return embedded


class ScriptedAdapters(StepPart):
    """Adds a number to the products of all linear layers of a request, as an adapter does.

    The tag `adapter` of a request is the number. At most two requests with one run at once.
    """

    contract = 1

    def engine_half(self, context: EngineHalfContext) -> _AdaptersPlanner:  # noqa: ARG002
        """Return the half that sends the numbers of a step."""
        return _AdaptersPlanner()

    def worker_half(self, context: WorkerHalfContext) -> _AdaptersWorker:  # noqa: ARG002
        """Return the half that adds them."""
        return _AdaptersWorker()


class _AdaptersPlanner(RequestFilter, ResourceCost, RequestLifecycle, BlockKey, PlanData):
    capacity: Mapping[str, int] = {"adapter slots": 2}

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def uses(self, request: EngineCoreRequest) -> bool:
        return ADAPTER_TAG in request.tags

    def check(self, request: EngineCoreRequest) -> None:
        tag = request.tags[ADAPTER_TAG]
        if not tag.isdecimal() or len(tag) > 4:
            raise RequestError(f"tags.{ADAPTER_TAG}: expected a number from 0 to 9999, got {tag!r}")
        self._numbers[request.request_id] = int(tag)

    def refused(self, request_id: str) -> None:
        self._numbers.pop(request_id, None)

    def cost(self, request: Request) -> Mapping[str, int]:  # noqa: ARG002
        return {"adapter slots": 1}

    def block_key(self, request: EngineCoreRequest, span: range) -> bytes | None:
        return request.tags[ADAPTER_TAG].encode() if self.uses(request) and not span.start else None

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        names = plan.num_scheduled_tokens.keys() & self._numbers.keys()
        return msgspec.msgpack.encode({name: self._numbers[name] for name in names})

    def ended(self, request_id: str) -> None:
        self._numbers.pop(request_id, None)


class _AdaptersWorker(WorkerStep, LinearProducts):
    def __init__(self) -> None:
        self._numbers: Mapping[str, int] = {}

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        self._numbers = msgspec.msgpack.decode(data, type=dict[str, int])

    def linear(
        self,
        parts: Sequence[tuple[str, int]],  # noqa: ARG002
        x: torch.Tensor,  # noqa: ARG002
        y: torch.Tensor,
        rows: StepRows,
    ) -> torch.Tensor:
        y = y.clone()
        for index, name in enumerate(rows.request_ids):
            y[rows.starts[index] : rows.starts[index + 1]] += self._numbers[name]
        return y
