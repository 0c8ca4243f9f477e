"""Requests in the simulator, with their expected and received outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hardpoint.plugins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RepetitionDetection,
    SchedulerOutput,
)
from hardpoint.plugins.requests import TokenLogprobs
from hardpoint.testing.scheduling.rules import FINISH, OUTPUTS, TOKENS
from hardpoint.testing.suite import short_repr

from .connector import NO_TRANSFER, Compile, Transfer


@dataclass(frozen=True)
class Script:
    """How the scripted collaborators treat a request.

    Attributes:
        transfer: data of the KV connector for it.
        compile: how its grammar compiles; None for a request without a grammar.
        fails_after: number of output tokens after which the worker reports a fault; None for never.
        drafts: "right" proposes the tokens that follow, "wrong" others, "mixed" both, "" none.
    """

    transfer: Transfer = NO_TRANSFER
    compile: Compile | None = None
    fails_after: int | None = None
    drafts: str = "right"


class Reply(NamedTuple):
    """The tokens that a request gets when it runs alone, and its finish reason."""

    tokens: list[int]
    finish_reason: FinishReason


@dataclass
class ExpectedRequest:
    """A request with its expected and observed outputs.

    Attributes:
        reply: the expected tokens and finish reason.
        tokens: the tokens delivered so far, after the initial outputs.
        allowed_reasons: finish reasons other than the expected one that are right by now.
        may_exceed_cache: True if the whole cache may be too small for it.
        end_reported: True once a plan reported its end to the worker.
        end_maybe_reported: True if a plan may have reported its end together with the end of an
            earlier request of the same id.
        client_notified: True once `finished_requests` reported its end to the client.
        was_scheduled: True once a plan contained it.
        loaded: True once the scheduler got its id in `kv_loaded`.
        cached: number of computed tokens in its first plan.
    """

    source: EngineCoreRequest
    script: Script
    reply: Reply
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    allowed_reasons: set[FinishReason] = field(default_factory=set)
    may_exceed_cache: bool = False
    end_reported: bool = False
    end_maybe_reported: bool = False
    client_notified: bool = False
    was_scheduled: bool = False
    loaded: bool = False
    cached: int | None = None
    num_cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    events: list[EngineCoreEvent] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """Return the request's id."""
        return self.source.request_id

    @property
    def num_begun(self) -> int:
        """Return how many tokens it came with."""
        return 0 if self.source.resumed is None else len(self.source.resumed.output_token_ids)

    @property
    def finished(self) -> bool:
        """Return whether its last output was delivered."""
        return self.finish_reason is not None

    def is_past_deadline(self, now: float) -> bool:
        """Return whether its deadline has passed."""
        timeout = self.source.timeout
        return timeout is not None and self.source.arrival_time + timeout <= now

    @property
    def may_have_finished(self) -> bool:
        """Return whether the scheduler may have finished it without delivering an output yet."""
        failed = self.script.compile is not None and self.script.compile.fails
        return failed or self.may_exceed_cache or FinishReason.TIMEOUT in self.allowed_reasons

    def record_output(self, output: EngineCoreOutput, client_index: int) -> None:
        """Check and record an output.

        Raises:
            Violation: the request must get something else.
        """
        name = repr(self.request_id)
        if client_index != self.source.client_index:
            raise OUTPUTS.violation(
                f"an output of {name}, sent by client {self.source.client_index}, goes to client "
                f"{client_index}"
            )
        if self.finished:
            raise FINISH.violation(
                f"{name} has finished, but gets another output: {short_repr(output)}"
            )
        self._record_tokens(output)
        self._record_logprobs(output)
        self._record_cached(output)
        self.events += output.events
        if output.finish_reason is not None:
            self._record_finish(output)
        elif len(self.tokens) == len(self.reply.tokens):
            raise TOKENS.violation(
                f"{name} got its last token, {self.tokens[-1]}, without the finish reason "
                f"{self.reply.finish_reason}"
            )
        elif not (output.new_token_ids or output.prompt_logprobs):
            raise OUTPUTS.violation(f"{name} gets an empty output: {short_repr(output)}")

    def _record_tokens(self, output: EngineCoreOutput) -> None:
        new, expected = list(output.new_token_ids), self.reply.tokens[len(self.tokens) :]
        if new != expected[: len(new)]:
            raise TOKENS.violation(
                f"{self.request_id!r} got the tokens {new} after {self.tokens}, alone it would "
                f"get {expected}"
            )
        self.tokens += new

    def _record_logprobs(self, output: EngineCoreOutput) -> None:
        logprobs = output.logprobs or []
        expected = output.new_token_ids if self.source.params.wants_logprobs else []
        if [entry.token_ids[0] for entry in logprobs] != list(expected):
            raise OUTPUTS.violation(
                f"{self.request_id!r} got the tokens {list(output.new_token_ids)} with log "
                f"probabilities of {[entry.token_ids[0] for entry in logprobs]}"
            )
        self.logprobs += logprobs
        self.prompt_logprobs += output.prompt_logprobs or []
        prompt = self.source.prompt_token_ids
        resumed = self.source.resumed
        had = 0 if resumed is None else resumed.num_prompt_logprobs
        known = [None, *prompt[1:]][:had]
        received = [*known, *(entry and entry.token_ids[0] for entry in self.prompt_logprobs)]
        if received != [None, *prompt[1:]][: len(received)] or len(received) > len(prompt):
            raise OUTPUTS.violation(
                f"{self.request_id!r} got prompt log probabilities of {received}, its prompt is "
                f"{prompt}",
                "deliver each prompt position once, also if it is computed again",
            )
        requested = self.source.params.prompt_logprobs is not None
        has_new = len(self.tokens) > self.num_begun
        if requested and has_new and len(received) < len(prompt):
            raise OUTPUTS.violation(
                f"{self.request_id!r} got its first token, but prompt log probabilities of only "
                f"{len(received)} of its {len(prompt)} prompt tokens"
            )

    def _record_cached(self, output: EngineCoreOutput) -> None:
        num_cached = output.num_cached_tokens
        if num_cached is not None and self.num_cached_tokens is not None:
            raise OUTPUTS.violation(f"{self.request_id!r} got num_cached_tokens twice")
        if num_cached is not None:
            self.num_cached_tokens = num_cached
            if (self.cached is not None and num_cached > self.cached) or num_cached < 0:
                raise OUTPUTS.violation(
                    f"{self.request_id!r} got num_cached_tokens {num_cached}, but {self.cached} "
                    "tokens were computed in its first plan"
                )
        if self.num_begun:
            if num_cached is not None:
                raise OUTPUTS.violation(
                    f"{self.request_id!r} came with outputs and got num_cached_tokens "
                    f"{num_cached}, which was sent with these"
                )
            return
        if self.tokens and self.num_cached_tokens is None:
            raise OUTPUTS.violation(f"{self.request_id!r} got tokens, but no num_cached_tokens")

    def _record_finish(self, output: EngineCoreOutput) -> None:
        reason, name = output.finish_reason, repr(self.request_id)
        tokens, expected = self.reply
        complete = len(self.tokens) == len(tokens)
        if reason not in self.allowed_reasons and not (complete and reason == expected):
            raise TOKENS.violation(
                f"{name} finished with {reason!s} after {len(self.tokens)} tokens; alone it "
                f"finishes with {expected!s} after {len(tokens)}"
                + (f" ({output.error})" if output.error else "")
            )
        stop = self.tokens[-1] if reason is FinishReason.STOP else None
        if stop is not None and stop in self.source.eos_token_ids:
            stop = None
        if output.stop_reason != stop:
            raise OUTPUTS.violation(
                f"{name} finished with {reason!s} and stop_reason {output.stop_reason}, expected "
                f"{stop}"
            )
        if (reason is FinishReason.ERROR) != bool(output.error):
            raise OUTPUTS.violation(f"{name} finished with {reason!s} and error {output.error!r}")
        self.finish_reason, self.error = reason, output.error

    def check_events(self, log_stats: bool) -> None:
        """Check that its events are queued, scheduled, then preempted and scheduled in turn."""
        if not log_stats:
            if self.events:
                raise OUTPUTS.violation(f"{self.request_id!r} has events, but log_stats is off")
            return
        types = [event.type for event in self.events]
        queued, scheduled = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED
        preempted = EngineCoreEventType.PREEMPTED
        valid = types[:1] == [queued] and queued not in types[1:]
        after_queued = types[1:]
        valid = valid and all(type_ is scheduled for type_ in after_queued[::2])
        valid = valid and all(type_ is preempted for type_ in after_queued[1::2])
        times = [event.timestamp for event in self.events]
        if not valid or times != sorted(times):
            raise OUTPUTS.violation(
                f"{self.request_id!r} has the events {[type_.name for type_ in types]} at {times}"
            )


