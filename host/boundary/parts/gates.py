"""Step parts as a scheduler sees them: gates, resources, and loads and saves of blocks.

`EngineHalves` makes these objects for the scheduler, which calls one of them instead of every part,
and gets checked results; and one for the start of the parts that move blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from hardpoint.errors import PluginConflictError, PluginFaultError, RequestError
from hardpoint.host.registry.blame import faults_as
from hardpoint.plugins import (
    BlockIds,
    EngineCoreRequest,
    Finish,
    ModelRunnerOutput,
    Request,
    RequestFault,
    WaitingFor,
    WaitReason,
)
from hardpoint.plugins.scheduling.scheduler import EncoderCache

from .bound_half import BoundPart, call_for
from .returns import cost_defect, kept_defect, matched_defect, reason_defect, shown_reason

_Costs: TypeAlias = list[tuple[BoundPart, Mapping[str, int]]]


class PartGates:
    """The gates and resources of the parts, for a scheduler; see `Gates` of the contract."""

    def __init__(self, parts_of: Callable[[str], Sequence[BoundPart] | None]) -> None:
        """Ask the parts that `parts_of` returns for the id of a request; None if it uses none."""
        self._parts_of = parts_of
        self.finishes: dict[str, Finish] = {}  # of requests that a gate has ended
        self._used: dict[str, Counter[str]] = {}  # by part
        self._num_passed: dict[str, int] = {}  # parts of each request whose gate it has passed
        self._costs: dict[str, _Costs] = {}  # of each request
        self._held: dict[str, _Costs] = {}  # of each that runs

    def holds(self, request: Request) -> bool:
        """Return whether a part has a gate for a request, or counts its cost."""
        if not (parts := self._parts_of(request.request_id)):
            return False
        return any(part.overrides("gate") or part.overrides("cost") for part in parts)

    def wait_reason(self, request: Request) -> WaitReason | None:
        """Return why a request that has not run is not ready; None if it is."""
        parts = self._parts_of(request.request_id) or ()
        for place in range(self._num_passed.get(request.request_id, 0), len(parts)):
            part = parts[place]
            if part.overrides("gate"):
                reason = call_for(part, "gate", request)
                if isinstance(reason, Finish):
                    self.finishes[request.request_id] = reason.of(part.name)
                    raise RequestError(f"it ends: {reason.reason}")
                if (reason := _as_reason(part, reason)) is not None:
                    return reason
            self._num_passed[request.request_id] = place + 1
        for part, cost in self._cost_of(request):
            for name, amount in cost.items():
                if amount > part.capacity.get(name, 0):
                    raise RequestError(
                        f"{part.source}: it needs {amount} of {name}, expected at most "
                        f"{part.capacity.get(name, 0)}"
                    )
        return None

    def move_finishes(self, result: ModelRunnerOutput) -> None:
        """Move the graceful ends by gates into a result."""
        result.finishes.update(self.finishes)
        self.finishes.clear()

    def lacks(self, request: Request) -> WaitReason | None:
        """Return which resource has no room for a request; None if all have."""
        if not self._parts_of(request.request_id):
            return None
        for part, cost in self._cost_of(request):
            used = self._used.get(part.key, Counter())
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
        if self._parts_of(request.request_id) and (costs := self._cost_of(request)):
            self._held[request.request_id] = costs
            for part, cost in costs:
                self._used.setdefault(part.key, Counter()).update(cost)

    def release(self, request: Request) -> None:
        """Release the resources of a request that no longer runs."""
        for part, cost in self._held.pop(request.request_id, ()):
            self._used[part.key].subtract(cost)

    def forget(self, request_id: str) -> None:
        """Forget the passed gates of a request, and its cost."""
        self._num_passed.pop(request_id, None)
        self._costs.pop(request_id, None)

    def _cost_of(self, request: Request) -> _Costs:
        """Return the costs of a request; the parts are asked once."""
        if (costs := self._costs.get(request.request_id)) is None:
            if not (parts := self._parts_of(request.request_id)):
                return []
            costs = [(p, _checked_cost(p, request)) for p in parts if p.overrides("cost")]
            self._costs[request.request_id] = costs
        return costs


class PartTransfers:
    """The loads and saves of the part that moves blocks, for a scheduler.

    A fault of the part ends the request, or the step goes on as if nothing could be loaded.
    """

    def __init__(self, part: BoundPart, faults: dict[str, RequestFault]) -> None:
        """Call `part`; `faults` gets the faults that end a request."""
        self._part, self._faults = part, faults

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether between steps."""
        result = self._call("get_num_new_matched_tokens", request, num_computed_tokens)
        if result is None:
            return 0, False
        if (defect := matched_defect(result)) is not None:
            self._fault(request, f"its get_num_new_matched_tokens() {defect}")
            return 0, False
        matched: tuple[int | None, bool] = result
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
        result = self._call("request_finished", request, block_ids)
        if result is None:
            return False, None
        if (defect := kept_defect(result)) is not None:
            self._fault(request, f"its request_finished() {defect}")
            return False, None
        keep, params = result
        return keep, params

    def _call(self, method: str, request: Request, *args: Any) -> Any:
        try:
            return self._part.run(method, request, *args)
        except BaseException as cause:
            self._fault(request, f"its {method}() failed", cause)
            return None

    def _fault(self, request: Request, message: str, cause: BaseException | None = None) -> None:
        if (fault := self._part.fault(message, cause)) is not None:
            self._faults.setdefault(request.request_id, fault)


