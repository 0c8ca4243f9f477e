"""A request's life as the rig sees it: what it must get, and what it got."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
from hardpoint.testing.scheduling.checks.names import FINISHED, OUTPUTS, TOKENS
from hardpoint.testing.suite import short

from .connector import NO_TRANSFER, Compile, Transfer


@dataclass(frozen=True)
class Script:
    """What happens around a request.

    Attributes:
        transfer: what the KV connector has of it.
        compile: its grammar; None is none.
        fails_after: so many output tokens after which the worker reports a fault; None is never.
        drafts: "right" proposes what follows, "wrong" something else, "mixed" both; "" nothing.
    """

    transfer: Transfer = NO_TRANSFER
    compile: Compile | None = None
    fails_after: int | None = None
    drafts: str = "right"


@dataclass
class Life:
    """One request from its arrival to its end.

    Attributes:
        expected: the tokens that it gets alone, and why it ends.
        tokens: those that were delivered.
        excuses: ends other than the expected one that are right by now.
        may_outgrow: whether the whole cache may have no room for what it becomes.
        told: whether a plan told the worker of its end.
        perhaps_told: whether a plan may have told of its end together with an earlier one's of
            the same id.
        reported: whether `finished_requests` told its client of it.
        ran: whether a plan had it.
        loaded: whether the scheduler was told that a connector has loaded what it had.
        cached: tokens that its first plan said are computed.
    """

    source: EngineCoreRequest
    script: Script
    expected: tuple[list[int], FinishReason]
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    excuses: set[FinishReason] = field(default_factory=set)
    may_outgrow: bool = False
    told: bool = False
    perhaps_told: bool = False
    reported: bool = False
    ran: bool = False
    loaded: bool = False
    cached: int | None = None
    num_cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    events: list[EngineCoreEvent] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """Whose life it is."""
        return self.source.request_id

    @property
    def ended(self) -> bool:
        """Whether its last output was delivered."""
        return self.finish_reason is not None

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        timeout = self.source.timeout
        return timeout is not None and self.source.arrival_time + timeout <= now

    @property
    def may_have_ended(self) -> bool:
        """Whether it may have ended already although its last output did not come."""
        failed = self.script.compile is not None and self.script.compile.fails
        return failed or self.may_outgrow or FinishReason.TIMEOUT in self.excuses

    def take(self, output: EngineCoreOutput, client_index: int) -> None:
        """Take an output, and check that it is right."""
        who = repr(self.request_id)
        if client_index != self.source.client_index:
            raise OUTPUTS.broken(
                f"an output of {who}, which client {self.source.client_index} sent, goes to client "
                f"{client_index}"
            )
        if self.ended:
            raise FINISHED.broken(f"{who} has ended, and gets another output: {short(output)}")
        self._take_tokens(output)
        self._take_logprobs(output)
        self._take_cached(output)
        self.events += output.events
        if output.finish_reason is not None:
            self._end(output)
        elif len(self.tokens) == len(self.expected[0]):
            raise TOKENS.broken(
                f"{who} got its last token, {self.tokens[-1]}, and should have ended by "
                f"{self.expected[1]}"
            )
        elif not (output.new_token_ids or output.prompt_logprobs):
            raise OUTPUTS.broken(f"{who} gets an output that says nothing: {short(output)}")

    def _take_tokens(self, output: EngineCoreOutput) -> None:
        new, wanted = list(output.new_token_ids), self.expected[0][len(self.tokens) :]
        if new != wanted[: len(new)]:
            raise TOKENS.broken(
                f"{self.request_id!r} got the tokens {new} after {self.tokens}, alone it would "
                f"get {wanted}"
            )
        self.tokens += new

    def _take_logprobs(self, output: EngineCoreOutput) -> None:
        given = output.logprobs or []
        wanted = output.new_token_ids if self.source.params.logprobs is not None else []
        if [entry.token_ids[0] for entry in given] != list(wanted):
            raise OUTPUTS.broken(
                f"{self.request_id!r} got {list(output.new_token_ids)} with the log-probabilities "
                f"of {[entry.token_ids[0] for entry in given]}"
            )
        self.logprobs += given
        self.prompt_logprobs += output.prompt_logprobs or []
        prompt = self.source.prompt_token_ids
        shown = [entry and entry.token_ids[0] for entry in self.prompt_logprobs]
        if shown != [None, *prompt[1:]][: len(shown)] or len(shown) > len(prompt):
            raise OUTPUTS.broken(
                f"{self.request_id!r} got prompt log-probabilities of {shown}, its prompt is "
                f"{prompt}",
                "deliver each prompt position once, also if it is computed again",
            )
        asked = self.source.params.prompt_logprobs is not None
        if asked and self.tokens and len(shown) < len(prompt):
            raise OUTPUTS.broken(
                f"{self.request_id!r} got its first token, but prompt log-probabilities of "
                f"{len(shown)} of its {len(prompt)} prompt tokens only"
            )

    def _take_cached(self, output: EngineCoreOutput) -> None:
        given = output.num_cached_tokens
        if given is not None and self.num_cached_tokens is not None:
            raise OUTPUTS.broken(f"{self.request_id!r} was told num_cached_tokens twice")
        if given is not None:
            self.num_cached_tokens = given
            if (self.cached is not None and given > self.cached) or given < 0:
                raise OUTPUTS.broken(
                    f"{self.request_id!r} was told of {given} cached tokens, when it first ran "
                    f"{self.cached} were computed"
                )
        if self.tokens and self.num_cached_tokens is None:
            raise OUTPUTS.broken(
                f"{self.request_id!r} got tokens, but was never told num_cached_tokens"
            )

    def _end(self, output: EngineCoreOutput) -> None:
        reason, who = output.finish_reason, repr(self.request_id)
        tokens, right = self.expected
        done = len(self.tokens) == len(tokens)
        if reason not in self.excuses and not (done and reason == right):
            raise TOKENS.broken(
                f"{who} ended by {reason!s} after {len(self.tokens)} tokens; alone it ends by "
                f"{right!s} after {len(tokens)}" + (f" ({output.error})" if output.error else "")
            )
        stop = self.tokens[-1] if reason is FinishReason.STOP else None
        if stop is not None and stop in self.source.eos_token_ids:
            stop = None
        if output.stop_reason != stop:
            raise OUTPUTS.broken(
                f"{who} ended by {reason!s} with stop_reason {output.stop_reason}, expected {stop}"
            )
        if (reason is FinishReason.ERROR) != bool(output.error):
            raise OUTPUTS.broken(f"{who} ended by {reason!s} with error {output.error!r}")
        self.finish_reason, self.error = reason, output.error

    def check_events(self, wanted: bool) -> None:
        """Its events tell a life: queued, then scheduled, then perhaps preempted and so on."""
        if not wanted:
            if self.events:
                raise OUTPUTS.broken(f"{self.request_id!r} has events, but log_stats is off")
            return
        kinds = [event.type for event in self.events]
        queued, scheduled = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED
        preempted = EngineCoreEventType.PREEMPTED
        right = kinds[:1] == [queued] and queued not in kinds[1:]
        turns = kinds[1:]
        right = right and all(k is scheduled for k in turns[::2])
        right = right and all(k is preempted for k in turns[1::2])
        times = [event.timestamp for event in self.events]
        if not right or times != sorted(times):
            raise OUTPUTS.broken(
                f"{self.request_id!r} tells of the events {[k.name for k in kinds]} at {times}"
            )


def expected_reply(
    source: EngineCoreRequest, next_token: Callable[[Sequence[int]], int], max_model_len: int
) -> tuple[list[int], FinishReason]:
    """Return the tokens that a request gets alone, and why it ends."""
    params = source.params
    tokens: list[int] = []
    while True:
        tokens.append(next_token([*source.prompt_token_ids, *tokens]))
        if tokens[-1] in source.stop_token_ids:
            return tokens, FinishReason.STOP
        if params.repetition_detection and _repeats(tokens, params.repetition_detection):
            return tokens, FinishReason.REPETITION
        length = len(source.prompt_token_ids) + len(tokens)
        if len(tokens) == params.max_tokens or length >= max_model_len:
            return tokens, FinishReason.LENGTH


def _repeats(tokens: list[int], detection: RepetitionDetection) -> bool:
    """Whether the newest tokens are copies of one pattern."""
    for length in range(detection.min_pattern, detection.max_pattern + 1):
        tail = tokens[-length * detection.min_count :]
        if len(tail) == length * detection.min_count and tail == tail[:length] * (
            detection.min_count
        ):
            return True
    return False


class Roll:
    """Every request that came, and what is still to be told of those that ended.

    Attributes:
        lives: the newest request of each id.
        untold: by id, requests that ended and of which no plan has told.
    """

    def __init__(self, *, report_finished: bool) -> None:
        """Begin with nobody; `report_finished` is whether clients are told who ended."""
        self.lives: dict[str, Life] = {}
        self.untold: dict[str, list[Life]] = {}
        self._report_finished = report_finished

    @property
    def live(self) -> dict[str, Life]:
        """Return the requests that did not end."""
        return {name: life for name, life in self.lives.items() if not life.ended}

    def expire(self, now: float) -> dict[str, Life]:
        """Excuse those whose deadline has passed; return the others that live."""
        live = {}
        for name, life in self.live.items():
            if life.is_late(now):
                life.excuses.add(FinishReason.TIMEOUT)
            else:
                live[name] = life
        return live

    def take(self, by_client: Mapping[int, EngineCoreOutputs]) -> None:
        """Take what a scheduler has for the clients."""
        for client, outputs in by_client.items():
            for output in outputs.outputs:
                life = self.lives.get(output.request_id)
                if life is None:
                    raise FINISHED.broken(f"there is an output of {output.request_id!r}, unknown")
                life.take(output, client)
                if life.ended and not (life.told or life.perhaps_told):
                    self.untold.setdefault(life.request_id, []).append(life)
            self._take_finished(client, outputs)

    def take_plan(self, plan: SchedulerOutput) -> None:
        """Take what a plan tells the workers of the ends."""
        told = set(plan.finished_request_ids)
        if missing := set(self.untold) - told:
            raise FINISHED.broken(
                f"{sorted(missing)} ended before step {plan.step}, which does not tell of it"
            )
        for request_id in told - set(self.untold):
            life = self.lives.get(request_id)
            if life is None or life.told or not (life.ended or life.may_have_ended):
                state = "was told before" if life is not None and life.told else "has not ended"
                raise FINISHED.broken(
                    f"step {plan.step} tells that {request_id!r} ended: it {state}"
                )
            life.told = True
        for request_id, lives in self.untold.items():
            for life in lives:
                life.told = True
            newest = self.lives[request_id]
            newest.perhaps_told = not newest.ended and newest.may_have_ended
        self.untold.clear()

    def lose_plan(self, plan: SchedulerOutput) -> None:
        """Take it that a plan told nobody: the next one tells again."""
        for request_id in plan.finished_request_ids:
            self.untold.setdefault(request_id, [])

    def _take_finished(self, client: int, outputs: EngineCoreOutputs) -> None:
        told = outputs.finished_requests
        if told is None:
            return
        if not self._report_finished:
            raise FINISHED.broken(f"finished_requests is {told}, but report_finished is off")
        for request_id in told:
            life = self.lives.get(request_id)
            if life is None or life.source.client_index != client or life.reported:
                raise FINISHED.broken(
                    f"client {client} is told that {request_id!r} ended, which is not its own, or "
                    "for the second time"
                )
            life.reported = True
