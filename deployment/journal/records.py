"""The records of a journal, as msgpack in its frames. Field order is part of the format."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.plugins import Finish, ModelRunnerOutput, SchedulerOutput
from hardpoint.plugins.component.manifest import Manifest

FORMAT_VERSION = 1
"""Of the records and of the frames around them."""


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that have to be the same for the same bits.

    Attributes:
        hardpoint, python, torch: versions.
        machine: architecture and system.
        device: device and, of a CPU, the instructions that torch uses.
        dtype: dtype of hidden states.
        threads: CPU threads of the engine's process.
        operations, attention: components that compute.
        ranks: number of workers.
    """

    hardpoint: str
    python: str
    torch: str
    machine: str
    device: str
    dtype: str
    threads: int
    operations: str
    attention: str
    ranks: int


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="header"):
    """The first record.

    Attributes:
        build: what computed.
        manifest: the plugins at the start.
        config: the EngineConfig as plain data, with the length and the cache size that were found.
        model: fingerprint of the model's files.
        engine_index: number of the engine among those of its program.
        reports_cache: whether it reported the changes of its KV cache.
        started: seconds since 1970.
        clock: the engine's clock then.
        ring: whether earlier records may be gone.
        windows: windows of the groups of its KV cache, if there are several or one has a window.
    """

    build: Build
    manifest: Manifest
    config: dict[str, Any]
    model: str
    engine_index: int = 0
    reports_cache: bool = False
    started: float = 0.0
    clock: float = 0.0
    ring: bool = False
    windows: list[int | None] = []


BlockIds = Sequence[Sequence[int]]


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request that a plan sends in full; see `NewRequest`."""

    request_id: str
    num_outputs: int
    num_computed: int
    resumed: bool
    block_ids: BlockIds
    released_columns: Sequence[tuple[int, int]] = ()


class PlanRecord(msgspec.Struct, frozen=True, array_like=True):
    """A plan without the fields that follow from the requests; see `SchedulerOutput`.

    Attributes:
        scheduled: tokens by request id; None in a file where they are those of the plan before.
        computed: tokens that were computed before, of the requests that the workers have, in the
            order of `scheduled`.
    """

    step: int
    scheduled: dict[str, int] | None
    new: list[NewRow]
    computed: list[int]
    new_block_ids: dict[str, BlockIds]
    drafts: dict[str, list[int]] = {}
    encoder_inputs: dict[str, list[int]] = {}
    preempted: list[str] = []
    finished: list[str] = []
    released_columns: dict[str, Sequence[tuple[int, int]]] = {}


class Result(msgspec.Struct, frozen=True, array_like=True):
    """The result that the executor returned for a plan; see `ModelRunnerOutput`.

    Attributes:
        step: number of the plan.
        tokens: sampled ids by request id; in a file a list, where they are those of the scheduled
            requests of the plan written last.
        part_reports: by step part and rank.
        faults: by request id, message and plugin.
        finishes: graceful ends by plugins, by request id.
    """

    step: int
    tokens: dict[str, list[int]] | list[list[int]]
    part_reports: dict[str, dict[int, bytes]] = {}
    part_faults: dict[str, str] = {}
    faults: dict[str, tuple[str, str | None]] = {}
    invalid_block_ids: list[int] = []
    is_cache_uncertain: bool = False
    finishes: dict[str, Finish] = {}


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error: name of its class, and its text."""

    kind: str
    text: str


class Gate(msgspec.Struct, frozen=True, array_like=True):
    """The answer of step parts for a request that is to run.

    Attributes:
        waiting_for: value of a `WaitingFor`; empty if it may run.
        failure: the error with which it ends.
    """

    waiting_for: str = ""
    message: str = ""
    needed: int | None = None
    available: int | None = None
    ahead: int | None = None
    failure: Failure | None = None


class PartReplies(msgspec.Struct, frozen=True, array_like=True):
    """The answers of all ranks' worker halves to a call of their step part.

    Attributes:
        part: name of the part.
        answers: one per rank, after the name of the error that it is, if it is one.
        message: digest of the message, by which later answers to the same one are found.
    """

    part: str
    answers: tuple[tuple[str | None, bytes], ...]
    message: bytes = b""

    @classmethod
    def of(
        cls, part: str, answers: Sequence[tuple[str | None, bytes]], message: bytes
    ) -> PartReplies:
        """Return the record of answers."""
        return cls(part, tuple((kind, bytes(answer)) for kind, answer in answers), message)