def _checked_cost(part: BoundPart, request: Request) -> Mapping[str, int]:
    cost: Mapping[str, int] = call_for(part, "cost", request) or {}
    if (defect := cost_defect(cost)) is None:
        return cost
    if (fault := part.fault(f"its cost() {defect}")) is not None:
        raise RequestError(fault.message)
    return {}


def _as_reason(part: BoundPart, reason: Any) -> WaitReason | None:
    if (defect := reason_defect(reason)) is None:
        return shown_reason(part.name, reason)
    if (fault := part.fault(f"its gate() {defect}")) is not None:
        raise RequestError(fault.message)
    return None


def part_transfers(
    parts: Sequence[BoundPart], faults: dict[str, RequestFault]
) -> PartTransfers | None:
    """Return the loads and saves of the part that moves blocks; None if there is none."""
    loading = [part for part in parts if part.overrides("get_num_new_matched_tokens")]
    transferring = _only(loading, "load blocks of the KV cache")
    return None if transferring is None else PartTransfers(transferring, faults)


def without_data(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return a request without encoder data, as schedulers and workers have it."""
    features = [msgspec.structs.replace(feature, data=None) for feature in request.features]
    return msgspec.structs.replace(request, features=features)


def part_encoder_cache(parts: Sequence[BoundPart]) -> tuple[EncoderCache | None, int]:
    """Return the cache of the part that encodes features, and the most tokens that a step may."""
    encoding = [part for part in parts if part.half.encoder_cache is not None]
    part = _only(encoding, "encode features")
    return (None, 0) if part is None else (part.half.encoder_cache, part.half.max_encoder_tokens)


def _only(parts: Sequence[BoundPart], action: str) -> BoundPart | None:
    if len(parts) > 1:
        names = " and ".join(str(part.source) for part in parts)
        raise PluginConflictError(f"{names} both {action}; expected one of them")
    return parts[0] if parts else None


class MovingHalves:
    """The halves of the parts that move blocks, which no live change replaces.

    Attributes:
        moves_blocks: the setting that makes a part move blocks; None if none does.
    """

    def __init__(self, parts: Sequence[BoundPart]) -> None:
        self._parts = [part for part in parts if part.moves_blocks]
        self.moves_blocks = self._parts[0].moves_blocks if self._parts else None

    def started(self, handshakes: Sequence[Mapping[str, bytes]]) -> None:
        """Give the parts the handshakes of their worker halves, of each rank."""
        for part in self._parts:
            if part.overrides("started"):
                part_handshakes = [handshake.get(part.name) for handshake in handshakes]
                with faults_as(PluginFaultError, f"{part.source}: its started()"):
                    part.run("started", part_handshakes)

    def start_failed(self, cause: BaseException) -> None:
        """Let the parts go on without their worker halves.

        Raises:
            BaseException: one cannot.
        """
        for part in self._parts:
            part.run("start_failed", cause)
