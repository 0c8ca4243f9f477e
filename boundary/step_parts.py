"""Step parts behind one object: their methods bound to lists, guarded, called for their users.

The engine core calls `EngineParts`, the scheduler its `Gates`, a worker `WorkerParts`. With no
request that uses a part, each call is a test of an empty list.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from hardpoint.errors import (
    HardpointError,
    PluginConflictError,
    PluginFaultError,
    RequestError,
    shown,
)
from hardpoint.plugins import (
    BlockIds,
    EngineCoreRequest,
    GrammarBitmask,
    ModelRunnerOutput,
    Request,
    RequestFault,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
    WaitingFor,
    WaitReason,
)
from hardpoint.plugins.kv_connector import KVConnectorScheduler
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.plan import PartData
from hardpoint.plugins.step_part import EngineHalf, StepPart
from hardpoint.registry.blame import describe, faults_as, raise_unless_fault
from hardpoint.registry.plugin_set import PluginSet

from .activity import PluginCalls
from .errors import close_named
from .faults import StepFaults
from .step_part_returns import (
    combined_masks,
    cost_defect,
    drafts_defect,
    half_defect,
    mask_defect,
    matched_defect,
    names_defect,
    reason_defect,
    shown_reason,
)

_SKIPPED = "the step goes on without it"
_ENDED = "the requests that use it end"


class BoundPart:
    """The engine's half of one part, with the requests that use it.

    Attributes:
        users: ids of live requests that use it.
    """

    def __init__(
        self, part: StepPart, half: EngineHalf, source: Source, faults: StepFaults
    ) -> None:
        """Bind the methods that the half overrides.

        Args:
            part: built from its entry; closed with this.
            half: of the part.
            source: names the part in messages.
            faults: counts the faults of scope *step*.
        """
        self.name, self.source, self.half = part.name, source, half
        self._part, self.users = part, set[str]()
        self._scope, self._faults = part.fault_scope, faults
        self._calls: PluginCalls = faults.calls("step_parts", source)
        self.capacity = dict(half.capacity)
        self.every_plan = half.every_plan
        self.moves_blocks = part.moves_blocks
        self.num_draft_tokens = half.num_draft_tokens

    def overrides(self, method: str) -> bool:
        """Return whether the half has a method of its own."""
        return getattr(type(self.half), method) is not getattr(EngineHalf, method)

    def users_of(self, plan: SchedulerOutput) -> list[str] | None:
        """Return the requests of a plan that use the part; None stands for all of them."""
        if self.every_plan:
            return None
        return [name for name in plan.num_scheduled_tokens if name in self.users]

    def run(self, method: str, *args: Any) -> Any:
        """Call a method of the half."""
        return self._calls.run(method, getattr(self.half, method), *args)

    def fault(self, message: str, cause: BaseException | None = None) -> RequestFault | None:
        """Return the fault of the requests that use the part; None where the step goes on.

        Raises:
            PluginFaultError: the scope of the part's faults is the engine.
            BaseException: `cause` is no fault of the part.
        """
        if cause is not None:
            raise_unless_fault(cause)
            message = f"{message}: {describe(cause)}"
        message = f"{self.source}: {message}"
        if self._scope == "engine":
            raise PluginFaultError(message) from cause
        goes_on = self._scope == "step"
        self._faults.note(self.source.name, message, cause, _SKIPPED if goes_on else _ENDED)
        return None if goes_on else RequestFault(message, self.name)

    def close(self) -> None:
        """Close the half and the part."""
        with ExitStack() as stack:
            stack.callback(close_named, self.source, self._part.close)
            stack.callback(close_named, self.source, self.half.close)


class EngineParts:
    """The engine's halves of all step parts.

    Attributes:
        num_draft_tokens: most drafts of a request and a step.
    """

    def __init__(self, parts: Sequence[BoundPart] = (), vocab_size: int = 0) -> None:
        """Bind the parts, in the order of their calls; drafts are tokens of the vocabulary.

        Raises:
            PluginConflictError: several parts load blocks.
        """
        self._parts, self._vocab_size = tuple(parts), vocab_size
        self.num_draft_tokens = max((part.num_draft_tokens for part in self._parts), default=0)
        self._active: list[BoundPart] = []  # with users
        self._by_request: dict[str, list[BoundPart]] = {}
        self._again: set[str] = set()  # ids of ended requests that others have now
        self._scheduler: Scheduler | None = None
        self._faults: dict[str, RequestFault] = {}
        self.gates = _Gates(self)
        self.transfers = self._transfers()
        self._find_active()

    def _transfers(self) -> _Transfers | None:
        """Return the loads and saves of the part that moves blocks; None if there is none."""
        found = [part for part in self._parts if part.overrides("get_num_new_matched_tokens")]
        if len(found) > 1:
            names = " and ".join(str(part.source) for part in found)
            raise PluginConflictError(
                f"{names} both load blocks of the KV cache; expected one of them"
            )
        return _Transfers(found[0], self._faults) if found else None

    @property
    def block_keys(self) -> Callable[[EngineCoreRequest, range], bytes] | None:
        """What returns the keys of all parts for a span of tokens; None if no part has any."""
        keyed = [part for part in self._parts if part.overrides("block_key")]
        return functools.partial(self._block_keys, keyed) if keyed else None

    def _block_keys(
        self, keyed: Sequence[BoundPart], request: EngineCoreRequest, span: range
    ) -> bytes:
        """Return the keys of parts for a span of tokens, in any thread; empty if there are none."""
        found: dict[str, bytes] = {}
        for part in keyed:
            try:
                key = part.half.block_key(request, span)  # not timed: times are those of one thread
                if key is not None and not isinstance(key, bytes):
                    raise TypeError(f"expected bytes or None, got {shown(key)}")
            except BaseException as cause:
                key = f"{request.request_id} shares nothing".encode()
                fault = part.fault("its block_key() failed", cause)
                if fault is not None:
                    self._faults[request.request_id] = fault
            if key is not None:
                found[part.name] = key
        return msgspec.msgpack.encode(found) if found else b""

    @property
    def moves_blocks(self) -> str | None:
        """The setting that makes a part move blocks of the KV cache; None if none does."""
        return next((part.moves_blocks for part in self._parts if part.moves_blocks), None)

    def started(self, handshakes: Sequence[Mapping[str, bytes]]) -> None:
        """Give the parts that move blocks the handshakes of their worker halves, of each rank."""
        for part in self._parts:
            if part.moves_blocks and part.overrides("started"):
                own = [handshake.get(part.name) for handshake in handshakes]
                with faults_as(PluginFaultError, f"{part.source}: its started()"):
                    part.run("started", own)

    def start_failed(self, cause: BaseException) -> None:
        """Let the parts that move blocks go on without their worker halves.

        Raises:
            BaseException: one cannot.
        """
        for part in self._parts:
            if part.moves_blocks:
                part.run("start_failed", cause)

    def __bool__(self) -> bool:
        """Return whether there are any parts."""
        return bool(self._parts)

    def follow(self, scheduler: Scheduler) -> None:
        """Ask a scheduler which requests are live, where an id was used again."""
        self._scheduler = scheduler

    def of(self, request_id: str) -> Sequence[BoundPart]:
        """Return the parts that a live request uses."""
        return self._by_request.get(request_id, ())

    def add(self, request: EngineCoreRequest) -> None:
        """Let the parts check a new request, and remember which of them it uses.

        Raises:
            RequestError: it is refused; no part knows it then.
        """
        if not self._parts:
            return
        users: list[BoundPart] = []
        if (name := request.request_id) in self._by_request:  # of one that no plan has reported
            self._end(name)
            self._again.add(name)
        try:
            for part in self._parts:
                if _call_for(part, "uses", request) if part.overrides("uses") else True:
                    users.append(part)
                    if part.overrides("check"):
                        _call_for(part, "check", request)
        except BaseException:
            self._refuse(request.request_id, users)
            raise
        if users:
            self._by_request[request.request_id] = users
            for part in users:
                part.users.add(request.request_id)
            self._find_active()

    def refused(self, request_id: str) -> None:
        """Notify the parts that a request was not added after all."""
        users = self._by_request.get(request_id, [])
        self._forget(request_id)
        self._refuse(request_id, users)

    def _refuse(self, request_id: str, users: Iterable[BoundPart]) -> None:
        for part in users:
            if part.overrides("refused"):
                try:
                    part.run("refused", request_id)
                except BaseException as cause:
                    part.fault("its refused() failed", cause)

    def begin(self, plan: SchedulerOutput) -> dict[str, PartData]:
        """Notify the parts of a new plan; return their data for the workers, by part."""
        data: dict[str, PartData] = {}
        if not self._active and not self._again:
            return data
        for request_id in plan.finished_request_ids:
            if not self._is_of_former(request_id):
                self._end(request_id)
        for part in self._active:
            if plan.preempted_request_ids and part.overrides("preempted"):
                for name in plan.preempted_request_ids & part.users:
                    self._for_request(part, "preempted", name)
            if part.overrides("begin"):
                made = self._for_plan(part, "begin", plan)
                if made is not None and not isinstance(made, bytes):
                    self._blame(part, plan, f"its begin() gave {shown(made)}, expected bytes")
                elif made is not None:
                    data[part.name] = PartData(made, part.users_of(plan))
        return data

    def needs_results(self, plan: SchedulerOutput) -> set[str]:
        """Return the requests of a plan whose earlier tokens a mask needs."""
        found: set[str] = set()
        for part in self._active:
            if part.overrides("needs_results"):
                names = self._for_plan(part, "needs_results", plan) or ()
                if (defect := names_defect(names)) is None:
                    found.update(names)
                else:
                    self._blame(part, plan, f"its needs_results() {defect}")
        return found

    def mask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Return the tokens that all parts allow; None if no part forbids any."""
        masks: list[tuple[BoundPart, GrammarBitmask]] = []
        for part in self._active:
            if part.overrides("mask"):
                mask = self._for_plan(part, "mask", plan)
                if mask is None:
                    continue
                if (defect := mask_defect(mask, part.users, plan)) is not None:
                    self._blame(part, plan, f"its mask() {defect}")
                else:
                    masks.append((part, mask))
        if len(masks) < 2:
            return masks[0][1] if masks else None
        return self._combined(masks)

    def _combined(self, masks: Sequence[tuple[BoundPart, GrammarBitmask]]) -> GrammarBitmask:
        """Return the tokens that every mask allows; nothing left is a fault that names both."""
        combined, nothing_left = combined_masks(masks)
        for name, makers in nothing_left.items():
            named = " and ".join(str(part.source) for part in makers)
            both = " by both" if len(makers) > 1 else ""
            self._faults[name] = RequestFault(f"{named}: no token is allowed{both}")
        return combined

    def result(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, RequestFault]:
        """Let the parts read a result; return the requests that end with an error."""
        ended: dict[str, RequestFault] = {}
        for part in self._active:
            if (failed := result.part_faults.get(part.name)) is not None:
                self._blame(part, plan, failed)
            if not part.overrides("result"):
                continue
            found = self._for_plan(part, "result", plan, result) or {}
            if not isinstance(found, Mapping):
                self._blame(part, plan, f"its result() gave {shown(found)}, expected a mapping")
                continue
            for name, fault in found.items():
                if name in part.users and isinstance(fault, RequestFault):
                    ended.setdefault(name, fault)
                else:
                    wrong = f"its result() gave {shown(fault)} for request {name!r}"
                    self._blame(part, plan, wrong)
        for name in self._faults.keys() & plan.num_scheduled_tokens.keys():
            ended.setdefault(name, self._faults.pop(name))
        return ended

    def updated(self, plan: SchedulerOutput) -> None:
        """Notify the parts that the scheduler has taken the result of a plan."""
        for part in self._active:
            if part.overrides("updated"):
                self._for_plan(part, "updated", plan)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Let the parts add their totals to the statistics of the scheduler."""
        for part in self._parts:
            if part.overrides("add_stats"):
                try:
                    part.run("add_stats", stats)
                except BaseException as cause:
                    part.fault("its add_stats() failed", cause)  # counted: no request is planned

    @property
    def drafting(self) -> str:
        """Names of the parts that draft tokens, for messages."""
        return " and ".join(str(part.source) for part in self._parts if part.num_draft_tokens)

    def drafts(self, plan: SchedulerOutput) -> dict[str, list[int]]:
        """Return the drafts for the next step, after the result of a plan was processed."""
        found: dict[str, list[int]] = {}
        for part in self._active:
            if (limit := part.num_draft_tokens) == 0:
                continue
            try:
                made = part.run("drafts")
            except BaseException as cause:
                self._blame(part, plan, "its drafts() failed", cause)
                continue
            if (defect := drafts_defect(made, part.users, limit, self._vocab_size)) is not None:
                self._blame(part, plan, f"its drafts() {defect}")
                continue
            found = {name: list(tokens) for name, tokens in made.items() if tokens} | found
        return found

    def lost(self, plan: SchedulerOutput) -> None:
        """Notify the parts of a plan that was not executed, or not to its end."""
        for part in self._active:
            if part.overrides("lost"):
                self._for_plan(part, "lost", plan)

    def wait(self) -> None:
        """Wait a moment for what gates wait for."""
        for part in self._active:
            if part.overrides("wait"):
                try:
                    part.run("wait")
                except BaseException as cause:
                    part.fault("its wait() failed", cause)  # counted: no request is planned

    def close(self) -> None:
        """Close all parts."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)

    def _is_of_former(self, request_id: str) -> bool:
        """Return whether a reported end is that of a request before the live one of its id."""
        if request_id not in self._again:
            return False
        live: bool | None = None
        if self._scheduler is not None:
            with suppress(NotImplementedError):  # optional for schedulers
                live = self._scheduler.live_request(request_id) is not None
        if not live:  # else it stays, for a lost plan's ends are reported again
            self._again.remove(request_id)
        return live is not False

    def _end(self, request_id: str) -> None:
        """Notify the parts of the end of a request that they know, and forget it."""
        for part in self._by_request.get(request_id, ()):
            if part.overrides("ended"):
                self._for_request(part, "ended", request_id)
        self._forget(request_id)

    def _for_request(self, part: BoundPart, method: str, request_id: str) -> None:
        """Notify a part; a fault ends the request at its next result."""
        try:
            part.run(method, request_id)
        except BaseException as cause:
            fault = part.fault(f"its {method}() failed", cause)
            if fault is not None:
                self._faults[request_id] = fault

    def _for_plan(self, part: BoundPart, method: str, plan: SchedulerOutput, *args: Any) -> Any:
        """Call a method for a plan; return None if it fails."""
        try:
            return part.run(method, plan, *args)
        except BaseException as cause:
            self._blame(part, plan, f"its {method}() failed", cause)
            return None

    def _blame(
        self,
        part: BoundPart,
        plan: SchedulerOutput,
        message: str,
        cause: BaseException | None = None,
    ) -> None:
        """End the requests of a plan that use a part, if its faults end requests."""
        fault = part.fault(message, cause)
        if fault is not None:
            for name in part.users & plan.num_scheduled_tokens.keys():
                self._faults.setdefault(name, fault)

    def _forget(self, request_id: str) -> None:
        users = self._by_request.pop(request_id, None)
        self._faults.pop(request_id, None)
        if users:
            for part in users:
                part.users.discard(request_id)
            self._find_active()

    def _find_active(self) -> None:
        self._active = [part for part in self._parts if part.users or part.every_plan]


