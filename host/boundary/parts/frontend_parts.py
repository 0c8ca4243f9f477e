"""The frontend halves of step parts: the frontend calls all of them by one object."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from hardpoint.errors import (
    HardpointError,
    PluginConflictError,
    PluginFaultError,
    RequestError,
    shown,
)
from hardpoint.host.boundary.activity import PluginCalls
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.guard import UNWATCHED, checked
from hardpoint.host.boundary.text_guards import guarded_parser
from hardpoint.host.registry.blame import describe, faults_as, raise_unless_fault
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    IterationStats,
    ReasoningMarkers,
    StepPart,
    Tokenizer,
)
from hardpoint.plugins.component import Component, Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.step_part.engine import REQUEST_FIELDS
from hardpoint.plugins.step_part.observer import OutputObserver, PreparedPartChange
from hardpoint.plugins.step_part.part import (
    FrontendHalf,
    FrontendHalfContext,
    GivenPrompt,
    PromptReader,
)
from hardpoint.plugins.text.output_parser import OutputFormat, RequestedCalls, ToolCalls
from hardpoint.toolkit.requests.groups import read_members

from .bound_half import BoundHalf, OpenHalves, opener
from .components import Components
from .hooks import FRONTEND_HOOKS, SelectingFields
from .observers import Observers
from .output_formats import BoundFormat, OutputFormats

_PARSERS = ("reasoning_parsers", "tool_parsers")

Record = Callable[[str, str, str], None]
Validator = functools.partial[str | None]


class BoundFrontendHalf(BoundHalf[FrontendHalf]):
    """The frontend half of one part."""

    hooks, maker = FRONTEND_HOOKS, "frontend_half"
    at_start = {
        "observer": "which observes requests from their start",
        "media_tokens": "by which prompts are read",
        "read_media": "by which they are read",
    }

    def fault(self, method: str, cause: BaseException) -> str:
        """Return the message of a fault of the half.

        Raises:
            BaseException: `cause` is no fault of the part.
        """
        raise_unless_fault(cause)
        if isinstance(cause, PluginFaultError):  # of a component that the part asks
            return str(cause)
        self.state.log()
        return f"{self.source}: its {method}() failed: {describe(cause)}"


class FrontendParts:
    """The frontend halves of all parts, in their order; without any, every call does nothing.

    Attributes:
        media_tokens: media tokens of all halves, see `FrontendHalf`.
        observers: observers of all halves.
        opening: halves that open members of requests.
        faults: counts the faults of observers, and of components that halves drive.
        open: opens the halves of further parts.
    """

    def __init__(
        self,
        halves: Sequence[BoundFrontendHalf] = (),
        components: Components | None = None,
        faults: StepFaults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call the halves; the other arguments are of their contexts.

        Raises:
            PluginConflictError: several read prompts with the same key.
            PluginFaultError: the observer of one cannot be built.
        """
        self._components = components
        self.faults = faults or StepFaults()
        built = [(half, _observer(half)) for half in halves if half.overrides("observer")]
        observers = [(half.name, made, half.fault) for half, made in built if made is not None]
        self.observers = Observers(observers, self.faults, clock)
        self._validators = weakref.WeakSet[Validator]()
        self.open: OpenHalves[BoundFrontendHalf] | None = None
        self.use_halves(halves)
        self._media = {modality: half for half in halves for modality in half.half.media_tokens}
        self.media_tokens: Mapping[str, Sequence[int]] = {
            modality: tuple(half.half.media_tokens[modality])
            for modality, half in self._media.items()
        }
        self._record: Record = _record_nowhere

    @property
    def halves(self) -> Sequence[BoundFrontendHalf]:
        """All halves in use, of every plugin generation, in the order of their calls."""
        return self._halves

    def use_halves(self, halves: Sequence[BoundFrontendHalf]) -> None:
        """Call the latest of these halves from now on, earlier ones for answers of their requests.

        Raises:
            PluginConflictError: several read prompts with the same key.
        """
        latest = [half for half in halves if half.until is None]
        self._readers = _readers(latest)
        self._halves = halves
        self._formatting = [half for half in latest if half.overrides("output_format")]
        self._calling = [half for half in latest if half.overrides("prepare_calls")]
        self._preparing = [half for half in latest if half.overrides("prepare")]
        self.opening = [half for half in latest if half.overrides("members")]
        self._validating = [half for half in halves if half.overrides("validate")]
        self._fields = SelectingFields(path for half in halves for path in half.for_fields)

    @property
    def components(self) -> list[Component]:
        """The components that the halves of the latest generation drive."""
        latest = [half.half for half in self._halves if half.until is None]
        return [component for half in latest for component in half.components]

    @property
    def named_components(self) -> dict[str, str | None]:
        """The components of `FrontendHalf.named_components` of all halves."""
        components: dict[str, str | None] = {}
        for half in self._halves:
            components |= half.half.named_components if half.until is None else {}
        return components

    def prepare_changes(self, plugins: PluginSet, config: EngineConfig) -> list[PreparedPartChange]:
        """Let the halves prepare their replacements for a live change.

        Raises:
            HardpointError: one cannot be changed so; the new components of others are closed.
        """
        prepared: list[PreparedPartChange] = []
        if self._components is None:
            return prepared
        components = self._components.of(plugins)
        with ExitStack() as undo:
            for half in self._halves:
                if half.until is not None or not half.overrides("prepare_change"):
                    continue
                name = f"{half.source}: its prepare_change()"
                with faults_as(PluginFaultError, name, passing=(HardpointError,)):
                    change = half.half.prepare_change(components, config)
                if change is not None:
                    undo.callback(change.close_new)
                    prepared.append(change)
            undo.pop_all()
        return prepared

    def report_to(self, record: Record) -> None:
        """Report each fault with the part's name, the id of the request and a message."""
        self._record = record

    def use(self, plugins: PluginSet) -> None:
        """Show the halves another generation of the plugins."""
        if self._components is not None:
            self._components.use(plugins)

    def reads_prompt(self, prompt: Mapping[Any, Any]) -> bool:
        """Return whether the form of a prompt is a part's own."""
        return self._reader_of(prompt) is not None

    def _reader_of(self, prompt: Mapping[Any, Any]) -> BoundFrontendHalf | None:
        return next((half for key, half in self._readers.items() if key in prompt), None)

    def read_prompt(self, prompt: Mapping[Any, Any], reader: PromptReader) -> GivenPrompt | None:
        """Return the ids and fields of a prompt that a part reads; None for any other.

        Args:
            prompt: a copy of the caller's.
            reader: reads the rest of it.

        Raises:
            RequestError: the part refuses it, or failed.
        """
        if (half := self._reader_of(prompt)) is None:
            return None
        return self._given(half, "read_prompt", half.half.read_prompt, dict(prompt), reader)

    def _given(
        self,
        half: BoundFrontendHalf,
        name: str,
        read: Callable[..., GivenPrompt],
        *args: Any,
        limit: int | None = None,
    ) -> GivenPrompt:
        """Return the prompt that a half reads or cuts.

        Args:
            limit: most tokens of a cut prompt.
        """
        try:
            prompt = read(*args)
            if not isinstance(prompt, GivenPrompt) or not isinstance(prompt.token_ids, Sequence):
                raise TypeError(f"expected a GivenPrompt with token ids, got {shown(prompt)}")
            if limit is not None and (count := len(prompt.token_ids)) > limit:
                raise ValueError(f"expected at most {limit} token ids, got {count}")
            if not prompt.fields.keys() <= REQUEST_FIELDS.keys():
                names = shown(sorted(prompt.fields))
                raise TypeError(f"expected fields that parts make use of alone, got {names}")
        except BaseException as cause:
            self._refuse(half, name, "", cause)
        if (cut := prompt.cut) is None:
            return prompt
        return dataclasses.replace(
            prompt, cut=lambda limit: self._given(half, "cut", cut, limit, limit=limit)
        )

    def prepare(self, request: EngineCoreRequest, reasoning: ReasoningMarkers | None) -> None:
        """Check and complete a request by each half.

        Raises:
            RequestError: one refuses it, or failed.
        """
        fields = self._fields.set_in(request) if self._preparing else ()
        for half in self._preparing:
            if half.for_fields and half.for_fields.isdisjoint(fields):
                continue
            try:
                half.half.prepare(request, reasoning)
            except BaseException as cause:
                self._refuse(half, "prepare", request.request_id, cause)
            fields = self._fields.set_in(request)  # the half may have set some

    def read_media(self, modality: str, items: Sequence[tuple[str, Any]]) -> Sequence[Any]:
        """Return items of media as `read_prompt` takes them, in any thread.

        Args:
            modality: one of `media_tokens`.
            items: each with its place, which names it in messages.

        Raises:
            RequestError: the part refuses one, or failed.
            HardpointError: it cannot do its work.
        """
        half = self._media[modality]
        if not half.overrides("read_media"):
            return [item for _, item in items]
        try:
            read = half.half.read_media(modality, items)
            if not isinstance(read, Sequence) or len(read) != len(items):
                raise TypeError(f"expected {len(items)} items, got {shown(read)}")
        except BaseException as cause:
            self._refuse(half, "read_media", "", cause, HardpointError)
        return read

    def output_formats(
        self, request: EngineCoreRequest, calls: RequestedCalls | None
    ) -> OutputFormats | None:
        """Return the formats of a request's outputs, which the caller closes; None without any.

        Args:
            calls: its tools; None without any.

        Raises:
            RequestError: a part refuses the request, or failed.
        """
        formats: list[BoundFormat] = []
        markers: ReasoningMarkers | None = None
        halves = self._formatting if calls is not None else self._used(self._formatting, request)
        with ExitStack() as undo:
            for half in halves:
                try:
                    made = half.half.output_format(request, calls)
                    if made is None:
                        continue
                    if not isinstance(made, OutputFormat):
                        raise TypeError(f"expected an OutputFormat or None, got {shown(made)}")
                    undo.callback(made.close)
                    markers = markers or made.markers
                except BaseException as cause:
                    self._refuse(half, "output_format", request.request_id, cause)
                formats.append(BoundFormat(half.name, made, half.fault))
            undo.pop_all()
        return OutputFormats(formats, markers, calls) if formats else None

    def prepare_calls(self, request: EngineCoreRequest, calls: ToolCalls) -> None:
        """Complete a request that has tools by each half.

        Raises:
            RequestError: one refuses it, or failed.
        """
        for half in self._calling:
            try:
                half.half.prepare_calls(request, calls)
            except BaseException as cause:
                self._refuse(half, "prepare_calls", request.request_id, cause)

    def members(
        self, request: EngineCoreRequest, read: Callable[[GivenPrompt], GivenPrompt]
    ) -> dict[str, list[EngineCoreRequest]]:
        """Return the members that halves open for a request, by part; `read` tokenizes a prompt.

        Raises:
            RequestError: one refuses the request, or failed; or no part opens its members.
        """
        members: dict[str, list[EngineCoreRequest]] = {}
        for half in self.opening:
            arguments = request.plugin_args.get(f"step_parts/{half.name}")
            if arguments is None and half.part.named_only:
                continue
            try:
                prompts = half.half.members(request, arguments or {})
                if opened := read_members(half.name, prompts, read):
                    members[half.name] = opened
            except BaseException as cause:
                self._refuse(half, "members", request.request_id, cause)
        if unknown := sorted(request.members.keys() - members.keys()):
            raise RequestError(f"members: expected members of enabled parts, got {unknown}")
        return members

    def validator_of(self, request: EngineCoreRequest) -> Validator | None:
        """Return the validator of the answer of a request, for as long as the request is live.

        Raises:
            RequestError: a half failed.
        """
        for half in self._used(self._validating, request):
            try:
                reads = half.serves(request.generation) and half.half.reads_answer(request)
            except BaseException as cause:
                self._refuse(half, "reads_answer", request.request_id, cause, ())
            if reads:
                validator = functools.partial(self.validate, request)
                self._validators.add(validator)
                return validator
        return None

    def _used(
        self, halves: Sequence[BoundFrontendHalf], request: EngineCoreRequest
    ) -> list[BoundFrontendHalf]:
        """Return the halves that a request uses, by the fields that it sets."""
        fields = self._fields.set_in(request) if halves else ()
        return [h for h in halves if not (h.for_fields and h.for_fields.isdisjoint(fields))]

    def users_of(self, half: BoundFrontendHalf) -> list[str]:
        """Return the ids of live requests with answers that a half may validate."""
        requests = [validator.args[0] for validator in list(self._validators)]
        return [request.request_id for request in requests if half.serves(request.generation)]

    def _refuse(
        self,
        half: BoundFrontendHalf,
        method: str,
        request_id: str,
        cause: BaseException,
        passing: Any = RequestError,
    ) -> NoReturn:
        """Refuse a request for a fault; raise an exception of the class `passing` as it is."""
        if isinstance(cause, passing):
            raise cause
        message = half.fault(method, cause)
        self._record(half.name, request_id, message)
        raise RequestError(message) from cause

    def validate(self, request: EngineCoreRequest, answer: str) -> str | None:
        """Return the first flaw that a half finds in an answer; a fault of a half is one."""
        for half in self._used(self._validating, request):
            try:
                if not half.serves(request.generation) or not half.half.reads_answer(request):
                    continue
                result: str | None = half.half.validate(request, answer)
                flaw = checked(result, FrontendHalf, "validate()", half.source)
            except BaseException as cause:
                flaw = f"the answer cannot be validated: {half.fault('validate', cause)}"
                self._record(half.name, request.request_id, flaw)
            if flaw is not None:
                return flaw
        return None

    def close(self) -> None:
        """Close the halves and their parts: all of them, even if one fails."""
        with ExitStack() as stack:
            for half in self._halves:
                stack.callback(half.close)


