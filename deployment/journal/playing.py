"""Replay of a journal: an engine core gets the recorded inputs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hardpoint.core.engine.core import EngineCore, EngineInputs, RecordStep
from hardpoint.core.engine.step import EngineCoreParts
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.host.boundary.errors import error_of
from hardpoint.host.boundary.parts.gates import PartTransfers
from hardpoint.plugins import (
    HardpointError,
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
    StepRecord,
    WaitingFor,
    WaitReason,
)
from hardpoint.plugins.scheduling.scheduler import BlockTransfers, Gates

from .differences import Difference, plan_difference, token_difference, why_of
from .fingerprint import model_fingerprint
from .recording import build_of, taped_parts
from .records import (
    NOWHERE,
    Build,
    Event,
    Failure,
    Gate,
    PartReplies,
    PlanRecord,
    Position,
    Result,
    plan_record,
    result_record,
)
from .tape import TapedGates, TapedTransfers

_PATIENCE_S = 60.0
"""For what was ready when it was recorded, such as a grammar, to become ready here."""
_POLL_S = 0.002
NOT_CONSIDERED = "it is not considered"
_MOVING_S = 0.02
"""For workers to do here what they reported to have done when it was recorded."""


class Player:
    """The tape that returns the recorded values, and compares them with the present ones.

    Attributes:
        difference: the first one.
        reasons: why requests waited in the last step that was planned here.
        moves_blocks: whether a step part loads and saves blocks between steps.
        has_workers: whether results come from workers, and are compared.
        is_exact: whether all is as it was recorded; if not, only the clock is, and nothing is
            compared.
    """

    def __init__(
        self, now: float = 0.0, last_answer: Callable[[PartReplies], Position] | None = None
    ) -> None:
        """Play nothing yet.

        Args:
            now: the time on the engine's clock before the first event.
            last_answer: returns where an answer of worker halves is in the journal for the last
                time.
        """
        self.difference: Difference | None = None
        self.reasons: StepRecord | None = None
        self.has_workers = self.is_exact = True
        self._event = Event("step")
        self._next: dict[str, int] = {}
        self._now = now
        self._last_answer = last_answer or (lambda _answer: NOWHERE)
        self._number = 0
        self.moves_blocks = False

    def begin(self, number: int, event: Event) -> None:
        """Play an event from now on."""
        self._number, self._event, self._next = number, event, {}

    def end(self) -> None:
        """Compare the values taken from an event with all that it has."""
        if not self.is_exact:
            return
        if (plan := self._pop("plans")) is not None:
            self.differ(Difference(self._number, plan.step, "plan", recorded=_as_text(plan)))
        if (result := self._pop("results")) is not None:
            self.differ(Difference(self._number, result.step, "result", recorded="a result"))
        if (failure := self._pop("raised")) is not None:
            shown = f"{failure.kind}: {failure.text}"
            self.differ(Difference(self._number, None, "failure", recorded=shown))

    def differ(self, difference: Difference) -> None:
        """Note a difference, if it is the first one."""
        if self.difference is None:
            self.difference = difference

    def _pop(self, channel: str) -> Any:
        if not self.is_exact and channel != "clock":
            return None
        index, items = self._next.get(channel, 0), getattr(self._event, channel)
        if index >= len(items):
            return None
        self._next[channel] = index + 1
        return items[index]

    def why(self, request_id: str | None) -> str:
        """Return why a request runs, or does not, in the last step that was planned here."""
        return why_of(self.reasons, request_id) or NOT_CONSIDERED

    def clock(self, read: Callable[[], float]) -> float:  # noqa: ARG002
        """Return the next reading; after the last one, that again."""
        reading = self._pop("clock")
        if reading is not None:
            self._now = reading
        return self._now

    def time(self, read: Callable[[], float]) -> float:
        """Return the next reading of the clock that measures steps."""
        reading: float | None = self._pop("times")
        return read() if reading is None else reading

    def gate(self, request_id: str, read: Callable[[], WaitReason | None]) -> WaitReason | None:
        """Return the noted answer of the gates of a request, once they would give it here."""
        noted: Gate | None = self._pop("gates")
        if noted is None:
            return read()
        if noted.failure is not None or noted.waiting_for:
            with contextlib.suppress(HardpointError):  # it may be found later, or earlier, here
                read()  # what it waits for begins, and the part takes the noted answers
        if noted.failure is not None:
            raise error_of(noted.failure.kind, noted.failure.text)
        if noted.waiting_for:
            waiting = WaitingFor(noted.waiting_for)
            return WaitReason(waiting, noted.message, noted.needed, noted.available, noted.ahead)
        try:
            may_run = self.wait(lambda: read() is None)
        except HardpointError as error:
            self._differs_for(request_id, "gate", "it may run", f"{type(error).__name__}: {error}")
            raise
        if not may_run:
            replayed = f"after {_PATIENCE_S:g} s it waits"
            self._differs_for(request_id, "gate", "it may run", replayed)
        return None

    def matched(
        self, request_id: str, read: Callable[[], tuple[int | None, bool]]
    ) -> tuple[int | None, bool]:
        """Return how many tokens a step part could load; it has to find as many here."""
        noted: tuple[int | None, bool] | None = self._pop("matched")
        replayed = read()  # also where it was not known yet: the part begins to look
        if noted is None:
            return replayed

        def is_known() -> bool:
            nonlocal replayed
            replayed = read()
            return replayed[0] is not None

        if noted[0] is not None and replayed[0] is None:
            self.wait(is_known)
        if noted[0] is not None and replayed[0] != noted[0]:
            self._differs_for(request_id, "loadable tokens", str(noted[0]), str(replayed[0]))
        return noted

    def done(self, read: Callable[[], bool]) -> bool:
        """Return whether a result was there."""
        is_done: bool | None = self._pop("done")
        return read() if is_done is None else is_done

    def answers(self, part: str, message: bytes, read: Callable[[], list[Any]]) -> list[Any]:  # noqa: ARG002
        """Return the noted answers of worker halves, once they give them here, or later ones."""
        noted: PartReplies | None = self._pop("answers")
        if noted is None:
            return read()
        if not self.has_workers:
            return list(noted.answers)
        here = self._number, self._next["answers"] - 1
        replayed: list[PartReplies] = []

        def is_so_far() -> bool:
            replayed[:] = [PartReplies.of(part, read(), noted.message)]
            return replayed[0] == noted or self._last_answer(replayed[0]) > here

        if not self.wait(is_so_far, _PATIENCE_S):
            subject = f"answer of workers to the part {part!r}"
            shown = [str(answer.answers)[:200] for answer in (noted, *replayed)]
            self.differ(Difference(self._number, None, subject, None, *shown))
        return list(noted.answers)

    def plan(self, plan: SchedulerOutput) -> None:
        """Compare a plan with the recorded one."""
        if not self.is_exact:
            return
        noted: PlanRecord | None = self._pop("plans")
        replayed = plan_record(plan)
        difference = plan_difference(self._number, noted, replayed, self.reasons)
        if difference is not None:
            self.differ(difference)

    def result(
        self, plan: SchedulerOutput, read: Callable[[], ModelRunnerOutput | None]
    ) -> ModelRunnerOutput | None:
        """Return the result of a plan, with all that came from outside as it was noted."""
        try:
            replayed = read()
        except BaseException as error:
            self._raised(plan, error)
            raise
        if not isinstance(replayed, ModelRunnerOutput) or not self.is_exact:
            return replayed
        noted: Result | None = self._pop("results")
        if noted is None:
            self._differs_from_failure(plan, self._pop("raised"), "a result")
            return replayed
        mine = result_record(plan.step, replayed)
        if self.moves_blocks and noted.part_reports and noted.part_reports != mine.part_reports:
            time.sleep(_MOVING_S)
        difference = token_difference(self._number, noted, mine)
        if difference is not None and self.has_workers:
            self.differ(difference)
        return with_noted(replayed, noted)

    def _raised(self, plan: SchedulerOutput, error: BaseException) -> None:
        """Compare an error that is raised instead of a result with the recorded one."""
        failure: Failure | None = self._pop("raised")
        if failure is not None and type(error).__name__ != failure.kind:
            self._differs_from_failure(plan, failure, str(error))

    def _differs_from_failure(
        self, plan: SchedulerOutput, failure: Failure | None, replayed: str
    ) -> None:
        subject, recorded = "result", "nothing"
        if failure is not None:
            subject, recorded = "failure", f"{failure.kind}: {failure.text}"
        self.differ(Difference(self._number, plan.step, subject, recorded=recorded, own=replayed))

    def _differs_for(self, request_id: str, subject: str, recorded: str, replayed: str) -> None:
        self.differ(Difference(self._number, None, subject, request_id, recorded, replayed))

    def wait(self, is_so: Callable[[], bool], seconds: float = _PATIENCE_S) -> bool:
        """Wait until something is so; return whether it is."""
        until = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True


def with_noted(result: ModelRunnerOutput, noted: Result) -> ModelRunnerOutput:
    """Return a result with all that came from outside as it was noted."""
    assert isinstance(noted.tokens, dict)
    result.sampled_token_ids = {name: list(tokens) for name, tokens in noted.tokens.items()}
    result.part_reports = {part: dict(reports) for part, reports in noted.part_reports.items()}
    result.part_faults = dict(noted.part_faults)
    result.faults = {name: RequestFault(*fault) for name, fault in noted.faults.items()}
    result.invalid_block_ids = frozenset(noted.invalid_block_ids)
    result.is_cache_uncertain = noted.is_cache_uncertain
    result.finishes = dict(noted.finishes)
    return result


def _as_text(value: Any) -> str:
    return str(msgspec.to_builtins(value))[:400]


class PlayedInputs(EngineInputs):
    """Plays a journal back to an engine core.

    Attributes:
        player: the tape.
        build: what computes here.
        model: fingerprint of the model's files here.
        built: the core, once there is one.
    """

    def __init__(
        self, player: Player, check: Callable[[PlayedInputs], None], spec: WorkerSpec
    ) -> None:
        """`check`: raises an error if the journal cannot be played here."""
        super().__init__(spec)
        self.player = player
        self.build: Build = build_of(spec)
        self.model = model_fingerprint(spec.loader.context.files)
        self.built: EngineCore | None = None
        check(self)

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Return the clock that was recorded."""
        return functools.partial(self.player.clock, clock)

    def gates(self, gates: Gates) -> Gates:
        """Return the gates with the recorded answers."""
        return TapedGates(gates, self.player)

    def transfers(self, transfers: PartTransfers | None) -> BlockTransfers | None:
        """Return the transfers with the recorded answers."""
        self.player.moves_blocks = transfers is not None
        return None if transfers is None else TapedTransfers(transfers, self.player)

    def recorder(self, record: RecordStep | None) -> RecordStep:  # noqa: ARG002
        """Return a receiver that keeps the latest record."""

        def keep(record: StepRecord) -> None:
            self.player.reasons = record

        return keep

    def core(self, parts: EngineCoreParts) -> EngineCore:
        """Return the core."""
        self.built = EngineCore(taped_parts(parts, self.player))
        return self.built


def taken(ids: Sequence[str]) -> Callable[[], Sequence[str]]:
    """Return a function that returns the late aborts of a step, once."""
    left = [list(ids)]
    return lambda: left.pop() if left else []
