"""Plugins that mutate read-only inputs; the name has the input."""

from __future__ import annotations

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Phase, RequestStatus, SchedulingPolicy, StatSink
from hardpoint.plugins.server.hooks import hookimpl

POLICY_WRITES = {
    "output": lambda request: request.output_token_ids.append(5),
    "more_output": lambda request: request.output_token_ids.__iadd__([5]),
    "token": lambda request: request.append(5),
    "status": lambda request: setattr(request, "status", RequestStatus.FINISHED),
    "progress": lambda request: setattr(request, "num_computed_tokens", 0),
    "length": lambda request: setattr(request, "num_tokens", 1),
    "identity": lambda request: setattr(request, "request_id", "other"),
    "drafts": lambda request: request.draft_token_ids.append(5),
    "events": lambda request: request.events.clear(),
    "nothing": lambda request: delattr(request, "order"),
    "tags": lambda request: request.tags.update(tenant="other"),
    "params": lambda request: request.params.stop_token_ids.append(5),
    "prompt": lambda request: request.source.prompt_token_ids.clear(),
    "source": lambda request: setattr(request.source, "request_id", "other"),
    "salt": lambda request: setattr(request.source, "cache_salt", "other"),
}


class WritingPolicy(SchedulingPolicy):
    """Writes once in every step, and in every call of another method."""

    contract = 1

    class Options(plugins.Options):
        write: str

    def key(self, request):
        return request.arrival_time

    def scheduled(self, request, tokens):
        POLICY_WRITES[self.options.write](request)

    added = finished = lambda self, request: POLICY_WRITES[self.options.write](request)


PROCESSOR_WRITES = {
    "output": lambda request, rows: request.output_token_ids.append(5),
    "prompt": lambda request, rows: request.prompt_token_ids.clear(),
    "stop tokens": lambda request, rows: request.stop_token_ids.clear(),
    "params": lambda request, rows: request.params.stop_token_ids.append(5),
    "identity": lambda request, rows: setattr(request, "request_id", "other"),
    "row": lambda request, rows: setattr(request, "row", 99),
    "arguments": lambda request, rows: request.arguments.clear(),
    "state": lambda request, rows: request.state.update(temperature=None),
    "other arguments": lambda request, rows: setattr(request, "arguments", {}),
    "rows": lambda request, rows: rows.requests.reverse(),
    "other rows": lambda request, rows: setattr(rows, "requests", []),
    "version": lambda request, rows: setattr(rows, "version", -1),
    "arguments of rows": lambda request, rows: rows.arguments().clear(),
}


class WritingProcessor(LogitsProcessor):
    """Writes in `apply`; `start` and `prepare` have writes of their own."""

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        write: str = ""

    @classmethod
    def prepare(cls, arguments, context):
        if arguments.write == "in prepare":
            context.prompt_token_ids.clear()
        return arguments

    def start(self, request):
        if request.arguments[self.name].write == "in start":
            request.state["temperature"] = None

    def apply(self, logits, rows):
        for request, arguments in zip(rows.requests, rows.arguments(), strict=True):
            if arguments.write in PROCESSOR_WRITES:
                PROCESSOR_WRITES[arguments.write](request, rows)
        return logits


class WritingHooks:
    """Writes to the record of a step and to the last output."""

    contract = 1

    @hookimpl
    def step_planned(self, record):
        record.scheduled.clear()

    @hookimpl
    def request_finished(self, output):
        output.outputs[0].token_ids.clear()


class WritingSink(StatSink):
    contract = 1

    def record(self, stats):
        for finished in stats.finished:
            finished.tags["tenant"] = "other"
        stats.scheduler.num_running = -1
