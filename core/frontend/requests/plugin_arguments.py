"""The arguments of a request for the components that take some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hardpoint import typed
from hardpoint.errors import shown
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts
from hardpoint.host.boundary.parts.output_formats import OutputFormats
from hardpoint.host.boundary.plugin_health import PluginHealth
from hardpoint.host.registry.discovery import check_unique
from hardpoint.host.registry.kinds import KINDS, Number
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.registry.request_arguments import (
    DEFAULTS,
    LOGITS,
    ArgumentTaker,
    Given,
    argument_key,
    prepare_arguments,
    prepares,
    skips_greedy,
    takes_arguments,
)
from hardpoint.plugins import (
    EngineCoreRequest,
    PrepareContext,
    ReasoningMarkers,
    RequestError,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.sampling.logits import FollowsBatch, LogitsPlugin
from hardpoint.plugins.text.arguments import ComponentWithArguments
from hardpoint.plugins.text.output_parser import RequestedCalls
from hardpoint.typed import ReadOnlyList, read_only

_SHAPING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "thinking_token_budget",
    "logits_processors",
)
"""Fields of SamplingParams that only a logits processor can honour."""

_PARSERS = ("reasoning_parser", "tool_parser")


class CallRules(typed.Strict):
    """Which calls of tools a grammar allows.

    Attributes:
        required: names of the tools to call at least one of; None requires no call.
        strict: names of the tools whose arguments have to fit their schemas, or the request is
            refused. For others, keywords that the grammar backend cannot enforce are left out.
        parallel: whether there may be several calls. Where no grammar sees to it, later ones are
            left out of the output.
    """

    required: Annotated[list[str], Meta(min_length=1)] | None = None
    strict: list[str] = []
    parallel: bool = True


class PluginArguments:
    """Gathers, checks and completes each request's arguments for each component.

    Args:
        parts: frontend halves of step parts, which complete requests.
    """

    def __init__(
        self,
        plugins: PluginSet,
        health: PluginHealth,
        vocab_size: int,
        tokenizer: Tokenizer,
        parts: FrontendParts,
    ) -> None:
        self._parts = parts
        self._health = health
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._gone: dict[str, int] = {}  # last generation of processors that were switched off
        self._load(plugins)

    def check(self, plugins: PluginSet) -> None:
        """Check that another generation of the plugins can be used.

        Raises:
            PluginError: a class cannot be loaded.
        """
        self._takers_of(plugins)

    def use(self, plugins: PluginSet) -> None:
        """Take the arguments of another generation of the plugins, and show it to step parts."""
        gone = {e.name: self._plugins.manifest.generation for e in self._plugins.entries(LOGITS)}
        self._parts.use(plugins)
        self._load(plugins)
        self._gone = {
            name: generation
            for name, generation in (self._gone | gone).items()
            if plugins.find(LOGITS, name) is None
        }

    def _load(self, plugins: PluginSet) -> None:
        self._takers, self._plugins = self._takers_of(plugins), plugins
        self._named_takers = self._takers_by_name(plugins)
        self._by_name: dict[str, list[ArgumentTaker]] = {}
        for taker in (*self._named_takers, *self._takers):
            for name in (taker.entry.name, f"{taker.entry.kind}/{taker.entry.name}"):
                self._by_name.setdefault(name, []).append(taker)
        self._honoured = {field for taker in self._takers for field in taker.fields}

    def _takers_by_name(self, plugins: PluginSet) -> list[ArgumentTaker]:
        """Return the takers of `FrontendHalf.named_components`, a class of several kinds once."""
        named: dict[Any, PluginEntry] = {}
        for kind, name in self._parts.named_components.items():
            if name is not None:
                entry = plugins.get(kind, name)
                named.setdefault(plugins.target(entry), entry)
        return _other_takers(plugins, named.values())

    def _takers_of(self, plugins: PluginSet) -> list[ArgumentTaker]:
        takers = [_processor_taker(plugins, entry) for entry in plugins.entries(LOGITS)]
        for kind in KINDS.values():
            if kind.takes_arguments and kind.number is not Number.BY_NAME and kind.name != LOGITS:
                takers += _other_takers(plugins, plugins.entries(kind.name))
        return takers

    def resolve(
        self,
        request: EngineCoreRequest,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        calls: CallRules | None = None,
    ) -> tuple[dict[str, Any], OutputFormats | None]:
        """Fill in, for each component that the request uses, its arguments as plain data.

        Also fills in `reasoning_ended`, and the fields for step parts.

        Args:
            tools: JSON schemas of arguments, by the name of the tool.
            calls: calls of the tools that a grammar allows.

        Returns:
            The fields of parameters that the request gives under `plugin_args`. Not only the
            processor reads them: stop strings are held back until `min_tokens`, and a greedy
            sampler is recognized by `temperature`. And the formats of its outputs, which the caller
            closes; None without any.

        Raises:
            RequestError: an argument is wrong, belongs to no enabled plugin, or asks for something
                that no enabled plugin can do; or a step part failed.
        """
        located = self._located(request.params.plugin_args)
        formats = self._resolve_all(request, located, tools, calls)
        fields: dict[str, Any] = {}
        for taker in self._takers:
            if taker.key in located:
                arguments = request.plugin_args[taker.key]
                fields |= {field: arguments[field] for field in taker.fields & arguments.keys()}
        return fields, formats

    def complete(
        self,
        request: EngineCoreRequest,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        calls: CallRules | None = None,
    ) -> OutputFormats | None:
        """Resolve the arguments of a request that brings them as a caller gives them.

        Args:
            tools, calls: as for `resolve`; the request has the grammar of its calls already.

        Returns:
            The formats of its outputs, which the caller closes; None without any.

        Raises:
            RequestError: as `resolve`.
        """
        ended = request.reasoning_ended
        located = self._located(request.plugin_args)
        formats = self._resolve_all(request, located, tools, calls, has_grammar=True)
        request.reasoning_ended = ended
        return formats

    def revise(
        self, request: EngineCoreRequest, before: EngineCoreRequest, formats: OutputFormats | None
    ) -> OutputFormats | None:
        """Resolve the arguments of a request again after a hook changed its parameters.

        Arguments that the hook changed or removed itself stay so.

        Args:
            before: the request before the hook.
            formats: formats of the outputs of that request.

        Returns:
            The formats of the changed request, which the caller closes.

        Raises:
            RequestError: as `resolve`.
        """
        located = self._located(request.plugin_args)
        request.plugin_args = {key: arguments.value for key, arguments in located.items()}
        stale = [
            taker
            for taker in self._takers
            if (
                taker.set_fields(request.params) != taker.set_fields(before.params)
                or (taker.skips_greedy and taker.key not in before.plugin_args)
            )
            and request.plugin_args.get(taker.key) == before.plugin_args.get(taker.key)
        ]
        for taker in stale:
            request.plugin_args.pop(taker.key, None)
        self._check(request.plugin_args)
        self._refuse_unhonoured(request.params)
        if not self._is_read_alike(request, before):
            formats = self._formats(request, None if formats is None else formats.requested)
        elif formats is not None:
            formats.hold()
        markers = None if formats is None else formats.markers
        try:
            if _are_equal(request.params, before.params, ("structured", *_PARSERS)):
                request.reasoning_markers = before.reasoning_markers
            else:
                request.reasoning_markers = None
            self._parts.prepare(request, markers)
            request.plugin_args |= self._resolved(request, stale, {}, markers)
        except BaseException:
            if formats is not None:
                formats.close()
            raise
        return formats

    def _is_read_alike(self, request: EngineCoreRequest, before: EngineCoreRequest) -> bool:
        """Return whether the formats of outputs are the same after a hook changed a request."""
        return _are_equal(request.params, before.params, _PARSERS) and all(
            request.plugin_args.get(taker.key) == before.plugin_args.get(taker.key)
            for taker in self._named_takers
        )

    def _formats(
        self, request: EngineCoreRequest, requested: RequestedCalls | None
    ) -> OutputFormats | None:
        """Return the formats of a request's outputs; None without any."""
        for field in _PARSERS:
            name = getattr(request.params, field)
            if name not in (None, "none") and f"{field}s" not in self._parts.named_components:
                raise RequestError(
                    f'{field}: expected "none", because no enabled step part drives {field}s, '
                    f"got {shown(name)}"
                )
        formats = self._parts.output_formats(request, requested)
        if requested is not None and (formats is None or formats.calls is None):
            if formats is not None:
                formats.close()
            raise RequestError(
                "tools: no parser finds calls in the output of the model; set tools.parser "
                '("hermes", for example)'
            )
        return formats

    def _resolve_all(
        self,
        request: EngineCoreRequest,
        located: Mapping[str, Given],
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        calls: CallRules | None = None,
        *,
        has_grammar: bool = False,
    ) -> OutputFormats | None:
        """Fill in a request's resolved arguments, and the fields for step parts and reasoning.

        Args:
            has_grammar: whether the request has the grammar of its calls already.

        Returns:
            The formats of its outputs, which the caller closes; None without any.
        """
        self._refuse_unhonoured(request.params)
        request.plugin_args = {}
        if self._named_takers:
            request.plugin_args = self._resolved(request, self._named_takers, located, None)
        is_free = not tools and calls is None
        formats = self._formats(request, None if is_free else _requested_calls(tools, calls))
        markers = None if formats is None else formats.markers
        try:
            if formats is not None and formats.calls is not None and not has_grammar:
                self._parts.prepare_calls(request, formats.calls)
            if markers is not None:
                request.reasoning_ended = markers.ended(request.known_prompt_ids)
            self._parts.prepare(request, markers)
            request.plugin_args |= self._resolved(request, self._takers, located, markers)
        except BaseException:
            if formats is not None:
                formats.close()
            raise
        return formats

    def _resolved(
        self,
        request: EngineCoreRequest,
        takers: Sequence[ArgumentTaker],
        located: Mapping[str, Given],
        reasoning: ReasoningMarkers | None,
    ) -> dict[str, dict[str, Any]]:
        resolved = {}
        for taker in self._used(takers, request.params, located):
            arguments, path = taker.arguments(request.params, located.get(taker.key))
            name = taker.entry.name
            if (name in self._health.ended or name in self._health.deadly) and taker.is_processor:
                self._health.check(name)
            if prepares(taker.cls):
                context = PrepareContext(
                    options=taker.options,
                    params=read_only(request.params),
                    prompt_token_ids=ReadOnlyList(request.known_prompt_ids),
                    stop_token_ids=request.stop_token_ids,
                    vocab_size=self._vocab_size,
                    tokenizer=self._tokenizer,
                    reasoning=reasoning,
                )
                arguments = prepare_arguments(taker.source, taker.cls, arguments, context, path)
            resolved[taker.key] = msgspec.to_builtins(arguments, str_keys=False)
        return resolved

    def _used(
        self, takers: Sequence[ArgumentTaker], params: SamplingParams, located: Mapping[str, Given]
    ) -> Iterator[ArgumentTaker]:
        changed = {f for f in self._honoured if getattr(params, f) != getattr(DEFAULTS, f)}
        is_greedy = params.greedy
        for taker in takers:
            if (
                taker.key in located
                or not (changed.isdisjoint(taker.fields) or (is_greedy and taker.skips_greedy))
                or taker.uses
                or (taker.uses is None and taker.is_asked_for(params))
            ):
                yield taker

    def _check(self, plugin_args: Mapping[str, Any]) -> None:
        for taker in (*self._named_takers, *self._takers):
            if taker.key in plugin_args:
                if taker.is_processor:
                    self._health.check(taker.entry.name)
                taker.checked(plugin_args[taker.key])

    def _located(self, plugin_args: Mapping[str, Any]) -> dict[str, Given]:
        """Return the arguments that a request gives, by the key of their component."""
        located: dict[str, Given] = {}
        for name, value in plugin_args.items():
            path = f"plugin_args.{name}"
            takers = self._by_name.get(name, ())
            if not takers:
                raise RequestError(f"{path}: {self._why_unknown(name)}")
            if len(takers) > 1:
                choices = " or ".join(f"{taker.entry.kind}/{taker.entry.name}" for taker in takers)
                raise RequestError(f"{path}: could be {choices}")
            check_unique(takers[0].entry, path, RequestError)
            key = takers[0].key
            if key in located:
                raise RequestError(f"{path}: given twice, here and by {located[key].path}")
            located[key] = Given(path, value)
        return located

    def _why_unknown(self, name: str) -> str:
        labels = (f"{entry.kind}/{entry.name}" for entry in self._plugins.manifest.entries)
        named = [label for label in labels if name in (label, label.partition("/")[2])]
        if named:
            return f"{' and '.join(named)} {'takes' if len(named) == 1 else 'take'} no arguments"
        if name in self._gone:
            return (
                f"the logits processor {name!r} was switched off while the engine runs, after "
                f"generation {self._gone[name]} of the plugins"
            )
        return (
            f"no enabled plugin of that name takes arguments"
            f"{typed.suggest(name, list(self._by_name))}{self._plugins.hint(name, LOGITS)}"
        )

    def _refuse_unhonoured(self, params: SamplingParams) -> None:
        for field in _SHAPING_FIELDS:
            if field in self._honoured:
                continue
            value = getattr(params, field)
            if value == getattr(DEFAULTS, field):
                continue
            if field == "temperature" and params.greedy:  # the sampler's own
                continue
            raise RequestError(
                f"{field}: no enabled logits processor applies it, so {value!r} would be "
                f"ignored; enable one, or leave it at {getattr(DEFAULTS, field)!r}"
            )


