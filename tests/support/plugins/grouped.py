"""Step parts that open members of requests, and combine their logits."""

from __future__ import annotations

from typing import Any

from hardpoint import plugins
from hardpoint.plugins import FrontendHalf, LoRARequest, StepPart, WorkerHalf
from hardpoint.plugins.step_part import GivenPrompt


class Mixed(StepPart):
    """Sums the logits of a request and its members."""

    contract = 1
    named_only = True

    class Arguments(plugins.Arguments):
        prompts: list[str | list[int]]
        fails_at: int = -1
        gives: str = "sum"

    def frontend_half(self, context):
        return Prompts()

    def worker_half(self, context):
        return Sum()


class Prompts(FrontendHalf):
    def members(self, request, arguments):
        if "" in arguments["prompts"]:
            raise KeyError("empty")
        return [
            GivenPrompt(text=prompt) if isinstance(prompt, str) else GivenPrompt(token_ids=prompt)
            for prompt in arguments["prompts"]
        ]


class Sum(WorkerHalf):
    def __init__(self):
        self.calls = 0

    def combine(self, logits, arguments):
        self.calls += 1
        if arguments["fails_at"] == 0:
            raise ValueError("no logits today")
        if arguments["gives"] == "rows":
            return logits
        return logits.sum(0)


class Doubled(Mixed):
    """Mixed, under another name."""

    contract = 1


class Lonely(StepPart):
    """Opens members, and combines nothing."""

    contract = 1

    def frontend_half(self, context):
        return OpensOne()


class OpensOne(FrontendHalf):
    def members(self, request, arguments):
        return [GivenPrompt(token_ids=[1, 2])]


class Adapted(StepPart):
    """Replaces the logits of a request by the logits of a member with an adapter."""

    contract = 1
    named_only = True

    class Arguments(plugins.Arguments):
        adapter: dict[str, Any]

    def frontend_half(self, context):
        return SamePrompt()

    def worker_half(self, context):
        return Last()


class SamePrompt(FrontendHalf):
    def members(self, request, arguments):
        adapter = LoRARequest(**arguments["adapter"])
        return [GivenPrompt(token_ids=request.prompt_token_ids, fields={"lora": adapter})]


class Last(WorkerHalf):
    def combine(self, logits, arguments):
        return logits[-1]
