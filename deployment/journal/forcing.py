"""Replays a journal elsewhere: its tokens are forced, and an engine's own compared with them.

Another build, or one that begins at a keyframe, schedules otherwise, so that plans are not
compared: requests, aborts and control calls come before the same steps, and each token of a request
is compared with that of its position in the journal. After one that is another, the request goes on
with the journal's tokens, as after request migration (docs/replicas.md).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import msgspec

from hardpoint.core.engine.core import EngineCore
from hardpoint.core.engine.step import Outputs
from hardpoint.plugins import EngineCoreRequest, HardpointError
from hardpoint.plugins.requests.resumed import ResumedOutputs

from .differences import Difference
from .playing import Player
from .records import Event, Keyframe, num_computed
from .run import SKIPPED, Journal, ReplayReport, Run, failure_of, request_of

_MOST_STEPS = 100_000
"""After the journal's last event, for requests that are not done yet."""


def recorded_tokens(journal: Journal) -> dict[str, dict[int, int]]:
    """Return the outputs of all requests, by their position.

    A token that was sampled again after a preemption counts as sampled last.
    """
    outputs = _Outputs()
    for record in journal.records():
        if isinstance(record, Keyframe):
            outputs.live_at(record)
        elif isinstance(record, Event):
            outputs.after(record)
    return outputs.outputs


class _Outputs:
    """The outputs of requests, by id and position, as events have them."""

    def __init__(self) -> None:
        self.outputs: dict[str, dict[int, int]] = {}
        self._prompts: dict[str, int] = {}
        self._ends: dict[int, dict[str, int]] = {}  # of what each plan under way computes

    def live_at(self, keyframe: Keyframe) -> None:
        for live in keyframe.live:
            request = request_of(live.arrival)
            self._prompts.setdefault(request.request_id, len(request.prompt_token_ids))
            outputs = self.outputs.setdefault(request.request_id, {})
            outputs.update(enumerate(live.output_token_ids))

    def after(self, event: Event) -> None:
        for arrival in event.arrivals if event.failure is None else ():
            request = request_of(arrival)
            token_ids = () if request.resumed is None else request.resumed.output_token_ids
            self._prompts[arrival.request_id] = len(request.prompt_token_ids)
            self.outputs[arrival.request_id] = dict(enumerate(token_ids))
        for plan in event.plans:
            computed = num_computed(plan)
            self._ends[plan.step] = {
                name: computed.get(name, 0) + count - len(plan.drafts.get(name, ()))
                for name, count in (plan.scheduled or {}).items()
            }
        for result in event.results:
            assert isinstance(result.tokens, dict), "the reader expands it"
            ends = self._ends.pop(result.step, {})
            for name, tokens in result.tokens.items():
                if name in ends and name in self._prompts:
                    first = ends[name] - self._prompts[name]
                    self.outputs[name].update(enumerate(tokens, first))


