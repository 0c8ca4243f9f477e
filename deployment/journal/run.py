"""Runs the engine of a journal again, event by event."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hardpoint import typed
from hardpoint.core.build import build_engine
from hardpoint.core.engine.core import EngineCore
from hardpoint.core.engine.utility_calls import run_utility
from hardpoint.host.system.encoding import Decoder, WireError
from hardpoint.plugins import EngineConfig, EngineCoreRequest, HardpointError
from hardpoint.plugins.config import ConfigSources
from hardpoint.process.worker_process import LaunchedWorker

from .differences import Difference
from .frames import JournalError, JournalReader
from .playing import PlayedInputs, Player, taken
from .records import (
    NOWHERE,
    Arrival,
    End,
    Event,
    JournalHeader,
    Keyframe,
    PartReplies,
    Position,
    Record,
    Result,
    is_poll,
)

T = TypeVar("T")

SKIPPED = frozenset({"cached_blocks", "start_profile", "stop_profile"})
"""Control calls that leave the engine's state alone: they write files, or report what is cached, as
in journals of earlier versions.
"""
_INTERRUPTS = frozenset({"KeyboardInterrupt", "SystemExit", "GeneratorExit"})
"""Errors that come from outside of the engine, in the middle of a step."""
_REPORTING = frozenset({"kv_event_publishers", "stat_sinks"})
"""Kinds whose components a replay does without."""
_PATIENCE_S = 600.0
"""For what was done outside of the loop when it was recorded, such as weights that were read."""


@dataclass
class ReplayReport:
    """The findings of a replay.

    Attributes:
        steps: plans that were executed as they were recorded.
        tokens: sampled tokens that were compared.
        requests: requests that arrived.
        difference: the first one; None if there is none.
        num_differing: requests with a difference, where tokens were forced.
        notes: what a reader of the result should know.
    """

    steps: int = 0
    tokens: int = 0
    requests: int = 0
    difference: Difference | None = None
    num_differing: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether all was as it was recorded."""
        return self.difference is None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, the difference as text."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "requests": self.requests,
            "difference": None if self.difference is None else str(self.difference),
            "num_differing": self.num_differing,
            "notes": self.notes,
        }


class _CacheConfig(msgspec.Struct):
    block_size: Annotated[int, Meta(ge=1)]


class _Config(msgspec.Struct):
    """Fields of a configuration that are read alone; another Hardpoint may have others."""

    kv_cache: _CacheConfig


