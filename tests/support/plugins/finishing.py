"""Plugins with graceful ends of requests."""

from __future__ import annotations

from typing import Any

from hardpoint import plugins
from hardpoint.plugins import (
    Edits,
    Finish,
    ModelRunnerOutput,
    OutputParser,
    Phase,
    Request,
    RequestFault,
    SchedulerOutput,
    SchedulingPolicy,
    SparseLogitsProcessor,
    State,
    StepPart,
)
from hardpoint.plugins.output_parser import ContentText

BUDGET = 40


class _NoEdits(SparseLogitsProcessor):
    phase = Phase.BIAS

    def edits(self, rows: Any) -> Edits | None:
        return None


class TokenBudget(_NoEdits):
    """Ends a request with its 40th token, by a state that counts."""

    contract = 1

    class Options(plugins.Options):
        tokens: int = BUDGET

    def start(self, request: Any) -> int:
        return len(request.output_token_ids)

    def advance(self, state: int, token: int) -> int | Finish:
        tokens = self.options.tokens
        return state + 1 if state + 1 < tokens else Finish("budget", stop_reason=tokens)


class ObservedBudget(_NoEdits):
    """Ends a request with its 40th token, by a state that depends on logits."""

    contract = 1

    class State(State):
        num_tokens: int = 0

    max_state_bytes = 64

    def start(self, request: Any) -> State:
        return self.State()

    def observe(self, state: Any, token: int, logprob: float) -> Any:
        if state.num_tokens + 1 == BUDGET:
            return Finish("budget")
        return self.State(num_tokens=state.num_tokens + 1)


class PartBudget(StepPart):
    """Ends each request at 40 tokens, whatever the step."""

    contract = 1

    def engine_half(self, context: Any) -> Any:
        return _Budgets()


class _Budgets:
    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[str, RequestFault | Finish]:
        del result
        return dict.fromkeys(plan.num_scheduled_tokens, Finish("budget", num_tokens=BUDGET))


class PolicyBudget(SchedulingPolicy):
    """Ends each request at 40 tokens."""

    contract = 1

    def key(self, request: Request) -> Any:
        return request.order

    def scheduled(self, request: Request, tokens: int) -> Finish | None:
        return Finish("budget", num_tokens=BUDGET)


def _is_ended(prompt_token_ids: Any) -> bool:
    return len(prompt_token_ids) == len("stop here")


class GateEnd(StepPart):
    """Ends some requests before they run."""

    contract = 1

    def engine_half(self, context: Any) -> Any:
        return _Gate()


class _Gate:
    def gate(self, request: Request) -> Finish | None:
        return Finish("prompt") if _is_ended(request.source.prompt_token_ids) else None


class AdmissionEnd(SchedulingPolicy):
    """Ends some requests in the queue."""

    contract = 1

    def key(self, request: Request) -> Any:
        return request.order

    def admit(self, request: Request, load: Any) -> Finish | None:
        return Finish("prompt") if _is_ended(request.source.prompt_token_ids) else None


class StartEnd(_NoEdits):
    """Ends some requests by their prompts."""

    contract = 1

    def start(self, request: Any) -> Any:
        return Finish("prompt") if _is_ended(request.prompt_token_ids) else 0


class CountedEnd(_NoEdits):
    """States a number of tokens, against the rule for processors."""

    contract = 1

    def start(self, request: Any) -> int:
        return 0

    def advance(self, state: int, token: int) -> Finish:
        return Finish("late", num_tokens=3)


class SecondLine(OutputParser):
    """Ends a request after its second line."""

    contract = 2
    roles = ("reasoning",)
    ends_requests = True

    def open(self, request: Any) -> Any:
        return _Lines()


class _Lines:
    in_reasoning = False

    def __init__(self) -> None:
        self.num_lines = 0

    def feed(self, text: str) -> list[Any]:
        before, self.num_lines = self.num_lines, self.num_lines + text.count("\n")
        if before < 2 <= self.num_lines:
            return [ContentText(text), Finish("lines", stop_reason=self.num_lines)]
        return [ContentText(text)]

    def feed_token(self, token_id: int, text: str) -> list[Any]:
        return self.feed(text)

    def finish(self) -> list[Any]:
        return []
