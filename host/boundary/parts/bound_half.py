"""The halves of step parts with their recorded calls, for the parts of each process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Generic, TypeVar

from hardpoint.errors import HardpointError, PluginFaultError, RequestError, shown
from hardpoint.host.boundary.activity import PluginCalls
from hardpoint.host.boundary.errors import close_named, kind_of, naming_caller
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.registry.blame import (
    StateAtFault,
    close_if_failed,
    describe,
    faults_as,
    raise_unless_fault,
)
from hardpoint.host.registry.loading import keeping_torch
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    EngineConfig,
    EngineHalf,
    FrontendHalf,
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
    StepPart,
    StepPartContext,
    WorkerHalf,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.sampling.rows import DraftedStep
from hardpoint.plugins.step_part.engine import REQUEST_FIELDS
from hardpoint.plugins.step_part.engine_hooks import EngineHooks

from .hooks import ENGINE_HOOKS, WORKER_HOOKS, HookTable, selecting_fields

_log = logging.getLogger("hardpoint")

HalfT = TypeVar("HalfT", FrontendHalf, EngineHalf, WorkerHalf)

IN_LAYERS = ("around_layers", "embedded", "linear", "added", "skips")
"""Methods of a worker half that are called in the layers of a step."""

INCLUDE = "include {}".format
"""Returns how `BoundPart.required` has a name in the `include` of a request."""

_SKIPPED = "the step goes on without it"
_ENDED = "the requests that use it end"


class BoundHalf(Generic[HalfT]):
    """A half of a step part, with recorded and timed methods.

    Attributes:
        name: name of the part.
        half: the half, with the defaults of the hooks that it does not have.
        original: the half as the part made it.
        source: names the part in messages.
        moves_blocks: see `StepPart.moves_blocks`.
        part: the part.
        for_fields: paths of the fields that select its requests; empty if none do.
        calls: record and time its methods.
        state: its state, for the log.
        key: names the half among those of all generations of the plugins: of one that a live change
            has brought, its name with the generation.
        since: the generation from which on requests use it; 0 without a live change.
        until: the generation from which on requests do not use it; None if they do.
    """

    hooks: ClassVar[HookTable]
    maker: ClassVar[str]
    """Name of the part's method that returns the half."""
    at_start: ClassVar[Mapping[str, str]] = {}
    """Why a half that has a method, or sets an attribute, can not be changed live, by its name."""

    def __init__(self, part: StepPart, half: object, calls: PluginCalls) -> None:
        self._implemented = self.hooks.implemented(half)
        self.half: HalfT = self.hooks.completed(half, self._implemented)
        self.original = half
        self.name, self.source = part.name, calls.source
        self.moves_blocks = part.moves_blocks
        self.part, self.calls, self.for_fields = part, calls, selecting_fields(half)
        self.state = StateAtFault(part, calls.source)
        self.key, self.since = part.name, 0
        self.until: int | None = None

    def begin_with(self, generation: int) -> None:
        """Serve the requests of a generation of the plugins, and later ones."""
        self.key, self.since = f"{self.name}@{generation}", generation

    def serves(self, generation: int) -> bool:
        """Return whether requests of a generation of the plugins use the part; 0 is the latest."""
        if generation == 0:
            return self.until is None
        return self.since <= generation and (self.until is None or generation < self.until)

    @property
    def why_fixed(self) -> str | None:
        """Why the half can not be changed while the engine runs; None if it can."""
        for name, why in self.at_start.items():
            value, default = getattr(self.half, name), getattr(self.hooks.defaults, name)
            if name in self._implemented or (not callable(default) and value and value != default):
                return f"its {self.maker} has {name}, {why}"
        return None

    def overrides(self, method: str) -> bool:
        """Return whether the half has a hook, and not its default."""
        return method in self._implemented

    def run(self, method: str, *args: Any, function: Callable[..., Any] | None = None) -> Any:
        """Call a method of the half, or `function` in its place."""
        return self.calls.run(method, function or getattr(self.half, method), *args)

    def close(self) -> None:
        """Close the half and the part."""
        with ExitStack() as stack:
            stack.callback(close_named, self.source, self.part.close)
            stack.callback(close_named, self.source, self.half.close)


BoundT = TypeVar("BoundT", bound=BoundHalf[Any])

OpenHalves = Callable[[PluginSet, Sequence[PluginEntry], EngineConfig], list[BoundT]]
"""Builds the parts of entries and their halves in this process, at the start and for a live change.

Raises PluginError if one cannot be built, and closes the others.
"""