def _requested_calls(
    tools: Mapping[str, Mapping[str, Any]] | None, calls: CallRules | None
) -> RequestedCalls:
    if not tools:
        raise RequestError("calls: expected none without tools")
    rules = calls or CallRules()
    return RequestedCalls(
        tools=tools, required=rules.required, strict=rules.strict, parallel=rules.parallel
    )


def _are_equal(params: SamplingParams, before: SamplingParams, fields: Iterable[str]) -> bool:
    return all(getattr(params, name) == getattr(before, name) for name in fields)


def _processor_taker(plugins: PluginSet, entry: PluginEntry) -> ArgumentTaker:
    cls: type[LogitsPlugin] = plugins.target(entry)
    default = getattr(cls.uses, "__func__", None) is vars(LogitsPlugin)["uses"].__func__
    return ArgumentTaker(
        entry,
        cls,
        plugins.options(entry),
        argument_key(entry.kind, entry.name),
        frozenset(cls.params_fields),
        cls.uses(DEFAULTS) if default else None,
        skips_greedy=skips_greedy(cls) and not _has_state(cls),
    )


def _has_state(cls: type[LogitsPlugin]) -> bool:
    return issubclass(cls, FollowsBatch) or any(
        getattr(cls, name) is not getattr(LogitsPlugin, name) for name in ("start", "start_row")
    )


def _other_takers(plugins: PluginSet, entries: Iterable[PluginEntry]) -> list[ArgumentTaker]:
    targets: list[tuple[PluginEntry, type[ComponentWithArguments]]] = [
        (entry, plugins.target(entry)) for entry in entries
    ]
    return [
        ArgumentTaker(
            entry,
            cls,
            plugins.options(entry),
            argument_key(entry.kind, entry.name),
            frozenset(),
            prepares(cls) and not cls.named_only,
        )
        for entry, cls in targets
        if takes_arguments(cls)
    ]