Position = tuple[int, int]
"""The number of an event, and an index of one of its lists."""
NOWHERE: Position = (-1, 0)


class RequestEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request: name of the `FinishReason`, and the error, if it was one."""

    request_id: str
    reason: str
    error: str | None = None


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """A request as it came.

    Attributes:
        frames: the EngineCoreRequest, as `hardpoint.host.system.encoding` encodes it.
        is_hashed: whether its prompt had been hashed before it came to the engine's thread.
        arrived: when it came, on the engine's clock; None is the time of the call.
    """

    request_id: str
    frames: list[bytes]
    is_hashed: bool = False
    arrived: float | None = None


class Event(msgspec.Struct, array_like=True, tag="event"):
    """A call of the engine core from outside, and all that it got from outside until it returned.

    Each list is in the order in which the engine took its items.

    Attributes:
        call: "step", "add", "add_all", "abort", "idle", "loop", "flush" or "leave"; of a control
            call, "call".
        arrivals: requests of "add" and "add_all".
        request_ids: requests of "abort"; None is all.
        method: name of the control call.
        arguments: its arguments, encoded as requests are.
        returned: whether what a poll asked for was done, or a step part returned something; None
            for other calls.
        clock: readings of the engine's clock, in seconds.
        times: readings of the clock that measures steps, in seconds.
        late_aborts: requests that were aborted while the step ran.
        gates: answers of the gates of step parts.
        matched: tokens that a step part could load, and whether between steps.
        done: whether results were there when the engine looked.
        answers: answers of worker halves of step parts.
        plans: plans that were executed.
        results: their results, and those of earlier plans.
        raised: what the executor raised instead of results.
        ended: requests that ended.
        failure: what the call raised.
    """

    call: str
    arrivals: list[Arrival] = []
    request_ids: list[str] | None = []
    method: str = ""
    arguments: list[bytes] = []
    returned: bool | None = None
    clock: list[float] = []
    times: list[float] = []
    late_aborts: list[str] = []
    gates: list[Gate] = []
    matched: list[tuple[int | None, bool]] = []
    done: list[bool] = []
    answers: list[PartReplies] = []
    plans: list[PlanRecord] = []
    results: list[Result] = []
    raised: list[Failure] = []
    ended: list[RequestEnd] = []
    failure: Failure | None = None

    def arrived(self, arrival: Arrival, before: float) -> float:
        """Return when a request of the event came, in seconds on the engine's clock.

        Args:
            arrival: one of `arrivals`.
            before: the last reading of the clock before the event.
        """
        if arrival.arrived is not None:
            return arrival.arrived
        return self.clock[0] if self.clock else before  # the call itself reads it first


def is_poll(method: str, arguments: Sequence[Any]) -> bool:
    """Return whether a control call polls for work of other threads or processes.

    Such calls change nothing, so that a replay makes them when, and as often as, it has to.
    """
    return method == "live_change" and list(arguments[:1]) == ["state"]


def what_returned(method: str, arguments: Sequence[Any], result: Any) -> bool | None:
    """Return whether a control call returned the value that it polls for; see `Event.returned`."""
    if method == "call_part":
        return result is not None
    if not is_poll(method, arguments):
        return None
    return not result if isinstance(result, list) else bool(result)


def message_digest(message: bytes) -> bytes:
    """Return the digest of a message to worker halves, by which its answers are found."""
    return hashlib.blake2b(message, digest_size=8).digest()


class LiveState(msgspec.Struct, frozen=True, array_like=True):
    """A live request at a keyframe.

    Attributes:
        arrival: the request.
        output_token_ids: its outputs so far.
        age: seconds since it arrived.
    """

    arrival: Arrival
    output_token_ids: list[int]
    age: float


class Keyframe(msgspec.Struct, frozen=True, array_like=True, tag="keyframe"):
    """A state from which a replay can begin: live requests with their generated tokens.

    Attributes:
        event: number of events before it.
        live: in the order of arrival.
        changes: the control calls of the last hot reconfiguration, and of the one under way.
    """

    event: int
    live: list[LiveState]
    changes: list[Event]


CLOSED = "the engine was closed"
"""Why a journal ends that is whole."""


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The last record.

    Attributes:
        reason: why nothing follows.
        num_events: events that were recorded, those that are gone included.
    """

    reason: str
    num_events: int