def opener(
    about: Mapping[str, Any],
    context: Callable[[StepPart, PluginSet], Any],
    cls: type[BoundT],
    bind: Callable[[StepPart, Any, Source], BoundT],
) -> OpenHalves[BoundT]:
    """Return the function that opens halves.

    Args:
        about: fields of the context of the parts, besides the configuration.
        bind: returns an object of it, which closes the half and its part.
    """

    def open_halves(
        plugins: PluginSet, entries: Sequence[PluginEntry], config: EngineConfig
    ) -> list[BoundT]:
        bound: list[BoundT] = []
        with ExitStack() as undo:
            for entry in entries:
                fields = {**about, "config": config}
                part: StepPart = plugins.create(entry, StepPartContext, **fields)
                close = functools.partial(close_named, entry.source, part.close)
                with ExitStack() as unbound:
                    close_if_failed(unbound, close)
                    half = _made(part, entry.source, context(part, plugins), cls)
                    if half is not None:
                        bound.append(bind(part, half, entry.source))
                        close_if_failed(undo, bound[-1].close)
                    unbound.pop_all()
                if half is None:
                    close()
            undo.pop_all()
        return bound

    return open_halves


def request_fields(plugins: PluginSet, config: EngineConfig) -> frozenset[str]:
    """Return the optional fields of requests that step parts make use of.

    Raises:
        PluginFaultError: a part failed, or returned others than these.
    """
    names: set[str] = set()
    for entry in plugins.entries("step_parts"):
        name = f"{entry.source}: its request_fields()"
        with faults_as(PluginFaultError, name):
            fields = tuple(plugins.target(entry).request_fields(config))
        if not set(fields) <= REQUEST_FIELDS.keys():
            expected = ", ".join(sorted(REQUEST_FIELDS))
            raise PluginFaultError(f"{name} gave {shown(fields)}, expected some of {expected}")
        names.update(fields)
    return frozenset(names)


def _made(part: StepPart, source: Source, context: Any, cls: type[BoundHalf[Any]]) -> Any:
    """Return the half of a part; None if it has none."""
    name = f"{source}: its {cls.maker}()"
    with (
        naming_caller(),
        faults_as(PluginFaultError, name, passing=(HardpointError,)),
        keeping_torch(source, cls.maker),
    ):
        half = getattr(part, cls.maker)(context)
    if half is None:
        return None
    if (defect := cls.hooks.defect(half)) is not None:
        raise PluginFaultError(f"{name} {defect}")
    if isinstance(half, cls.hooks.defaults):  # a class of before there were protocols runs on
        for wrong in cls.hooks.misnamed(half, cls.hooks.implemented(half)):
            _log.warning("%s gave a %s whose %s", name, type(half).__name__, wrong)
    return half


class BoundPart(BoundHalf[EngineHalf]):
    """The engine's half of one part, with the requests that use it.

    Attributes:
        users: ids of live requests that use it.
        selects: whether only the requests with True from `uses` use it.
        ended: ids of ended requests, by the last step with a plan that may have them.
        required: what a request has to give to use the part: the key of its arguments, and
            `INCLUDE` of the part's name.
    """

    hooks, maker = ENGINE_HOOKS, "engine_half"
    at_start = {
        "block_key": "on which the keys of cached blocks depend",
        "get_num_new_matched_tokens": "which moves blocks of the KV cache",
        "encoder_cache": "which the scheduler reserves room in",
        "num_draft_tokens": "for which the engine makes room when it starts",
        "tasks": "which the engine reports as its tasks",
        "workers_started": "which initializes workers when they start",
    }

    def __init__(
        self, part: StepPart, half: EngineHooks, source: Source, faults: StepFaults
    ) -> None:
        super().__init__(part, half, faults.calls("step_parts", source))
        self.users = set[str]()
        self.selects = self.overrides("uses")
        self.ended: dict[str, int] = {}
        self._scope, self._faults = part.fault_scope, faults
        self.capacity = dict(self.half.capacity)
        self.every_plan = self.half.every_plan
        self.only_included = is_included = self.half.only_included
        conditions = {f"step_parts/{part.name}": part.named_only, INCLUDE(part.name): is_included}
        self.required = frozenset(name for name, is_required in conditions.items() if is_required)
        self.num_draft_tokens = self.half.num_draft_tokens
        self.num_lookahead_tokens = self.half.num_lookahead_tokens

    @property
    def planned_users(self) -> Collection[str]:
        """The users that plans under way may have; some may have ended since."""
        return self.users | self.ended.keys() if self.ended else self.users

    def forget_before(self, step: int) -> None:
        """Forget the ended users that the plan of a step, and later ones, cannot have."""
        if self.ended:
            self.ended = {name: last for name, last in self.ended.items() if last >= step}

    def users_of(self, plan: SchedulerOutput) -> list[str] | None:
        """Return the requests of a plan that use the part; None stands for all of them."""
        if self.every_plan:
            return None
        return [name for name in plan.num_scheduled_tokens if name in self.users]

    def own_reports(self, result: ModelRunnerOutput) -> dict[str, dict[int, bytes]]:
        """Return the reports of a result, with the reports of its worker halves under its name."""
        reports = result.part_reports
        if self.key == self.name:
            return reports
        return {**reports, self.name: reports.get(self.key, {})}

    def fault(self, message: str, cause: BaseException | None = None) -> RequestFault | None:
        """Return the fault of the requests that use the part; None where the step goes on.

        Raises:
            PluginFaultError: the scope of the part's faults is the engine.
            BaseException: `cause` is no fault of the part.
        """
        if cause is not None:
            raise_unless_fault(cause)
            if self._scope == "engine" and isinstance(cause, PluginFaultError):
                raise cause  # of a component that the part drives, which it names
            message = f"{message}: {describe(cause)}"
        message = f"{self.source}: {message}"
        if self._scope == "engine":
            raise PluginFaultError(message) from cause
        goes_on = self._scope == "step"
        self.state.log()
        self._faults.note(self.source.name, message, cause, _SKIPPED if goes_on else _ENDED)
        return None if goes_on else RequestFault(message, self.name)