def _call_for(part: BoundPart, method: str, *args: Any) -> Any:
    """Call a method for one request.

    Raises:
        RequestError: it refuses the request, or failed.
    """
    try:
        return part.run(method, *args)
    except RequestError:
        raise
    except BaseException as cause:
        fault = part.fault(f"its {method}() failed", cause)
        if fault is None:  # the part is left out of this request
            return None
        raise RequestError(fault.message) from cause


class _Gates:
    """The gates and resources of the parts, for a scheduler; see `Gates` of the contract."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._used: dict[str, Counter[str]] = {}  # by part
        self._costs: dict[str, list[tuple[BoundPart, Mapping[str, int]]]] = {}  # by running request

    def holds(self, request: Request) -> bool:
        """Return whether a part has a gate for a request, or counts what it costs."""
        parts = self._parts.of(request.request_id)
        return any(part.overrides("gate") or part.overrides("cost") for part in parts)

    def wait_reason(self, request: Request) -> WaitReason | None:
        """Return why a request that has not run is not ready; None if it is."""
        for part in self._parts.of(request.request_id):
            if part.overrides("gate"):
                reason = _as_reason(part, _call_for(part, "gate", request))
                if reason is not None:
                    return reason
        for part, cost in self._cost_of(request):
            for name, amount in cost.items():
                if amount > part.capacity.get(name, 0):
                    raise RequestError(
                        f"{part.source}: it needs {amount} of {name}, of which there are "
                        f"{part.capacity.get(name, 0)}"
                    )
        return None

    def lacks(self, request: Request) -> WaitReason | None:
        """Return which resource has no room for a request; None if all have."""
        for part, cost in self._cost_of(request):
            used = self._used.get(part.name, Counter())
            for name, amount in cost.items():
                room = part.capacity.get(name, 0) - used[name]
                if amount > room:
                    return WaitReason(
                        WaitingFor.PART,
                        f"{part.name}: needs {amount} of {name}, {room} of "
                        f"{part.capacity.get(name, 0)} are free",
                        needed=amount,
                        available=room,
                    )
        return None

    def acquire(self, request: Request) -> None:
        """Count the resources of a request that starts to run."""
        if costs := self._cost_of(request):
            self._costs[request.request_id] = costs
            for part, cost in costs:
                self._used.setdefault(part.name, Counter()).update(cost)

    def release(self, request: Request) -> None:
        """Release the resources of a request that no longer runs."""
        for part, cost in self._costs.pop(request.request_id, ()):
            self._used[part.name].subtract(cost)

    def _cost_of(self, request: Request) -> list[tuple[BoundPart, Mapping[str, int]]]:
        return [
            (part, _checked_cost(part, request))
            for part in self._parts.of(request.request_id)
            if part.overrides("cost")
        ]


class _Transfers(KVConnectorScheduler):
    """The loads and saves of the part that moves blocks, for a scheduler.

    A fault of the part ends the request, or the step goes on as if nothing could be loaded.
    """

    def __init__(self, part: BoundPart, faults: dict[str, RequestFault]) -> None:
        """Call `part`; `faults` gets those that end a request."""
        self._part, self._faults = part, faults

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether between steps."""
        found = self._call("get_num_new_matched_tokens", request, num_computed_tokens)
        if found is None:
            return 0, False
        if (defect := matched_defect(found)) is not None:
            self._fault(request, f"its get_num_new_matched_tokens() {defect}")
            return 0, False
        matched: tuple[int | None, bool] = found
        return matched

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Record the blocks allocated for a request that was asked for."""
        self._call("update_state_after_alloc", request, block_ids, num_external_tokens)

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Record the end of a request; return whether its blocks are kept, and its parameters."""
        kept = self._call("request_finished", request, block_ids)
        if kept is None:
            return False, None
        keep, params = kept
        return keep, params

    def build_connector_meta(self, plan: SchedulerOutput) -> None:
        """Return None: the data of a plan is that of the part's `begin`."""

    def _call(self, method: str, request: Request, *args: Any) -> Any:
        """Call a method for a request; return None if it fails."""
        try:
            return self._part.run(method, request, *args)
        except BaseException as cause:
            self._fault(request, f"its {method}() failed", cause)
            return None

    def _fault(self, request: Request, message: str, cause: BaseException | None = None) -> None:
        if (fault := self._part.fault(message, cause)) is not None:
            self._faults.setdefault(request.request_id, fault)