class ForcedRun:
    """Calls an engine core by the events of a journal, and compares the tokens of requests.

    Attributes:
        report: what was found.
    """

    def __init__(self, core: EngineCore, player: Player, journal: Journal) -> None:
        """Call `core`, which has the tape `player`."""
        self._core, self._player = core, player
        self._recorded = recorded_tokens(journal)
        self.report = ReplayReport()
        self._run = Run(core, player, self.report)
        self._requests: dict[str, EngineCoreRequest] = {}
        self._counts: dict[str, int] = {}  # outputs of live requests here
        self._differing: set[str] = set()
        self._number = 0

    def run(self, journal: Journal, until: int | None) -> ReplayReport:
        """Play all events; then let the requests finish that the journal has more tokens of.

        It ends with the first step that raises, or before a step after `until`.
        """
        if (rest := self._play_all(journal, until)) is not None:
            self._finish(rest)
        self.report.difference = self._player.difference
        self.report.num_differing = len(self._differing)
        return self.report

    def _play_all(self, journal: Journal, until: int | None) -> Event | None:
        """Play the events; return the step with which the requests finish.

        Returns:
            The step, with the recorded error if it did not occur here; None if the replay has
            ended.
        """
        for number, record in enumerate(journal.records()):
            self._number = number
            if isinstance(record, Keyframe):
                if number == 0:
                    self._begin_at(record)
                continue
            assert isinstance(record, Event)
            if self._run.ends_before(number, record, until) or self._play(record):
                return None
            if record.call == "step" and record.failure is not None:
                return Event("step", failure=record.failure)
        return Event("step")

    def _finish(self, step: Event) -> None:
        """Let requests finish; an error of the journal may come some steps later than it did.

        From a keyframe on, requests compute again what they had computed before it.
        """
        for _ in range(_MOST_STEPS):
            if not self._counts or not self._core.has_requests():
                break
            self._player.begin(self._number, step)
            if self._step(step):
                return
        self._run.compare_failures(self._number, step, None)

    def _begin_at(self, keyframe: Keyframe) -> None:
        for change in keyframe.changes:
            self._run.call(change)
        for live in keyframe.live:
            request = request_of(live.arrival)
            if request.timeout is not None:
                request.timeout = max(request.timeout - live.age, 0.001)
            self._add(request, live.output_token_ids)

    def _add(self, request: EngineCoreRequest, token_ids: list[int]) -> None:
        name = request.request_id
        resumed = ResumedOutputs(output_token_ids=token_ids) if token_ids else request.resumed
        try:
            self._core.add_request(msgspec.structs.replace(request, resumed=resumed))
        except HardpointError as cause:
            self.report.notes.append(f"request {name!r} cannot go on here: {cause}")
            self._counts.pop(name, None)
            return
        self._requests[name] = request
        self._counts[name] = len(resumed.output_token_ids) if resumed is not None else 0

    def _play(self, event: Event) -> bool:
        self._player.begin(self._number, event)
        if event.call == "step":
            if event.late_aborts:
                self._core.abort_requests(event.late_aborts)
            self.report.steps += len(event.plans)
            return self._step(event)
        if event.arrivals:
            if event.failure is None:
                self.report.requests += len(event.arrivals)
                for arrival in event.arrivals:
                    self._add(request_of(arrival), [])
        elif event.call in ("abort", "call") and event.method not in SKIPPED:
            error = failure_of(functools.partial(self._run.call, event))
            if error is not None and event.failure is None:
                self.report.notes.append(f"{event.method or event.call}: {error}")
            for name in event.request_ids or ():
                self._counts.pop(name, None)
        return False

    def _step(self, event: Event) -> bool:
        outputs: list[Outputs] = []
        failure = failure_of(lambda: outputs.append(self._core.step()[0]))
        if failure is None:
            for name, tokens in self._compared(outputs[0]):
                self._force(name, tokens)
            return False
        self._run.compare_failures(self._number, event, failure)
        if self._player.difference is None:
            self.report.notes.append(f"event {self._number} raised {type(failure).__name__} again")
        return True

    def _compared(self, outputs: Outputs) -> Iterator[tuple[str, list[int]]]:
        """Compare new tokens; yield requests with another one, and the tokens to go on with."""
        for message in outputs.values():
            for output in message.outputs:
                name = output.request_id
                if name not in self._counts:
                    continue
                recorded, first = self._recorded.get(name, {}), self._counts[name]
                self._counts[name] += len(output.new_token_ids)
                for index, token in enumerate(output.new_token_ids, first):
                    if index not in recorded:
                        continue
                    self.report.tokens += 1
                    if recorded[index] != token:
                        self._differs(name, index, recorded[index], token)
                        yield name, [recorded[place] for place in range(index + 1)]
                        break
                if output.finished and output.finish_reason is not None:
                    self._counts.pop(name, None)

    def _differs(self, name: str, index: int, recorded: int, replayed: int) -> None:
        self._differing.add(name)
        subject = f"output {index}"
        self._player.differ(
            Difference(self._number, None, subject, name, str(recorded), str(replayed))
        )

    def _force(self, name: str, tokens: list[int]) -> None:
        self._core.abort_requests([name])
        self._counts.pop(name, None)
        if len(tokens) < len(self._recorded[name]):
            request = self._requests[name]
            before = request.resumed.output_token_ids if request.resumed is not None else []
            self._add(request, tokens if len(tokens) > len(before) else list(before))