def call_for(part: BoundPart, method: str, *args: Any) -> Any:
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


class BoundWorkerHalf(BoundHalf[WorkerHalf]):
    """The worker half of one part."""

    hooks, maker = WORKER_HOOKS, "worker_half"
    at_start = {
        "memory": "for which workers leave room when they start",
        "around_model": "which replaces the model's forward pass",
        "cache_allocated": "which needs the KV cache when it is allocated",
        "block_memory": "which belongs to the blocks of the KV cache",
        "embedded": "which the model's trial step has to call",
        "linear": "which the model's trial step has to call",
        "added": "which the model's trial step has to call",
        "verify_drafts": "which verifies the drafts of all parts",
        "idle": "which workers are asked for when they start",
        "take_attention_weights": "for which the attention backend is checked when workers start",
        "packs": "for which inputs are laid out when the model is loaded",
        "encodes": "for which the model gets its encoder",
    }

    @property
    def is_in_layers(self) -> bool:
        """Whether the half is called in the layers of a step."""
        return any(map(self.overrides, IN_LAYERS))

    def checked(self, method: str, *args: Any) -> Any:
        """Call a method of the half outside of a step.

        Raises:
            PluginFaultError: it failed.
        """
        try:
            return self.run(method, *args)
        except BaseException as cause:
            raise_unless_fault(cause)
            # It imports torch, which a program may not have imported when it imports this.
            from hardpoint.host.system.memory import is_out_of_memory  # noqa: PLC0415

            if isinstance(cause, HardpointError) or is_out_of_memory(cause):
                raise
            raise PluginFaultError(
                f"{self.source}: its {method}() failed: {describe(cause)}"
            ) from cause

    def verify_drafts(
        self, step: DraftedStep, defect: Callable[[object], str | None]
    ) -> Sequence[int]:
        """Return how many drafts of each request the half accepts; `defect` checks them."""
        accepted: Sequence[int] = self.checked("verify_drafts", step)
        if (expected := defect(accepted)) is not None:
            raise self.wrong("verify_drafts", accepted, expected)
        return accepted

    def combine(self, rows: Any, arguments: Mapping[str, Any]) -> Any:
        """Return the combined logits of a request and its members, or a fault."""
        form = form_of(rows[0])
        try:
            combined = self.run("combine", rows, arguments)
            if form_of(combined) != form:
                raise ValueError(f"expected {form}, got {form_of(combined)}")
        except BaseException as cause:
            raise_unless_fault(cause)
            self.state.log()
            return RequestFault(
                f"{self.source}: its combine() failed: {describe(cause)}", self.name
            )
        return combined

    def answer(self, message: bytes) -> tuple[str | None, bytes]:
        """Return None and the half's answer to a call, or kind and text of an error.

        An exception would end an executor of several ranks.
        """
        try:
            answer = self.checked("call", message)
            if not isinstance(answer, bytes):
                raise self.wrong("call", answer, "expected bytes")
        except HardpointError as error:
            return kind_of(error), str(error).encode()
        return None, answer

    def wrong(self, method: str, got: Any, expected: str) -> PluginFaultError:
        """Return the fault of a half for a wrong result of a method."""
        return PluginFaultError(f"{self.source}: its {method}() gave {form_of(got)}, {expected}")


def form_of(value: object) -> str:
    """Return shape or type of a value, for messages."""
    shape = getattr(value, "shape", None)
    if shape is not None and type(value).__module__.partition(".")[0] == "torch":
        return f"a tensor {list(shape)}"
    return shown(value)