def _checked_cost(part: BoundPart, request: Request) -> Mapping[str, int]:
    """Return what a request costs; nothing if that is not known and the step goes on without it.

    Raises:
        RequestError: the part failed.
    """
    cost: Mapping[str, int] = _call_for(part, "cost", request) or {}
    if (defect := cost_defect(cost)) is None:
        return cost
    if (fault := part.fault(f"its cost() {defect}")) is not None:
        raise RequestError(fault.message)
    return {}


def _as_reason(part: BoundPart, reason: Any) -> WaitReason | None:
    """Return what a gate gave as a reason.

    Raises:
        RequestError: it is none.
    """
    if (defect := reason_defect(reason)) is None:
        return shown_reason(part.name, reason)
    if (fault := part.fault(f"its gate() {defect}")) is not None:
        raise RequestError(fault.message)
    return None


def open_parts(
    plugins: PluginSet,
    faults: StepFaults,
    make: Callable[[Any], tuple[StepPart, EngineHalf | None]],
    vocab_size: int,
) -> EngineParts:
    """Build the engine's halves of all enabled parts, in their order.

    Args:
        plugins: the enabled plugins.
        faults: counts the faults of scope *step*.
        make: builds the part of an entry and its half; None is a part without one.
        vocab_size: size of the model's vocabulary.

    Raises:
        PluginError: one cannot be built; the others are closed.
    """
    bound: list[BoundPart] = []
    with ExitStack() as undo:
        for entry in plugins.entries("step_parts"):
            name = f"{entry.source}: its engine_half()"
            with faults_as(PluginFaultError, name, passing=(HardpointError,)):
                part, half = make(entry)
            if half is None:
                close_named(entry.source, part.close)
                continue
            if (defect := half_defect(half)) is not None:
                part.close()
                raise PluginFaultError(f"{entry.source}: its {defect}")
            bound.append(BoundPart(part, half, entry.source, faults))
            undo.callback(bound[-1].close)
        undo.pop_all()
    return EngineParts(bound, vocab_size)