def expected_reply(
    source: EngineCoreRequest, next_token: Callable[[Sequence[int]], int], max_model_len: int
) -> Reply:
    """Return the tokens that a request gets alone, and why it finishes."""
    params = source.params
    tokens = [] if source.resumed is None else list(source.resumed.output_token_ids)
    while True:
        tokens.append(next_token([*source.prompt_token_ids, *tokens]))
        if tokens[-1] in source.stop_token_ids and len(tokens) > params.min_tokens:
            return Reply(tokens, FinishReason.STOP)
        detection = params.repetition_detection if len(tokens) >= params.min_tokens else None
        if detection and _repeats(tokens, detection):
            return Reply(tokens, FinishReason.REPETITION)
        length = len(source.prompt_token_ids) + len(tokens)
        if len(tokens) == params.max_tokens or length >= max_model_len:
            return Reply(tokens, FinishReason.LENGTH)


def _repeats(tokens: list[int], detection: RepetitionDetection) -> bool:
    for length in range(detection.min_pattern, detection.max_pattern + 1):
        tail = tokens[-length * detection.min_count :]
        if len(tail) == length * detection.min_count and tail == tail[:length] * (
            detection.min_count
        ):
            return True
    return False


class RequestLedger:
    """Every request of a simulation, and the ends that plans have yet to report.

    Attributes:
        requests: the newest request of each id.
        unreported_finished: by id, finished requests with an end that no plan has reported.
    """

    def __init__(self, *, report_finished: bool) -> None:
        """Create an empty ledger; `report_finished`: outputs carry `finished_requests`."""
        self.requests: dict[str, ExpectedRequest] = {}
        self.unreported_finished: dict[str, list[ExpectedRequest]] = {}
        self._report_finished = report_finished

    @property
    def unfinished(self) -> dict[str, ExpectedRequest]:
        """Return the unfinished requests by id."""
        return {name: request for name, request in self.requests.items() if not request.finished}

    def expire(self, now: float) -> dict[str, ExpectedRequest]:
        """Allow requests past their deadline to time out; return the other unfinished ones."""
        unexpired = {}
        for name, request in self.unfinished.items():
            if request.is_past_deadline(now):
                request.allowed_reasons.add(FinishReason.TIMEOUT)
            else:
                unexpired[name] = request
        return unexpired

    def record_outputs(self, by_client: Mapping[int, EngineCoreOutputs]) -> None:
        """Check and record the outputs for all clients."""
        for client, outputs in by_client.items():
            for output in outputs.outputs:
                request = self.requests.get(output.request_id)
                if request is None:
                    raise FINISH.violation(f"an output names the unknown id {output.request_id!r}")
                request.record_output(output, client)
                if request.finished and not (request.end_reported or request.end_maybe_reported):
                    self.unreported_finished.setdefault(request.request_id, []).append(request)
            self._record_finished_requests(client, outputs)

    def record_plan(self, plan: SchedulerOutput) -> None:
        """Check and record the ends that a plan reports to the workers."""
        reported = set(plan.finished_request_ids)
        if missing := set(self.unreported_finished) - reported:
            raise FINISH.violation(
                f"{sorted(missing)} finished before step {plan.step}, which does not report it"
            )
        for request_id in reported - set(self.unreported_finished):
            request = self.requests.get(request_id)
            if (
                request is None
                or request.end_reported
                or not (request.finished or request.may_have_finished)
            ):
                repeated = request is not None and request.end_reported
                raise FINISH.violation(
                    f"step {plan.step} reports the end of {request_id!r}, which "
                    + ("was reported before" if repeated else "has not finished")
                )
            request.end_reported = True
        for request_id, finished in self.unreported_finished.items():
            for request in finished:
                request.end_reported = True
            newest = self.requests[request_id]
            newest.end_maybe_reported = not newest.finished and newest.may_have_finished
        self.unreported_finished.clear()

    def record_lost_plan(self, plan: SchedulerOutput) -> None:
        """Expect the next plan to report the ends of a lost plan again."""
        for request_id in plan.finished_request_ids:
            self.unreported_finished.setdefault(request_id, [])

    def _record_finished_requests(self, client: int, outputs: EngineCoreOutputs) -> None:
        reported = outputs.finished_requests
        if reported is None:
            return
        if not self._report_finished:
            raise FINISH.violation(f"finished_requests is {reported}, but report_finished is off")
        for request_id in reported:
            request = self.requests.get(request_id)
            if request is None or request.source.client_index != client or request.client_notified:
                raise FINISH.violation(
                    f"finished_requests of client {client} has {request_id!r}, which is not the "
                    "client's, or was reported before"
                )
            request.client_notified = True
