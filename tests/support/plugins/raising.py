"""Plugins of every kind that raise a BaseException, each in one of its methods."""

from __future__ import annotations

from typing import Any

from hardpoint import plugins
from hardpoint.plugins import (
    BatchLogitsProcessor,
    Command,
    EvictionPolicy,
    KVEventPublisher,
    LogitsProcessor,
    Phase,
    SchedulingPolicy,
    StatSink,
    hookimpl,
)
from support.samples import Sample


class PanicException(BaseException):
    """As PyO3 raises for a panic in Rust."""


def panic(*_: Any) -> Any:
    raise PanicException("index out of bounds")


class Logits(Sample, LogitsProcessor, contract=1):
    """Panics in the method that the request names."""

    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        where: str

        def __post_init__(self) -> None:
            if self.where == "Arguments":
                panic()

    @classmethod
    def prepare(cls, arguments, context):
        return panic() if arguments.where == "prepare" else arguments

    def start(self, request):
        arguments = request.arguments[self.name]
        return panic() if arguments.where == "start" else arguments.where

    def advance(self, state, token):
        return panic() if state == "advance" else state

    def apply(self, logits, rows):
        for request in rows.requests:
            if request.arguments[self.name].where == "apply":
                panic()
        return logits


CLOSED: list[str] = []


class NoState(Logits):
    device_state = panic


class NoClose(Logits):
    close = panic


class Closes(Logits):
    def close(self):
        CLOSED.append(self.name)


class Whole(BatchLogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        where: str

    @classmethod
    def uses(cls, params):
        return False

    def update_state(self, update):
        panic()

    def apply(self, logits):
        return logits


class Policy(SchedulingPolicy):
    contract = 1
    key = scheduled = finished = panic


class Eviction(EvictionPolicy):
    contract = 1
    released = taken = dropped = evict = panic


class Publisher(KVEventPublisher):
    contract = 1
    publish = close = panic


class Sink(StatSink):
    contract = 1
    record = report = close = panic


class Hooks:
    contract = 1

    @hookimpl
    def step_planned(self, record):
        panic()

    @hookimpl
    def request_received(self, request):
        if request.params.seed == 1:
            panic()

    @hookimpl
    def request_finished(self, output):
        if output.request_id == "finished":
            panic()


class Started:
    contract = 1

    @hookimpl
    def engine_started(self, info):
        panic()


class Oops:
    contract = 1

    @hookimpl
    def cli_commands(self):
        return [Command(name="oops", summary="panics", configure=bool, run=panic)]


class Unbuildable(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    def __init__(self, context):
        panic()

    def apply(self, logits, rows):
        return logits
