"""Adapters of components that were written for contract 1 of kinds that have contract 2.

An adapter comes before the component's own class in the order of inheritance. It changes what the
component's methods get and return where its class has the first form of contract 1. What has the
members of contract 2 already is left as it is.

`hardpoint.plugins` gives the names in `__all__`, which contract 2 lacks, to code that imports them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import msgspec

from hardpoint.errors import ConfigError, RequestError
from hardpoint.host.registry.kinds import PluginKind
from hardpoint.plugins.component import Source
from hardpoint.plugins.executor import ExecutorContext, Worker, WorkerInfo, open_worker
from hardpoint.plugins.kv_cache import EvictionPolicy
from hardpoint.plugins.output_parser import (
    ContentText,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    ParserRequest,
    ReasoningText,
    Role,
)
from hardpoint.plugins.requests.markers import ReasoningMarkers
from hardpoint.plugins.requests.request import Request
from hardpoint.plugins.scheduling.scheduler import SchedulerContext

if TYPE_CHECKING:
    from hardpoint.plugins.requests import EngineCoreRequest
    from hardpoint.plugins.requests.plan import SchedulerOutput
    from hardpoint.plugins.scheduling.scheduler import Gates

__all__ = ["CachedBlock", "DraftTokenIds", "Grammars", "ReasoningContext", "ReasoningParser"]

C = TypeVar("C")

_FOR = 1
"""The contract whose components are adapted."""

ReasoningContext = OutputParserContext


class CachedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block with cached content, as `EvictionPolicy.released` of contract 1 gets it.

    Attributes:
        block_id: its number.
        depth: its position in its chain, in blocks from the start.
    """

    block_id: int
    depth: int


class DraftTokenIds(msgspec.Struct, frozen=True):
    """Draft tokens of an executor, which step parts draft now; nothing reads them.

    Attributes:
        draft_token_ids: one list per request id.
    """

    request_ids: list[str]
    draft_token_ids: list[list[int]]


class Grammars(Protocol):
    """The grammars of structured output, for a scheduler of contract 1.

    The engine follows the tokens of a request by its `output_token_ids`, and forgets the requests
    that a plan reports as ended.
    """

    def uses(self, request: Request) -> bool:
        """Return whether a grammar constrains a request."""

    def ready(self, request: Request) -> bool:
        """Return whether the grammar of a request is compiled.

        Raises:
            RequestError: it cannot be compiled; the request ends with this message.
        """


class ReasoningParser(OutputParser):
    """The interface of reasoning parsers at contract 1: it splits whole outputs.

    A class of it has `markers`, whose `start` and `end` are the token ids of one marker each, and
    `split`, from a text to reasoning or None, and content.
    """

    roles: ClassVar[tuple[Role, ...]] = ("reasoning",)

    @abstractmethod
    def split(self, text: str) -> tuple[str | None, str]:  # type: ignore[override]
        """Return a whole output as (reasoning, content); reasoning is None if there is none."""

    def open(self, request: ParserRequest) -> WholeOutput:  # noqa: ARG002
        """Return the state of a new output, which is split at its end."""
        return WholeOutput(self)


class WholeOutput:
    """The state of an output for a parser that reads complete outputs only.

    Attributes:
        in_reasoning: is not known before the end.
    """

    in_reasoning = False

    def __init__(self, parser: ReasoningParser) -> None:
        self._parser = parser
        self._special = {i: text for text, i in parser.context.tokenizer.special_tokens.items()}
        self._pieces: list[str] = []

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Keep a piece of text."""
        self._pieces.append(text)
        return ()

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Keep the text of a special token; the text of a marker also if outputs do not show it."""
        is_marker = token_id in self._parser.token_ids
        self._pieces.append(text or (self._special.get(token_id, "") if is_marker else ""))
        return ()

    def finish(self) -> Sequence[OutputEvent]:
        """Split the output."""
        reasoning, content = self._parser.split("".join(self._pieces))
        events: list[OutputEvent] = [] if reasoning is None else [ReasoningText(reasoning)]
        return [*events, ContentText(content)] if content else events


def adapt_earlier(target: Any, kind: PluginKind) -> Any:
    """Return a class of contract 1 adapted to the engine; anything else unchanged."""
    is_earlier = kind.contract == _FOR + 1 and inspect.isclass(target)
    if not is_earlier or vars(target).get("contract") != _FOR or is_adapted(target):
        return target
    fits, adapter = _ADAPTERS.get(kind.name, (lambda _: False, object))
    if not fits(target):
        return target
    names = ("contract", "__module__", "__qualname__", "__doc__")
    namespace = {name: vars(target)[name] for name in names if name in vars(target)}
    return type(target)(target.__name__, (adapter, target), namespace)


def is_adapted(target: Any) -> bool:
    """Return whether a class is an adapted one."""
    return inspect.isclass(target) and issubclass(target, _Adapter)


def warn_of_earlier(enabled: Iterable[tuple[PluginKind, Source, Any]]) -> list[str]:
    """Return a warning for each enabled component of a contract before the current one."""
    return [
        f"{source}: it states contract {target.contract} of {kind.name}, and runs as before until "
        f"hardpoint 0.3; the current one is {kind.contract}: see docs/contract-history.md"
        for kind, source, target in enabled
        if target.contract < kind.contract
    ]


def context_for(target: type, context: C) -> C:
    """Return the context for a component of a class; of contract 1 for an adapted class."""
    return target.convert_context(context) if issubclass(target, _Adapter) else context


