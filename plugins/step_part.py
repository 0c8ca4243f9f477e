"""Step parts: features that take part in the step of the engine and of its workers.

A part gates requests, counts resources, puts data on the plan, masks logits, reads results, and is
notified of plans that are lost. The engine binds the methods that a half overrides to lists when it
starts; a method that no half overrides is never called, and none is called in a step without a
request that uses the part.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from .component import Component, Context
from .config import EngineConfig
from .grammars import Vocabulary
from .plan import GrammarBitmask, ModelRunnerOutput, RequestFault, SchedulerOutput
from .request import Request
from .requests import EngineCoreRequest
from .step_record import WaitReason

if TYPE_CHECKING:
    import torch

    from .model import Attend

__all__ = [
    "ComponentFactory",
    "EngineHalf",
    "EngineHalfContext",
    "StepPart",
    "StepPartContext",
    "StepRows",
    "WorkerHalf",
    "WorkerHalfContext",
]


class ComponentFactory(Protocol):
    """Builds the components of other kinds that a part drives, and names them in messages."""

    def create(self, kind: str, name: str, context: type[Context[Any]], **fields: Any) -> Any:
        """Build an enabled component, which the caller owns and closes.

        Args:
            kind: such as "grammars".
            name: of the component.
            context: class of its context.
            fields: of the context, besides name and options.

        Raises:
            PluginError: it is not enabled, or cannot be built.
        """

    def source(self, kind: str, name: str) -> str:
        """Return how messages name a component.

        Raises:
            PluginNotFoundError: it is not enabled.
        """


@dataclass(frozen=True, kw_only=True)
class StepPartContext(Context["StepPart"]):
    """Context of a step part, in the engine and in each worker.

    Attributes:
        config: of the engine.
    """

    config: EngineConfig


@dataclass(frozen=True, kw_only=True)
class EngineHalfContext:
    """Context of the half in the engine.

    Attributes:
        components: builds components of other kinds.
        describe_fault: returns class and text of an exception that a component raised; raises it
            again if it is not the component's fault but the user's interrupt.
        clock: seconds.
        scheduler: names the scheduler in messages.
        vocab_size: of the model.
        vocabulary: of the tokenizer; None for an engine without one.
        block_size: tokens of a block of the KV cache.
    """

    components: ComponentFactory
    describe_fault: Callable[[BaseException], str]
    clock: Callable[[], float]
    scheduler: str
    vocab_size: int
    vocabulary: Vocabulary | None
    block_size: int


@dataclass(frozen=True, kw_only=True)
class WorkerHalfContext:
    """Context of the half in a worker.

    Attributes:
        device: of the model, a `torch.device`.
        rank: of the worker.
        world_size: number of workers.
        vocab_size: of the model.
        hidden_size: of the model.
    """

    device: Any
    rank: int
    world_size: int
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True)
class StepRows:
    """The requests of a worker's step that use a part, in the order of their tokens.

    Attributes:
        request_ids: ids of these requests.
        starts: index of the first token of each request, and at the end the number of all tokens.
    """

    request_ids: Sequence[str]
    starts: Sequence[int]


class EngineHalf:
    """The half of a step part in the engine; called by one thread.

    Every method is optional. `uses` is called once per request; the others only for requests that
    use the part, and for all plans while one of these requests is live.

    Attributes:
        capacity: amount of each resource that `cost` counts, by name; read once, when the engine
            starts. There is nothing of a resource that is not named here.
        num_draft_tokens: most drafts of a request and a step; read once, when the engine starts.
            0: `drafts` is never called.
    """

    capacity: Mapping[str, int] = {}
    num_draft_tokens: int = 0

    def uses(self, request: EngineCoreRequest) -> bool:  # noqa: ARG002
        """Return whether a new request uses the part; by default each one does."""
        return True

    def check(self, request: EngineCoreRequest) -> None:
        """Check a new request.

        Raises:
            RequestError: it is refused.
        """

    def refused(self, request_id: str) -> None:
        """Notify the part that a request was not added, be it by its own `check`."""

    def gate(self, request: Request) -> WaitReason | str | None:  # noqa: ARG002
        """Return why a request has to wait before it is scheduled for the first time.

        Called once per step until it returns None, and never again: not after a preemption. The
        request may be kept until `ended`; its `output_token_ids` grow. Where every request waits,
        steps follow one another at once: see `wait`.

        Raises:
            RequestError: it can never run; it ends with this message.
        """
        return None

    def cost(self, request: Request) -> Mapping[str, int]:  # noqa: ARG002
        """Return the amounts of resources that a request holds while it runs, by name.

        Called once, after the gates. A request is admitted when all amounts are available; they
        are released when it is preempted and when it ends. One that costs more than the capacity
        ends with an error.
        """
        return {}

    def begin(self, plan: SchedulerOutput) -> bytes | None:  # noqa: ARG002
        """Return the data for the worker halves that rides on a plan; None if there is none.

        Called once per plan, in order, before the plan is executed, and after `preempted` and
        `ended` of its requests. The plan may be empty, while all requests wait.
        """
        return None

    def needs_results(self, plan: SchedulerOutput) -> Collection[str]:  # noqa: ARG002
        """Return the requests of a plan whose earlier tokens `mask` needs.

        Where several steps are under way, `mask` is called when these are known.
        """
        return ()

    def mask(self, plan: SchedulerOutput) -> GrammarBitmask | None:  # noqa: ARG002
        """Return the tokens that may be sampled in a step; None if all may.

        Called while the model runs, where the executor runs elsewhere. The masks of several parts
        are combined: a token needs to be allowed by each.
        """
        return None

    def result(
        self,
        plan: SchedulerOutput,  # noqa: ARG002
        result: ModelRunnerOutput,  # noqa: ARG002
    ) -> Mapping[str, RequestFault]:
        """Read the result of a plan before the scheduler does.

        The report of the worker half that sampled is `result.part_reports[name]`.

        Returns:
            Requests that end with an error, of those that use the part.
        """
        return {}

    def drafts(self) -> Mapping[str, Sequence[int]]:
        """Return token ids that may follow the output of requests, by request id.

        Called after each step that computed tokens, when the requests have those of its result. The
        next step verifies drafts of requests that decode; others are dropped. A draft is accepted
        if it is the token that is sampled at its position, so that drafts change no output. Of
        several parts that draft for a request, the first one's drafts are used.
        """
        return {}

    def lost(self, plan: SchedulerOutput) -> None:
        """Notify the part of a plan that was not executed, or not to its end."""

    def preempted(self, request_id: str) -> None:
        """Notify the part of a request that left the batch and may resume."""

    def ended(self, request_id: str) -> None:
        """Notify the part of the end of a request, with the plan that reports it.

        Also of one that never passed the gate.
        """

    def wait(self) -> None:
        """Wait a moment for what a gate waits for, after a step that computed nothing.

        A part that holds requests back sleeps here, or the engine takes all of a CPU. The next step
        looks for aborts, so that a few milliseconds are right.
        """

    def close(self) -> None:
        """Release resources; called once."""


class WorkerHalf:
    """The half of a step part in a worker; called in steps for which `begin` gave data.

    Every method is optional. `hidden` and `logits` get the rows of the requests that use the part,
    and no others.
    """

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Take the data of the engine's half, before the model runs."""

    def around_layers(self, attend: Attend) -> Attend:
        """Return a function that is called instead of `attend` for each layer of the step."""
        return attend

    def hidden(self, hidden: torch.Tensor, rows: StepRows) -> torch.Tensor | None:  # noqa: ARG002
        """Return changed hidden states [tokens, hidden_size] of a step; None leaves them."""
        return None

    def logits(
        self,
        logits: torch.Tensor,  # noqa: ARG002
        request_ids: Sequence[str],  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return changed logits, before masks and logits processors; None leaves them.

        Args:
            logits: float32 [rows, vocab_size].
            request_ids: of each row; a request with drafts has one more row for each.
        """
        return None

    def sampled(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Read the tokens of the step by request, before `report`, in the rank that samples.

        Those of requests that use the part: accepted drafts, then one more token.
        """

    def report(self) -> bytes | None:
        """Return a report of the step for the engine's half, in the rank that samples."""
        return None

    def sleep(self, level: int) -> None:
        """Release memory, see `Worker.sleep`."""

    def wake_up(self) -> None:
        """Allocate again what `sleep` released."""

    def close(self) -> None:
        """Release resources; called once."""


class StepPart(Component):
    """A feature of the engine's step, with a half in the engine and one in each worker.

    Attributes:
        fault_scope: what a fault of a half ends: the requests of the plan that use the part, its
            work in this step, or the engine.
        before, after: names of parts whose methods are called after, and before, those of this one.
    """

    context: StepPartContext
    fault_scope: ClassVar[Literal["request", "step", "engine"]] = "request"
    before: ClassVar[Sequence[str]] = ()
    after: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def engine_half(self, context: EngineHalfContext) -> EngineHalf:
        """Return the half in the engine; called once."""

    def worker_half(self, context: WorkerHalfContext) -> WorkerHalf | None:  # noqa: ARG002
        """Return the half in a worker; None if there is none. Called once per worker."""
        return None
