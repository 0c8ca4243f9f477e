"""Step parts behind one object: their methods bound to lists, guarded, called for their users.

The engine core calls `EngineHalves`, the scheduler its `Gates`, a worker `WorkerParts`. With no
request that uses a part, each call is a test of an empty list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from hardpoint.errors import HardpointError, PluginFaultError, shown
from hardpoint.host.registry.blame import faults_as
from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    GrammarBitmask,
    ModelRunnerOutput,
    RequestFault,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
)
from hardpoint.plugins.requests.plan import PartData
from hardpoint.plugins.scheduling.step_record import WaitReason
from hardpoint.toolkit.bitmasks import combined_masks, masks_by_source
from hardpoint.toolkit.kv_blocks.start import BlockStart
from hardpoint.toolkit.requests.finishes import take_finishes

from . import figures, returns
from .bound_half import INCLUDE, BoundPart, OpenHalves, call_for
from .calls import PartCalls
from .components import describe_fault
from .gates import MovingHalves, PartGates, part_encoder_cache, part_transfers, without_data
from .hooks import SelectingFields


class EngineHalves:
    """The engine's halves of all step parts.

    Attributes:
        num_draft_tokens: most drafts of a request and a step.
        calls: calls to the parts, and by the parts.
        moves_blocks: the setting that makes a part move KV blocks; None if none does.
        blocks: starts the worker halves of parts that move KV blocks.
        tasks: tasks of requests besides generating.
        open: opens the halves of further parts.
        encoder_cache: cache of the part that encodes features; None if there is none.
        max_encoder_tokens: tokens of features that a step may encode.
    """

    def __init__(
        self,
        parts: Sequence[BoundPart] = (),
        vocab_size: int = 0,
        calls: PartCalls | None = None,
    ) -> None:
        """Bind the parts, in the order of their calls; drafts are tokens of the vocabulary.

        Raises:
            PluginConflictError: several parts load blocks, or encode features.
        """
        self._vocab_size = vocab_size
        self.open: OpenHalves[BoundPart] | None = None
        self.calls = calls or PartCalls()
        self._bind(parts)
        self._is_mixed = False  # whether there may be parts of several generations
        moving = MovingHalves(parts)
        self.moves_blocks, self.blocks = moving.moves_blocks, BlockStart(moving, describe_fault)
        self.num_draft_tokens = max((part.num_draft_tokens for part in parts), default=0)
        self.tasks = list(dict.fromkeys(t for part in parts for t in part.half.tasks))
        self.encoder_cache, self.max_encoder_tokens = part_encoder_cache(parts)
        self._by_request: dict[str, list[BoundPart]] = {}
        self._asked: dict[str, dict[BoundPart, figures.ArrayForms]] = {}  # for figures
        self._num_positions: Mapping[str, tuple[int, int]] = {}  # of requests, with a result
        self._again: set[str] = set()  # ids of ended requests that others have now
        self._planned = 0  # the last step
        self._scheduler: Scheduler | None = None
        self._faults: dict[str, RequestFault] = {}
        self.gates = PartGates(self._by_request.get)
        self.transfers = part_transfers(parts, self._faults)

    def _bind(self, parts: Sequence[BoundPart]) -> None:
        self._parts = tuple(parts)
        self.calls.answer_by(self._parts)
        self._fields = SelectingFields(path for part in parts for path in part.for_fields)
        self._included = {f"step_parts/{part.name}" for part in parts if part.only_included}
        self._publishing = [part for part in parts if part.overrides("publish")]
        self._find_active()

    @property
    def halves(self) -> Sequence[BoundPart]:
        """All halves in use, of every plugin generation, in the order of their calls."""
        return self._parts

    def use(self, halves: Sequence[BoundPart]) -> None:
        """Call these halves from now on."""
        self._is_mixed = True
        self._bind(halves)

    def _of_generation(self, generation: int) -> Sequence[BoundPart]:
        if not self._is_mixed:
            return self._parts
        return [part for part in self._parts if part.serves(generation)]

    def weights_changed(self) -> None:
        """Notify the parts that workers have other weights; a fault of one is raised."""
        for part in self._parts:
            if part.overrides("weights_changed"):
                with faults_as(PluginFaultError, f"{part.source}: its weights_changed()"):
                    part.run("weights_changed")

    @property
    def block_keys(self) -> Callable[[EngineCoreRequest, range], bytes] | None:
        """Returns the keys of all parts for a span of tokens; None if no part has any."""
        keyed = [part for part in self._parts if part.overrides("block_key")]
        return functools.partial(self._block_keys, keyed) if keyed else None

    def _block_keys(
        self, keyed: Sequence[BoundPart], request: EngineCoreRequest, span: range
    ) -> bytes:
        """Return the keys of parts for a span of tokens, in any thread; empty if there are none."""
        keys: dict[str, bytes] = {}
        for part in keyed:
            try:
                key = part.half.block_key(request, span)  # not timed: times are those of one thread
                if key is not None and not isinstance(key, bytes):
                    raise TypeError(f"expected bytes or None, got {shown(key)}")
            except BaseException as cause:
                key = f"{request.request_id} shares nothing".encode()
                if (fault := part.fault("its block_key() failed", cause)) is not None:
                    self._faults[request.request_id] = fault
            if key is not None:
                keys[part.name] = key
        return msgspec.msgpack.encode(keys) if keys else b""

    def workers_started(self) -> dict[str, RequestFault]:
        """Notify the parts that worker halves were built; return requests that end with an error.

        Raises:
            HardpointError: one cannot go on, or failed.
        """
        ended: dict[str, RequestFault] = {}
        for part in self._parts:
            if not part.overrides("workers_started"):
                continue
            name = f"{part.source}: its workers_started()"
            with faults_as(PluginFaultError, name, passing=(HardpointError,)):
                faults = part.run("workers_started")
            if (defect := returns.faults_defect(faults, part.users)) is not None:
                raise PluginFaultError(f"{name} {defect}")
            ended = {**faults, **ended}
        return ended

    def __bool__(self) -> bool:
        return bool(self._parts)

    def follow(self, scheduler: Scheduler) -> None:
        """Ask a scheduler which requests are live, where an id was used again."""
        self._scheduler = scheduler

    def why_waiting(self, request_id: str) -> WaitReason | None:
        """Return why a live request got no tokens in the last plan, if the scheduler knows."""
        if self._scheduler is None:
            return None
        try:
            return self._scheduler.why_waiting(request_id)
        except NotImplementedError:  # optional for schedulers
            return None

    def of(self, request_id: str) -> Sequence[BoundPart]:
        """Return the parts that a live request uses."""
        return self._by_request.get(request_id, ())

    def add(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Let the parts check a new request, and remember which it uses.

        Returns:
            The request without the data of its media, which the caller's keeps.

        Raises:
            RequestError: it is refused; no part knows it then.
        """
        if not self._parts and not request.params.include:
            return request
        users: list[BoundPart] = []
        serving = self._of_generation(request.generation)
        if (name := request.request_id) in self._by_request:  # of one that no plan has reported
            self._end(name)
            self._again.add(name)
        try:
            argument_names = {*request.plugin_args, *map(INCLUDE, request.params.include)}
            fields = self._fields.set_in(request)
            for part in serving:
                if (
                    part.required <= argument_names
                    and not (part.for_fields and part.for_fields.isdisjoint(fields))
                    and getattr(part.original, "is_active", True)
                    and (not part.selects or call_for(part, "uses", request))
                ):
                    users.append(part)
                    if part.overrides("check"):
                        call_for(part, "check", request)
            array_forms = self._asked_for_figures(request, users, serving)
        except BaseException:
            self._refuse(request.request_id, users)
            raise
        if users:
            self._by_request[request.request_id] = users
            if array_forms:
                self._asked[request.request_id] = array_forms
            for part in users:
                part.users.add(request.request_id)
            self._find_active()
        return without_data(request) if request.features else request

    def _asked_for_figures(
        self, request: EngineCoreRequest, users: Sequence[BoundPart], serving: Sequence[BoundPart]
    ) -> dict[BoundPart, figures.ArrayForms]:
        if request.params.include or not self._included.isdisjoint(request.plugin_args):
            return figures.asked_for_figures(request, users, serving)
        return {}

    def refused(self, request_id: str) -> None:
        """Notify the parts that a request was not added after all."""
        users = self._by_request.get(request_id, [])
        self._forget(request_id)
        self._refuse(request_id, users)

    def _refuse(self, request_id: str, users: Iterable[BoundPart]) -> None:
        for part in users:
            _call_unplanned(part, "refused", request_id)

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
                made = self._call(part, plan, "begin", plan, defect=returns.data_defect)
                if made is not None:
                    data[part.key] = PartData(made, part.users_of(plan))
        self._planned = plan.step
        return data

    def needs_results(self, plan: SchedulerOutput) -> dict[str, str]:
        """Return the requests of a plan with a mask from earlier tokens, and the part's name."""
        needed: dict[str, str] = {}
        for part in self._active:
            if part.overrides("needs_results"):
                names = self._call(part, plan, "needs_results", plan, defect=returns.names_defect)
                needed |= dict.fromkeys(names or (), part.name)
        return needed

    def mask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Return the tokens that all parts allow; None if no part forbids any."""
        masks: list[tuple[BoundPart, GrammarBitmask]] = []
        for part in self._active:
            if part.overrides("mask"):
                defect = functools.partial(returns.mask_defect, users=part.planned_users, plan=plan)
                if (mask := self._call(part, plan, "mask", plan, defect=defect)) is not None:
                    masks.append((part, mask))
        if masks:
            self.notify("masked", plan, masks_by_source(masks))
        if len(masks) < 2:
            return masks[0][1] if masks else None
        return self._combined(masks)

    def _combined(self, masks: Sequence[tuple[BoundPart, GrammarBitmask]]) -> GrammarBitmask:
        combined, nothing_left = combined_masks(masks)
        for name, makers in nothing_left.items():
            named = " and ".join(str(part.source) for part in makers)
            both = " by both" if len(makers) > 1 else ""
            self._faults[name] = RequestFault(f"{named}: no token is allowed{both}")
        return combined

    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, under_way: Collection[str] = ()
    ) -> dict[str, RequestFault]:
        """Let the parts read a result; return the requests that end with an error.

        Args:
            under_way: requests of later plans, which may read what a failed worker half has let be
                written: those that use the part end, too.
        """
        ended: dict[str, RequestFault] = {}
        self._num_positions = figures.num_positions(plan, result) if self._asked else {}
        for part in self._active:
            part.forget_before(plan.step)
            if (failed := result.part_faults.get(part.key)) is not None:
                later = under_way if result.is_cache_uncertain else ()
                self._blame(part, plan, failed, later=later)
            if not part.overrides("result"):
                continue
            defect = functools.partial(returns.result_defect, users=part.planned_users)
            reports, result.part_reports = result.part_reports, part.own_reports(result)
            faults = self._call(part, plan, "result", plan, result, defect=defect) or {}
            result.part_reports = reports
            ended = take_finishes(faults, part.name, part.users, result) | ended
        for name in self._faults.keys() & plan.num_scheduled_tokens.keys():
            ended.setdefault(name, self._faults.pop(name))
        if self.gates.finishes:
            self.gates.move_finishes(result)
        return ended

    def publish(self, plan: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Let the parts complete the outputs of a step."""
        if self._asked:
            self.add_figures(plan, outputs)
        for part in self._publishing:
            if getattr(part.original, "is_active", True):
                self._call(part, plan, "publish", outputs)

    def add_figures(self, plan: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Add the figures and arrays of parts to outputs of requests that asked for them."""
        for output in (output for message in outputs.values() for output in message.outputs):
            before = self._faults.get(name := output.request_id)
            for part, forms in self._asked.get(name, {}).items():
                defect = figures.figures_defect
                part_figures = self._call(part, plan, "figures", name, defect=defect)
                limit, sampled = self._num_positions.get(name, (None, 0))
                defect = functools.partial(forms.defect, num_positions=limit)
                arrays = self._call(part, plan, "arrays", name, defect=defect)
                figures.add(output, part.name, part_figures, arrays, limit, sampled)
            if (fault := self._faults.get(name)) is not before and output.finish_reason is not None:
                figures.end_by(output, fault)  # no result follows that would end it

    def notify(self, method: str, plan: SchedulerOutput, *args: Any) -> None:
        """Call `masked`, `updated` or `lost` of the parts, about a plan."""
        for part in self._active:
            if part.overrides(method):
                self._call(part, plan, method, plan, *args)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Let the parts add their totals to the statistics of the scheduler."""
        for part in self._parts:
            _call_unplanned(part, "add_stats", stats)

    @property
    def drafting(self) -> str:
        """Names of the parts that draft tokens, for messages."""
        return " and ".join(str(part.source) for part in self._parts if part.num_draft_tokens)

    def may_draft(self) -> str | None:
        """Return the name of a part that may draft for a live request; None if none may."""
        return next((part.name for part in self._active if part.num_draft_tokens), None)

    def drafts(self, plan: SchedulerOutput) -> dict[str, list[int]]:
        """Return the drafts for the next step, after the result of a plan was processed."""
        drafts: dict[str, list[int]] = {}
        for part in self._active:
            if (limit := part.num_draft_tokens) == 0:
                continue
            defect = functools.partial(
                returns.drafts_defect, users=part.users, limit=limit, vocab_size=self._vocab_size
            )
            if (made := self._call(part, plan, "drafts", defect=defect)) is not None:
                drafts = {name: list(tokens) for name, tokens in made.items() if tokens} | drafts
        return self._limited(plan, drafts) if drafts else drafts

    def _limited(self, plan: SchedulerOutput, drafts: dict[str, list[int]]) -> dict[str, list[int]]:
        for part in self._active:
            if not part.overrides("limit_drafts"):
                continue
            part_drafts = {name: tokens for name, tokens in drafts.items() if name in part.users}
            if not part_drafts:
                continue
            defect = functools.partial(returns.draft_limits_defect, drafts=part_drafts)
            limits = self._call(part, plan, "limit_drafts", part_drafts, defect=defect)
            if limits is not None:
                drafts |= {name: drafts[name][:limit] for name, limit in limits.items()}
        return {name: tokens for name, tokens in drafts.items() if tokens}

    def wait(self) -> None:
        """Wait a moment for the events that gates need."""
        for part in self._active:
            _call_unplanned(part, "wait")

    def close(self) -> None:
        """Close all parts."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)
            stack.callback(self.blocks.close)

    def _is_of_former(self, request_id: str) -> bool:
        """Return whether a reported end belongs to an earlier request with the id of a live one."""
        if request_id not in self._again:
            return False
        live: bool | None = None
        if self._scheduler is not None:
            with suppress(NotImplementedError):  # optional for schedulers
                live = self._scheduler.live_request(request_id) is not None
        if not live:  # else it stays: the ends in a lost plan are reported again
            self._again.remove(request_id)
        return live is not False

    def _end(self, request_id: str) -> None:
        for part in self._by_request.get(request_id, ()):
            if part.overrides("ended"):
                self._for_request(part, "ended", request_id)
        self._forget(request_id)

    def _for_request(self, part: BoundPart, method: str, request_id: str) -> None:
        """Notify a part; a fault ends the request at its next result."""
        try:
            part.run(method, request_id)
        except BaseException as cause:
            if (fault := part.fault(f"its {method}() failed", cause)) is not None:
                self._faults[request_id] = fault

    def _call(
        self,
        part: BoundPart,
        plan: SchedulerOutput,
        method: str,
        *args: Any,
        defect: Callable[[Any], str | None] = lambda _: None,
    ) -> Any:
        """Return the result of a method; None after a fault, which its requests of the plan get."""
        try:
            result = part.run(method, *args)
        except BaseException as cause:
            self._blame(part, plan, f"its {method}() failed", cause)
            return None
        if (wrong := defect(result)) is not None:
            self._blame(part, plan, f"its {method}() {wrong}")
            return None
        return result

    def _blame(
        self,
        part: BoundPart,
        plan: SchedulerOutput,
        message: str,
        cause: BaseException | None = None,
        later: Collection[str] = (),
    ) -> None:
        if (fault := part.fault(message, cause)) is not None:
            for name in part.users & {*plan.num_scheduled_tokens, *later}:
                self._faults.setdefault(name, fault)

    def _forget(self, request_id: str) -> None:
        users = self._by_request.pop(request_id, None)
        self._asked.pop(request_id, None)
        self._faults.pop(request_id, None)
        self.gates.forget(request_id)
        if users:
            for part in users:
                part.users.discard(request_id)
                part.ended[request_id] = self._planned
            self._find_active()

    def _find_active(self) -> None:
        """Find the parts with users, or with hooks that are called for every plan."""
        self._active = [part for part in self._parts if part.users or part.every_plan]


def _call_unplanned(part: BoundPart, method: str, *args: Any) -> None:
    """Call a method, if the part has it, about no planned request; a fault is counted alone."""
    if part.overrides(method):
        try:
            part.run(method, *args)
        except BaseException as cause:
            part.fault(f"its {method}() failed", cause)