def _readers(halves: Sequence[BoundFrontendHalf]) -> dict[str, BoundFrontendHalf]:
    """Return the halves that read prompts, by each of their keys, in their order."""
    readers: dict[str, BoundFrontendHalf] = {}
    for half in halves:
        for key in half.half.prompt_keys if half.overrides("read_prompt") else ():
            if (other := readers.setdefault(key, half)) is not half:
                raise PluginConflictError(
                    f"{other.source} and {half.source} both read prompts with {key!r}; expected "
                    f"one of them"
                )
    return readers


def _observer(half: BoundFrontendHalf) -> OutputObserver | None:
    name = f"{half.source}: its observer()"
    with faults_as(PluginFaultError, name, passing=(HardpointError,)):
        observer = half.half.observer()
        if observer is not None and not isinstance(observer, OutputObserver):
            raise TypeError(f"expected an OutputObserver or None, got {shown(observer)}")
    return observer


def _record_nowhere(part: str, request_id: str, message: str) -> None:
    """Record no fault."""


def frontend_parts(
    plugins: PluginSet,
    about: Mapping[str, Any],
    vocabulary: Callable[[], Vocabulary],
    vocab_size: int,
    encode: Callable[[str], Sequence[int]],
    clock: Callable[[], float] = time.monotonic,
    send_stats: Callable[[IterationStats], None] | None = None,
    tokenizer: Tokenizer | None = None,
) -> FrontendParts:
    """Build the frontend halves of all enabled parts, in their order.

    A part of a class without `frontend_half` is not built here.

    Args:
        about: fields of the context of the parts.
        vocabulary: see `FrontendHalfContext`.
        encode, clock, send_stats, tokenizer: see `FrontendHalfContext`.

    Raises:
        PluginError: one cannot be built, or two read the same prompts; the others are closed.
    """
    faults = StepFaults.under(about["config"].plugins)
    guard = functools.partial(guarded_parser, vocab_size=vocab_size)
    components = Components(plugins, faults.calls, dict.fromkeys(_PARSERS, guard))
    context = FrontendHalfContext(
        components=components,
        vocabulary=vocabulary,
        vocab_size=vocab_size,
        encode=encode,
        tokenizer=tokenizer,
        faults=faults,
        clock=clock,
        send_stats=send_stats,
    )

    def bind(part: StepPart, half: FrontendHalf, source: Source) -> BoundFrontendHalf:
        return BoundFrontendHalf(part, half, PluginCalls(UNWATCHED, "step_parts", source))

    open_halves = opener(about, lambda _part, _plugins: context, BoundFrontendHalf, bind)

    def open_new(
        plugins: PluginSet, entries: Sequence[PluginEntry], config: EngineConfig
    ) -> list[BoundFrontendHalf]:
        default = StepPart.frontend_half
        having = [entry for entry in entries if plugins.target(entry).frontend_half is not default]
        return open_halves(plugins, having, config)

    halves = open_new(plugins, plugins.entries("step_parts"), about["config"])
    with ExitStack() as undo:
        for half in halves:
            undo.callback(half.close)
        parts = FrontendParts(halves, components, faults, clock)
        parts.open = open_new
        undo.pop_all()
    return parts