class _Adapter:
    """Base of the adapters; the component's class comes after it."""

    @classmethod
    def convert_context(cls, context: Any) -> Any:
        return context


class _GatesAsGrammars:
    """The gates as grammars: a request waits while any part holds it back."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    def uses(self, request: Request) -> bool:
        return self._gates.holds(request)

    def ready(self, request: Request) -> bool:
        return self._gates.wait_reason(request) is None


class _Extended:
    """An object with the method that contract 1 had besides, which a derived class adds."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Connector(_Extended):
    """The transfers as the connector of contract 1, which also makes the data of plans."""

    def build_connector_meta(self, plan: SchedulerOutput) -> None:
        """Return None: the step part's `begin` gives the data of a plan."""


class _KVCache(_Extended):
    """The KV cache of contract 1."""

    def num_common_prefix_blocks(self, running: Sequence[Request]) -> list[int]:  # noqa: ARG002
        return [0] * len(self._original.groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SchedulerContext(SchedulerContext):
    """The context of a scheduler of contract 1.

    Attributes:
        connector: the transfers.
        grammars: the gates.
    """

    connector: Any = None
    grammars: Grammars | None = None

    @classmethod
    def of(cls, context: SchedulerContext) -> _SchedulerContext:
        if isinstance(context, cls):
            return context
        fields = {item.name: getattr(context, item.name) for item in dataclasses.fields(context)}
        gates, transfers = context.gates, context.transfers
        fields["kv_cache"] = _KVCache(context.kv_cache)
        return cls(
            **fields,
            connector=None if transfers is None else _Connector(transfers),
            grammars=None if gates is None else _GatesAsGrammars(gates),
        )


class _Scheduler(_Adapter):
    """A scheduler that may refuse grammars, which contract 1 gave only where there were some."""

    _refuses_gates = False

    @classmethod
    def convert_context(cls, context: Any) -> Any:
        return _SchedulerContext.of(context)

    def __init__(self, context: SchedulerContext) -> None:
        earlier = self.convert_context(context)
        try:
            super().__init__(earlier)  # type: ignore[call-arg]
        except ConfigError as refused:
            if not _accepts(super().__init__, earlier):
                raise refused from None
            self.context, self._refuses_gates = earlier, True

    def add_request(self, request: EngineCoreRequest) -> None:
        gates = self.context.gates
        if self._refuses_gates and gates is not None and gates.holds(Request(request)):
            raise RequestError(
                f"the scheduler {self.context.name!r} refuses grammars, and this request has one, "
                f"or another part of the step holds it back"
            )
        super().add_request(request)  # type: ignore[misc]


def _accepts(init: Callable[..., None], context: _SchedulerContext) -> bool:
    try:
        init(dataclasses.replace(context, grammars=None))
    except ConfigError:
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ExecutorContext(ExecutorContext):
    """The context of an executor of contract 1, which opens workers."""

    def create_worker(self, rank: int) -> Worker:
        return open_worker(self.launch(rank), self.progress)


class _Executor(_Adapter):
    """An executor with a `start` that may return the figures of the tightest worker alone."""

    _has_started = False

    @classmethod
    def convert_context(cls, context: Any) -> Any:
        if isinstance(context, _ExecutorContext):
            return context
        fields = {item.name: getattr(context, item.name) for item in dataclasses.fields(context)}
        return _ExecutorContext(**fields)

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(self.convert_context(context))  # type: ignore[call-arg]

    def start(self) -> Sequence[WorkerInfo]:
        info = super().start()  # type: ignore[misc]
        self._has_started = True
        return [info] if isinstance(info, WorkerInfo) else info

    def close(self) -> None:
        # Without a start, there may be nothing yet of what it closes.
        unstarted = contextlib.suppress(Exception)
        with contextlib.nullcontext() if self._has_started else unstarted:
            super().close()  # type: ignore[misc]


class _Eviction(_Adapter):
    """An eviction policy that gets blocks, and no reason when candidates leave."""

    context: Any

    def released(self, block_ids: Sequence[int]) -> None:
        depth = self.context.blocks.depth
        super().released([CachedBlock(block, depth(block)) for block in block_ids])  # type: ignore[misc]

    def dropped(self, block_ids: Sequence[int]) -> None:
        super().taken(block_ids)  # type: ignore[misc]


class _Reasoning(_Adapter):
    """A reasoning parser that splits whole outputs, with one marker for each end."""

    context: Any

    def markers(self) -> ReasoningMarkers:
        markers = super().markers()  # type: ignore[misc]
        return ReasoningMarkers(start=_sequences(markers.start), end=_sequences(markers.end))

    @cached_property
    def token_ids(self) -> frozenset[int]:
        special = frozenset(self.context.tokenizer.special_tokens.values())
        markers = self.markers()
        return special & {ids[0] for ids in (*markers.start, *markers.end) if len(ids) == 1}


def _sequences(marker: Any) -> tuple[tuple[int, ...], ...]:
    ids = tuple(marker)
    return ids if any(not isinstance(token, int) for token in ids) else ((ids,) if ids else ())


def _lacks_dropped(target: type) -> bool:
    return getattr(target, "dropped", None) is EvictionPolicy.dropped


_ADAPTERS: dict[str, tuple[Callable[[type], bool], type]] = {
    "schedulers": (lambda _: True, _Scheduler),
    "executors": (lambda _: True, _Executor),
    "eviction_policies": (_lacks_dropped, _Eviction),
    "reasoning_parsers": (lambda target: issubclass(target, ReasoningParser), _Reasoning),
}
"""By kind: which classes of contract 1 have its first form, and their adapter."""