Record = JournalHeader | Event | Keyframe | End


def num_computed(plan: PlanRecord) -> Mapping[str, int]:
    """Return how many tokens of each request were computed before a plan, by id."""
    rows = {row.request_id: row.num_computed for row in plan.new}
    others = [name for name in plan.scheduled or () if name not in rows]
    return rows | dict(zip(others, plan.computed, strict=False))


def plan_record(plan: SchedulerOutput) -> PlanRecord:
    """Return the record of a plan."""
    scheduled, cached = plan.num_scheduled_tokens, plan.cached_requests
    new = [
        NewRow(
            row.source.request_id,
            len(row.output_token_ids),
            row.num_computed_tokens,
            row.resumed,
            row.block_ids,
            list(row.released_columns),
        )
        for row in plan.new_requests
    ]
    computed = list(cached.num_computed_tokens)
    if new or list(cached.request_ids) != list(scheduled):
        known = dict(zip(cached.request_ids, computed, strict=False))
        computed = [known[name] for name in scheduled if name in known]
    return PlanRecord(
        plan.step,
        scheduled,
        new,
        computed,
        dict(cached.new_block_ids),
        {name: list(drafts) for name, drafts in plan.draft_token_ids.items()},
        {name: list(inputs) for name, inputs in plan.encoder_inputs.items()},
        sorted(plan.preempted_request_ids),
        sorted(plan.finished_request_ids),
        {name: list(columns) for name, columns in cached.released_columns.items()},
    )


def result_record(step: int, result: ModelRunnerOutput) -> Result:
    """Return the record of a result."""
    return Result(
        step,
        dict(result.sampled_token_ids),
        {name: dict(reports) for name, reports in result.part_reports.items()},
        dict(result.part_faults),
        {name: (fault.message, fault.plugin) for name, fault in result.faults.items()},
        sorted(result.invalid_block_ids),
        result.is_cache_uncertain,
        dict(result.finishes),
    )


class Compact:
    """Leaves out repeated fields of plans and results; `expand` puts them back."""

    def __init__(self) -> None:
        self._scheduled: dict[str, int] = {}

    def shrink(self, event: Event) -> Event:
        """Return an event for a file."""
        plans, results = [], []
        for plan in event.plans:
            same = plan.scheduled == self._scheduled and plan.scheduled is not None
            same = same and list(plan.scheduled or ()) == list(self._scheduled)
            self._scheduled = plan.scheduled or {}
            plans.append(msgspec.structs.replace(plan, scheduled=None) if same else plan)
        for result in event.results:
            assert isinstance(result.tokens, dict)
            if list(result.tokens) == list(self._scheduled):
                result = msgspec.structs.replace(result, tokens=list(result.tokens.values()))
            results.append(result)
        event.plans, event.results = plans, results
        return event

    def expand(self, event: Event) -> Event:
        """Return an event of a file as it was.

        Raises:
            ValueError: it does not fit the events before it.
        """
        plans, results = [], []
        for plan in event.plans:
            if plan.scheduled is None:
                plan = msgspec.structs.replace(plan, scheduled=dict(self._scheduled))
            self._scheduled = plan.scheduled or {}
            plans.append(plan)
        for result in event.results:
            if isinstance(result.tokens, list):
                if len(result.tokens) != len(self._scheduled):
                    raise ValueError(
                        f"the result of step {result.step} has tokens of {len(result.tokens)} "
                        f"requests, its plan has {len(self._scheduled)}"
                    )
                tokens = dict(zip(self._scheduled, result.tokens, strict=True))
                result = msgspec.structs.replace(result, tokens=tokens)
            results.append(result)
        event.plans, event.results = plans, results
        return event
