"""A policy, a sampler and a reasoning parser with arguments, and policies to replace the first."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from hardpoint import plugins
from hardpoint.plugins import Meta, Sampler, SchedulingPolicy
from hardpoint.toolkit.parsing.format_parser import Content, FormatParser, ParserState, Reasoning
from support.samples import Sample


class Classes(Sample, SchedulingPolicy, contract=1):
    """Interactive requests first."""

    class Arguments(plugins.Arguments):
        deadline_class: Literal["chat", "batch"] = "batch"
        weight: Annotated[float, Meta(gt=0)] = 1.0

    def key(self, request):
        return request.arguments.deadline_class != "chat", -request.arguments.weight

    def admit(self, request, load):
        assert isinstance(request.arguments, self.Arguments)


class ByWeight(SchedulingPolicy):
    """The heaviest first; its `prepare` doubles weights and rejects weights over 100."""

    contract = 1

    class Arguments(plugins.Arguments):
        weight: Annotated[float, Meta(ge=0)] = 0.0

    class Prepared(Arguments):
        doubled: float = 0.0

    @classmethod
    def prepare(cls, arguments, context):
        if arguments.weight > 100:
            raise ValueError(f"weight: expected at most 100, got {arguments.weight}")
        fields = msgspec.structs.asdict(arguments)
        return cls.Prepared(**fields, doubled=2 * arguments.weight)

    def key(self, request):
        assert request.arguments.doubled == 2 * request.arguments.weight
        return -request.arguments.doubled


class FailsOnImport(Classes):
    """Has the format of `Exporting`, and does not accept its state."""

    state_format = "classes"

    def added(self, request):
        raise AssertionError("not reached: the guard reports it")

    def export_state(self):
        return 1

    def import_state(self, state):
        raise ValueError("no such state")


class Exporting(Classes):
    state_format = "classes"

    def export_state(self):
        return 1


class Rank(Sampler):
    """The token with the `rank`-th largest logit."""

    contract = 1

    class Arguments(plugins.Arguments):
        rank: Annotated[int, Meta(ge=0, le=9)] = 0

    def sample(self, logits, rows):
        assert [arguments.rank for arguments in rows.arguments()] == rows.tensor(
            "rank"
        ).flatten().tolist()
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        return order.gather(1, rows.tensor("rank")).squeeze(1)


class Tagged(FormatParser):
    """Thinking stands between tags that a request may name."""

    contract = 1
    roles = ("reasoning",)
    reasoning = "thinking"

    class Arguments(plugins.Arguments):
        tag: Annotated[str, Meta(min_length=1)] = "think"

    OPEN = []

    def __init__(self, context):
        super().__init__(context)
        self.OPEN.append(self)

    def close(self):
        self.OPEN.remove(self)

    def states(self):
        tag = self.arguments.tag
        return {
            "content": ParserState(Content, {f"<{tag}>": "thinking"}),
            "thinking": ParserState(Reasoning, {f"</{tag}>": "content"}),
        }