class Journal:
    """A journal that is read from its file.

    Attributes:
        path: the file.
        header: its first record.
    """

    def __init__(self, path: Path | str, *, until_damage: bool = False) -> None:
        """Read the header.

        Args:
            path: path of the file.
            until_damage: whether damage ends the journal, instead of being an error.

        Raises:
            JournalError: it cannot be read; names the offset.
        """
        self.path, self._until_damage = Path(path), until_damage
        first = next(JournalReader(path).records())
        assert isinstance(first, JournalHeader), "the reader checks it"
        self.header = first
        self.end: End | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block of its engine's KV cache.

        Raises:
            JournalError: its configuration has none.
        """
        where = f"journal {str(self.path)!r}: config"
        config = typed.convert(self.header.config, _Config, path=where, error=JournalError)
        return config.kv_cache.block_size

    def records(self) -> Iterator[Record]:
        """Yield the records after the header, up to the end.

        Raises:
            JournalError: it is damaged; names the offset.
        """
        records = JournalReader(self.path, until_damage=self._until_damage).records()
        next(records)
        for record in records:
            if isinstance(record, End):
                self.end = record
            else:
                yield record

    def last_answer(self, answer: PartReplies) -> Position:
        """Return where an answer of worker halves is for the last time; `NOWHERE` if it is not.

        Raises:
            JournalError: it is damaged; names the offset.
        """
        return self._last_answers.get(answer, NOWHERE)

    @functools.cached_property
    def _last_answers(self) -> dict[PartReplies, Position]:
        return {
            answer: (number, index)
            for number, record in enumerate(self.records())
            if isinstance(record, Event)
            for index, answer in enumerate(record.answers)
        }

    def events(self) -> Iterator[tuple[float, float, Event]]:
        """Yield the events, each after the readings of the clock before it and at its end.

        Raises:
            JournalError: as for `records`.
        """
        now = self.header.clock
        for record in self.records():
            if isinstance(record, Event):
                before, now = now, record.clock[-1] if record.clock else now
                yield before, now, record


def replay_config(header: JournalHeader) -> EngineConfig:
    """Return the configuration of a replay: the recorded one, in this process, without sinks."""
    try:
        config = typed.convert(header.config, EngineConfig, path="", error=JournalError)
    except JournalError as cause:
        raise JournalError(
            f"journal: its configuration is none of this Hardpoint: {cause}"
        ) from cause
    replace = msgspec.structs.replace
    dropped = _names_of(header, _REPORTING)
    engine = replace(
        config.engine, in_process=True, journal=None, restart="never", profile_dir=None
    )
    return replace(
        config,
        engine=engine,
        kv_events=replace(config.kv_events, publishers=[]),
        stats=replace(config.stats, sinks=[], request_metrics=config.stats.on),
        plugin=_without(config.plugin, dropped),
        plugins=replace(
            config.plugins,
            on_error=_without(config.plugins.on_error, dropped),
            replace=_without(config.plugins.replace, dropped),
        ),
        parallel=replace(config.parallel, data=1, local=None, join_address=None, keys=None),
    )


def _names_of(header: JournalHeader, kinds: Collection[str]) -> set[str]:
    entries = list(header.manifest.tree())
    others = {entry.name for entry in entries if entry.kind not in kinds}
    named = [entry for entry in entries if entry.kind in kinds]
    names = {entry.name for entry in named} - others
    return names.union(*({f"{entry.kind}/{entry.name}", entry.value} for entry in named))


def _without(table: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    return {name: value for name, value in table.items() if name not in names}


def open_played(
    journal: Journal,
    player: Player,
    check: Callable[[PlayedInputs], None],
    config: EngineConfig | None = None,
) -> tuple[EngineCore, Callable[[], None]]:
    """Build the engine of a journal; return its core, and a function that closes it.

    Args:
        journal: the journal.
        player: its tape.
        check: raises an error if the journal cannot be played here.
        config: another configuration than its own.

    Raises:
        HardpointError: it cannot be built; or what `check` raises.
    """
    opened: list[PlayedInputs] = []

    def open_inputs(spec: Any) -> PlayedInputs:
        opened.append(PlayedInputs(player, check, spec))
        return opened[-1]

    engine = build_engine(
        config or replay_config(journal.header),
        ConfigSources({"": f"the journal {journal.path}"}),
        open_inputs=open_inputs,
        start_worker=LaunchedWorker,
    )
    core = opened[0].built
    assert core is not None, "the engine is built"
    return core, engine.close


class Run:
    """Calls an engine core by the events of a journal."""

    def __init__(self, core: EngineCore, player: Player, report: ReplayReport) -> None:
        """Call `core`, which has the tape `player`."""
        self._core, self._player, self._report = core, player, report
        self._arguments: Decoder[list[Any]] = Decoder(list[Any])
        self._answered: set[tuple[bytes, ...]] = set()  # calls of parts, sooner than recorded

    def play(self, number: int, record: Record, until: int | None) -> bool:
        """Play a record; return whether the next one may be played."""
        player, report = self._player, self._report
        if isinstance(record, Keyframe):
            return True
        assert isinstance(record, Event)
        if self.ends_before(number, record, until):
            return False
        if record.method in SKIPPED:
            return True
        player.begin(number, record)
        failure = failure_of(functools.partial(self.call, record))
        player.end()
        self.compare_failures(number, record, failure)
        report.difference = player.difference
        if report.difference is not None:
            return False
        report.requests += len(record.arrivals)
        report.steps += len(record.plans)
        report.tokens += sum(map(_num_tokens, record.results))
        return True

    def ends_before(self, number: int, event: Event, until: int | None) -> bool:
        """Return whether a replay ends before an event, and note why.

        Its step is after the last one, or an interrupt ended it, which cannot be repeated.
        """
        if until is not None and any(plan.step > until for plan in event.plans):
            self._report.notes.append(f"stopped before step {event.plans[0].step}")
        elif event.failure is not None and event.failure.kind in _INTERRUPTS:
            self._report.notes.append(f"{event.failure.kind} ended the engine in event {number}")
        else:
            return False
        return True

    def compare_failures(self, number: int, event: Event, failure: Exception | None) -> None:
        """Compare the error of a call with the recorded one."""
        recorded = None if event.failure is None else event.failure.kind
        replayed = None if failure is None else type(failure).__name__
        if recorded != replayed:
            first = "none" if event.failure is None else f"{recorded}: {event.failure.text}"
            second = "none" if failure is None else f"{replayed}: {failure}"
            subject = f"error of the call {event.method or event.call!r}"
            self._player.differ(Difference(number, None, subject, recorded=first, own=second))

    def call(self, event: Event) -> None:
        """Make the call of an event.

        Raises:
            Exception: what the core raises.
        """
        core = self._core
        match event.call:
            case "step":
                core.step(taken(event.late_aborts))
            case "add":
                core.add_request(*self._arrived(event.arrivals[0]))
            case "add_all":
                core.add_requests([self._arrived(arrival) for arrival in event.arrivals])
            case "abort":
                core.abort_requests(event.request_ids)
            case "call":
                self._control(event)
            case "idle":
                core.went_idle()
            case "loop":
                core.enter_loop()
            case "flush":
                core.flush()
            case "leave":
                core.leave_loop("the engine is shutting down")
            case other:
                raise JournalError(f"journal: expected a call of an engine core, got {other!r}")

    def _arrived(
        self, arrival: Arrival
    ) -> tuple[EngineCoreRequest, list[bytes] | None, float | None]:
        request = request_of(arrival)
        hashes = self._core.hash_prompt(request) if arrival.is_hashed else None
        return request, hashes, arrival.arrived

    def _control(self, event: Event) -> None:
        """Make a control call. If a poll ended in the recording, wait for its end here, too.

        Polls of keyframes in older journals do not have what they returned; the last had ended.

        Raises:
            HardpointError: it is not done here after some minutes.
        """
        arguments = self._arguments.decode(list(event.arguments))
        call = functools.partial(run_utility, self._core, event.method, arguments)
        if is_poll(event.method, arguments):
            if event.returned is not False or event.failure is not None:
                self._await(event.method, call)
        elif event.method == "call_part":
            self._call_part(event, call)
        else:
            call()

    def _call_part(self, event: Event, call: Callable[[], Any]) -> None:
        """Call a step part, which may have its polled result sooner here, or later."""
        arguments = tuple(event.arguments)
        if arguments in self._answered:
            if event.returned:
                self._answered.discard(arguments)
        elif event.returned:
            self._player.wait(lambda: call() is not None)
        elif call() is not None and event.returned is not None:
            self._answered.add(arguments)

    def _await(self, method: str, poll: Callable[[], Any]) -> None:
        waiting: list[Any] = []

        def is_done() -> bool:
            waiting[:] = [poll()]
            return waiting[0] is True or waiting[0] == []

        if not self._player.wait(is_done, _PATIENCE_S):
            missing = ", ".join(waiting[0]) if isinstance(waiting[0], list) else "the workers"
            raise HardpointError(
                f"{method}: it was done when it was recorded; here, after {_PATIENCE_S:g} s, it is "
                f"not done by {missing}"
            )


def failure_of(call: Callable[[], None]) -> Exception | None:
    """Make a call; return the error that it raised.

    Raises:
        JournalError: the journal has something else than a call.
    """
    try:
        call()
    except JournalError:
        raise
    except Exception as error:
        return error
    return None


def request_of(arrival: Arrival) -> EngineCoreRequest:
    """Return the request of an arrival.

    Raises:
        JournalError: it cannot be decoded.
    """
    try:
        request: EngineCoreRequest = Decoder(EngineCoreRequest).decode(list(arrival.frames))
    except WireError as cause:
        raise JournalError(f"journal: request {arrival.request_id!r}: {cause}") from cause
    return request


def _num_tokens(result: Result) -> int:
    assert isinstance(result.tokens, dict), "the reader expands it"
    return sum(map(len, result.tokens.values()))
