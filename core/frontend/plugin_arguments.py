"""The arguments of a request for the components that take some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from hardpoint.plugins import (
    EngineCoreRequest,
    HardpointError,
    PrepareContext,
    ReasoningMarkers,
    RequestError,
    SamplingParams,
    Tokenizer,
    typed,
)
from hardpoint.plugins.arguments import ComponentWithArguments, prepared_type
from hardpoint.plugins.config import GrammarConfig
from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.plugins.manifest import PluginEntry
from hardpoint.plugins.read_only import ReadOnlyList, read_only
from hardpoint.plugins.structured import StructuralTag, StructuredOutputs
from hardpoint.registry.blame import describe, raise_unless_fault
from hardpoint.registry.guards import GuardedOutputParser, open_parser
from hardpoint.registry.plugin_set import PluginSet
from hardpoint.registry.request_arguments import (
    argument_key,
    convert_arguments,
    prepare_arguments,
    prepares,
    takes_arguments,
)

from .output_parts import OutputParsers
from .plugin_health import PluginHealth

_DEFAULTS = SamplingParams()
_LOGITS = "logits_processors"

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


class CallRules(typed.Strict):
    """Which calls of tools a grammar allows.

    Attributes:
        required: names of the tools, one of which has to be called; None requires no call.
        strict: names of the tools whose arguments have to fit their schemas, or the request is
            refused. For others, keywords that the grammar backend cannot enforce are left out.
        parallel: whether there may be several calls. Where no grammar sees to it, later ones are
            left out of the output.
    """

    required: Annotated[list[str], Meta(min_length=1)] | None = None
    strict: list[str] = []
    parallel: bool = True


@dataclass(frozen=True)
class _User:
    """A component that takes arguments.

    Attributes:
        key: of its arguments in `EngineCoreRequest.plugin_args`.
        fields: of SamplingParams that are its own.
        uses: whether requests without arguments use it; None if the class decides by request. Of a
            component that every request uses: whether its `prepare` makes arguments for them.
    """

    entry: PluginEntry
    cls: Any
    options: Any
    key: str
    fields: frozenset[str]
    uses: bool | None

    @property
    def is_processor(self) -> bool:
        """Whether it is a logits processor."""
        return self.entry.kind == _LOGITS


class _Given(NamedTuple):
    """The arguments that a request gives for a component, and their path."""

    path: str
    value: Any


class PluginArguments:
    """Gathers, checks and completes each request's arguments for each component."""

    def __init__(
        self,
        plugins: PluginSet,
        health: PluginHealth,
        vocab_size: int,
        tokenizer: Tokenizer,
        parsers: OutputParsers,
        grammar: GrammarConfig,
        why_no_grammars: str | None = None,
    ) -> None:
        """Load the classes; instances of most live elsewhere.

        Args:
            parsers: of requests that give them no arguments.
            grammar: how structured output is configured.
            why_no_grammars: the reason if the engine has no grammars; None if it has.
        """
        self._grammar, self._why_no_grammars = grammar, why_no_grammars
        self._health = health
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._shared = parsers
        self._chosen: dict[tuple[str, str], GuardedOutputParser] = {}  # by name and FQCN
        self.use(plugins)

    def use(self, plugins: PluginSet) -> None:
        """Take the arguments of another generation of the plugins."""
        self._plugins = plugins
        self._users = [_processor(plugins, entry) for entry in plugins.entries(_LOGITS)]
        for kind in ("samplers", "scheduling_policies"):
            self._users += _users(plugins, plugins.entries(kind))
        self._parsers = _users(plugins, self._shared.entries(plugins))
        self._by_name: dict[str, list[_User]] = {}
        for user in (*self._parsers, *self._users):
            for name in (user.entry.name, f"{user.entry.kind}/{user.entry.name}"):
                self._by_name.setdefault(name, []).append(user)
        self._honoured = {field for user in self._users for field in user.fields}

    def resolve(
        self,
        request: EngineCoreRequest,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        calls: CallRules | None = None,
    ) -> tuple[dict[str, Any], OutputParsers]:
        """Fill in, for each component that the request uses, its arguments as plain data.

        Also fills in `reasoning_ended`, and what a grammar needs.

        Args:
            request: to fill in.
            tools: JSON schemas of arguments, by the name of the tool.
            calls: of the tools that a grammar allows.

        Returns:
            The fields of parameters that the request gives under `plugin_args`. Not only the
            processor reads them: stop strings are held back until `min_tokens`, and a greedy
            sampler is recognised by `temperature`. And its output parsers, which the caller closes.

        Raises:
            RequestError: an argument is wrong, belongs to no enabled plugin, or asks for something
                that no enabled plugin can do; or the reasoning parser failed.
        """
        given = self._located(request.params.plugin_args)
        parsers = self._resolve_all(request, given, tools, calls)
        resolved = request.plugin_args
        fields = {
            field: resolved[user.key][field]
            for user in (self._users if given else ())
            if user.key in given
            for field in user.fields & resolved[user.key].keys()
        }
        return fields, parsers

    def complete(self, request: EngineCoreRequest) -> OutputParsers:
        """Resolve the arguments of a request that brings them as a caller gives them.

        Returns:
            Its output parsers, which the caller closes.

        Raises:
            RequestError: as `resolve`.
        """
        ended = request.reasoning_ended
        parsers = self._resolve_all(request, self._located(request.plugin_args))
        request.reasoning_ended = ended
        return parsers

    def revise(
        self, request: EngineCoreRequest, before: EngineCoreRequest, parsers: OutputParsers
    ) -> OutputParsers:
        """Resolve the arguments of a request again after a hook changed its parameters.

        Arguments that the hook changed or removed itself stay so.

        Args:
            before: the request before the hook.
            parsers: of that.

        Returns:
            The output parsers of the changed request, which the caller closes.

        Raises:
            RequestError: as `resolve`.
        """
        given = self._located(request.plugin_args)
        request.plugin_args = {key: arguments.value for key, arguments in given.items()}
        stale = [
            user
            for user in self._users
            if _set_fields(user, request.params) != _set_fields(user, before.params)
            and request.plugin_args.get(user.key) == before.plugin_args.get(user.key)
        ]
        for user in stale:
            request.plugin_args.pop(user.key, None)
        self._check(request.plugin_args)
        self._refuse_unhonoured(request.params)
        with contextlib.ExitStack() as undo:
            if self._are_parsed_alike(request, before):
                parsers.hold()
            else:
                parsers = self._open_parsers(request)
            undo.callback(parsers.close)
            if _is_answered_alike(request.params, before.params):
                request.reasoning_markers = before.reasoning_markers
            else:
                request.reasoning_markers = None
            self._prepare_grammar(request, parsers.markers)
            request.plugin_args |= self._resolved(request, stale, {}, parsers.markers)
            undo.pop_all()
        return parsers

    def _resolve_all(
        self,
        request: EngineCoreRequest,
        given: Mapping[str, _Given],
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        calls: CallRules | None = None,
    ) -> OutputParsers:
        """Fill in the resolved arguments of a request, its grammar, and what concerns reasoning.

        Returns:
            Its output parsers, which the caller closes.
        """
        self._refuse_unhonoured(request.params)
        request.plugin_args = {}
        if self._parsers:
            request.plugin_args = self._resolved(request, self._parsers, given, None)
        with contextlib.ExitStack() as undo:
            parsers = self._open_parsers(request)
            undo.callback(parsers.close)
            markers = parsers.markers
            if tools and parsers.tools is None:
                raise RequestError(
                    "tools: no parser finds calls in what the model writes; set tools.parser "
                    '("hermes", for example)'
                )
            if calls is not None and not tools:
                raise RequestError("calls: expected none without tools")
            if calls is not None and tools:
                _constrain_calls(request, parsers, tools, calls)
            if markers is not None:
                request.reasoning_ended = markers.ended(request.prompt_token_ids)
            self._prepare_grammar(request, markers)
            request.plugin_args |= self._resolved(request, self._users, given, markers)
            undo.pop_all()
        return parsers

    def _prepare_grammar(
        self, request: EngineCoreRequest, markers: ReasoningMarkers | None
    ) -> None:
        """Fill in where the answer begins, for a grammar, if the request has one.

        Raises:
            RequestError: no backend compiles it, or no token could show its end; names the field.
        """
        structured = request.params.structured
        if structured is None:
            return
        if request.reasoning_markers is None:
            request.reasoning_markers = markers
        if self._why_no_grammars is not None:
            raise RequestError(f"structured: this engine has no grammars: {self._why_no_grammars}")
        name = structured.backend or self._grammar.use
        entry = self._plugins.find("grammars", name)
        if entry is None:
            known = [entry.name for entry in self._plugins.entries("grammars")]
            raise RequestError(
                f"structured.backend: expected an enabled grammar backend "
                f"({', '.join(sorted(known))}), got {name!r}{typed.suggest(name, known)}"
                f"{self._plugins.hint(name, 'grammars')}"
            )
        formats = self._plugins.target(entry).formats
        if structured.format not in formats:
            raise RequestError(
                f"structured.{structured.format}: the grammar backend {name!r} takes "
                f"{', '.join(formats)}"
            )
        size = len(msgspec.msgpack.encode(structured))
        if size > self._grammar.max_bytes:
            raise RequestError(
                f"structured.{structured.format}: expected at most {self._grammar.max_bytes} "
                f"bytes (grammar.max_bytes), got {size}"
            )
        if not request.stop_token_ids:
            why = "ignore_eos is true" if request.params.ignore_eos else "the model has none"
            raise RequestError(
                f"structured: it needs a token that ends the output, but {why}, and "
                f"stop_token_ids is empty"
            )

    def _resolved(
        self,
        request: EngineCoreRequest,
        users: Sequence[_User],
        given: Mapping[str, _Given],
        reasoning: ReasoningMarkers | None,
    ) -> dict[str, dict[str, Any]]:
        """Return the arguments for those components that the request uses."""
        resolved = {}
        for user in self._used(users, request.params, given):
            arguments, path = _arguments(user, request.params, given.get(user.key))
            name = user.entry.name
            if user.is_processor and (name in self._health.ended or name in self._health.deadly):
                self._health.check(name)
            if prepares(user.cls):
                context = PrepareContext(
                    options=user.options,
                    params=read_only(request.params),
                    prompt_token_ids=ReadOnlyList(request.prompt_token_ids),
                    stop_token_ids=request.stop_token_ids,
                    vocab_size=self._vocab_size,
                    tokenizer=self._tokenizer,
                    reasoning=reasoning,
                )
                source = user.entry.source
                arguments = prepare_arguments(source, user.cls, arguments, context, path)
            resolved[user.key] = msgspec.to_builtins(arguments, str_keys=False)
        return resolved

    def _used(
        self, users: Sequence[_User], params: SamplingParams, given: Mapping[str, _Given]
    ) -> Iterator[_User]:
        """Yield the components for which a request has arguments: given, by a field, or unasked."""
        changed = {f for f in self._honoured if getattr(params, f) != getattr(_DEFAULTS, f)}
        for user in users:
            if (
                user.key in given
                or not changed.isdisjoint(user.fields)
                or user.uses
                or (user.uses is None and _asked(user, params))
            ):
                yield user

    def _are_parsed_alike(self, request: EngineCoreRequest, before: EngineCoreRequest) -> bool:
        """Return whether a request has the same parsers, after a hook changed it."""
        fields = ("reasoning_parser", "tool_parser")
        return all(
            getattr(request.params, name) == getattr(before.params, name) for name in fields
        ) and all(
            request.plugin_args.get(user.key) == before.plugin_args.get(user.key)
            for user in self._parsers
        )

    def _open_parsers(self, request: EngineCoreRequest) -> OutputParsers:
        """Return the output parsers of a request; the caller closes them.

        Raises:
            RequestError: one that has the request's arguments cannot be created.
        """
        if request.params.reasoning_parser or request.params.tool_parser:
            return self._named_parsers(request)
        users = [user for user in self._parsers if user.key in request.plugin_args]
        if not users:
            return self._shared.hold()
        own: dict[str, GuardedOutputParser] = {}
        with contextlib.ExitStack() as undo:
            for user in users:
                arguments = _checked(user, request.plugin_args[user.key])
                own[user.entry.kind] = self._open_parser(user.entry, arguments)
                undo.callback(own[user.entry.kind].close)
            parsers = self._shared.with_own(own)
            _ = parsers.markers  # a parser that fails refuses the request, and no output
            undo.pop_all()
        return parsers

    def close(self) -> None:
        """Close the parsers that requests have chosen."""
        while self._chosen:
            _, parser = self._chosen.popitem()
            parser.close()

    def _named_parsers(self, request: EngineCoreRequest) -> OutputParsers:
        """Return the parsers that a request chooses by name, which all requests share.

        Raises:
            RequestError: there is none of that name, it cannot be created, or the request gives
                arguments for another one.
        """
        params, by_kind = request.params, dict[str, GuardedOutputParser]()
        opened: dict[str, GuardedOutputParser] = {}  # a class of both roles is one component
        for kind, field, name in (
            ("reasoning_parsers", "reasoning_parser", params.reasoning_parser),
            ("tool_parsers", "tool_parser", params.tool_parser),
        ):
            configured = self._shared.by_kind.get(kind)
            if name is None:
                name = "none" if configured is None else configured.name
            if name == "none":
                continue
            entry = self._named_entry(kind, field, name)
            if entry.value not in opened:
                if configured is None or configured.name != name:
                    configured = self._chosen_parser(entry)
                opened[entry.value] = configured
            by_kind[kind] = opened[entry.value]
        for user in self._parsers:
            if user.key in request.plugin_args and not prepares(user.cls):
                raise RequestError(
                    f"plugin_args.{user.entry.name}: expected none where reasoning_parser or "
                    f"tool_parser chooses a parser, which gets no arguments"
                )
        return OutputParsers(self._tokenizer, by_kind)

    def _named_entry(self, kind: str, field: str, name: str) -> PluginEntry:
        entry = self._plugins.find(kind, name)
        if entry is None:
            known = sorted(entry.name for entry in self._plugins.entries(kind))
            raise RequestError(
                f'{field}: expected "none" or an enabled parser ({", ".join(known)}), got '
                f"{name!r}{typed.suggest(name, known)}{self._plugins.hint(name, kind)}"
            )
        return entry

    def _chosen_parser(self, entry: PluginEntry) -> GuardedOutputParser:
        key = entry.name, entry.value
        if key not in self._chosen:
            self._chosen[key] = self._open_parser(entry, None)
        return self._chosen[key]

    def _open_parser(
        self, entry: PluginEntry, arguments: typed.Arguments | None
    ) -> GuardedOutputParser:
        try:
            return open_parser(self._plugins, entry, self._tokenizer, self._vocab_size, arguments)
        except HardpointError as cause:
            raise RequestError(str(cause)) from cause

    def _check(self, plugin_args: Mapping[str, Any]) -> None:
        """Check arguments that a hook may have changed."""
        for user in (*self._parsers, *self._users):
            if user.key in plugin_args:
                if user.is_processor:
                    self._health.check(user.entry.name)
                _checked(user, plugin_args[user.key])

    def _located(self, plugin_args: Mapping[str, Any]) -> dict[str, _Given]:
        """Return the arguments that a request gives, by the key of the component that they are for.

        Raises:
            RequestError: they are for no component that takes any, for one of several, or two are
                for the same.
        """
        located: dict[str, _Given] = {}
        for name, value in plugin_args.items():
            path = f"plugin_args.{name}"
            users = self._by_name.get(name, ())
            if not users:
                raise RequestError(f"{path}: {self._why_unknown(name)}")
            if len(users) > 1:
                choices = " or ".join(f"{user.entry.kind}/{user.entry.name}" for user in users)
                raise RequestError(f"{path}: could be {choices}")
            key = users[0].key
            if key in located:
                raise RequestError(f"{path}: given twice, here and by {located[key].path}")
            located[key] = _Given(path, value)
        return located

    def _why_unknown(self, name: str) -> str:
        """Return why no component takes arguments under a name."""
        labels = (f"{entry.kind}/{entry.name}" for entry in self._plugins.manifest.entries)
        named = [label for label in labels if name in (label, label.partition("/")[2])]
        if named:
            return f"{' and '.join(named)} {'takes' if len(named) == 1 else 'take'} no arguments"
        return (
            f"no enabled plugin of that name takes arguments"
            f"{typed.suggest(name, list(self._by_name))}{self._plugins.hint(name, _LOGITS)}"
        )

    def _refuse_unhonoured(self, params: SamplingParams) -> None:
        for field in _SHAPING_FIELDS:
            if field in self._honoured:
                continue
            value = getattr(params, field)
            if value == getattr(_DEFAULTS, field):
                continue
            if field == "temperature" and params.greedy:  # the sampler's own
                continue
            raise RequestError(
                f"{field}: no enabled logits processor applies it, so {value!r} would be "
                f"ignored; enable one, or leave it at {getattr(_DEFAULTS, field)!r}"
            )


def _is_answered_alike(params: SamplingParams, before: SamplingParams) -> bool:
    """Return whether the answer begins in the same place, after a hook changed parameters."""
    fields = ("structured", "reasoning_parser", "tool_parser")
    return all(getattr(params, name) == getattr(before, name) for name in fields)


def _constrain_calls(
    request: EngineCoreRequest,
    parsers: OutputParsers,
    tools: Mapping[str, Mapping[str, Any]],
    calls: CallRules,
) -> None:
    """Fill in the grammar of a request whose calls have to keep to one.

    Raises:
        RequestError: the parser gives no such grammar, or the request has another one.
    """
    parser = parsers.tools
    assert parser is not None, "requests with tools are refused where no parser finds calls"
    if calls.required is None and not calls.strict:
        return
    if calls.required is None and request.params.structured is not None:
        return  # the whole answer is what the request says, and has no calls
    if request.params.structured is not None:
        raise RequestError(
            "tool_choice: it requires a call, and sampling_params.structured another answer; "
            "expected one of them"
        )
    names = tools if calls.required is None else calls.required
    if unknown := [name for name in (*names, *calls.strict) if name not in tools]:
        raise RequestError(f"calls: expected names of tools, got {unknown[0]!r}")
    schemas = {name: tools[name] for name in names}
    required = calls.required is not None
    format = parser.call_format(schemas, required=required, parallel=calls.parallel)
    structured = StructuredOutputs(
        # One keyword of a strict tool that is left out would be one too many.
        structural_tag=StructuralTag(format=format),
        lenient=schemas.keys().isdisjoint(calls.strict),
    )
    request.params = msgspec.structs.replace(request.params, structured=structured)
    markers = (parsers.reasoning or parser).markers()
    request.reasoning_markers = msgspec.structs.replace(markers, content_prefix=())


def _processor(plugins: PluginSet, entry: PluginEntry) -> _User:
    cls: type[LogitsPlugin] = plugins.target(entry)
    default = cls.uses.__func__ is LogitsPlugin.uses.__func__  # type: ignore[attr-defined]
    return _User(
        entry,
        cls,
        plugins.options(entry),
        argument_key(entry.kind, entry.name),
        frozenset(cls.params_fields),
        cls.uses(_DEFAULTS) if default else None,
    )


def _users(plugins: PluginSet, entries: Iterable[PluginEntry]) -> list[_User]:
    """Return those components that take arguments, of kinds that every request uses."""
    targets: list[tuple[PluginEntry, type[ComponentWithArguments]]] = [
        (entry, plugins.target(entry)) for entry in entries
    ]
    return [
        _User(
            entry,
            cls,
            plugins.options(entry),
            argument_key(entry.kind, entry.name),
            frozenset(),
            prepares(cls),
        )
        for entry, cls in targets
        if takes_arguments(cls)
    ]


def _asked(user: _User, params: SamplingParams) -> bool:
    try:
        return bool(user.cls.uses(params))
    except BaseException as cause:
        raise_unless_fault(cause)
        raise RequestError(f"{user.entry.source}: its uses failed: {describe(cause)}") from cause


def _arguments(
    user: _User, params: SamplingParams, given: _Given | None
) -> tuple[typed.Arguments, str]:
    """Return the checked arguments for a component that a request uses, and where they stand."""
    fields = _set_fields(user, params)
    if given is not None:
        if fields and params.plugin_args:
            raise RequestError(f"{given.path}: given twice, here and by {', '.join(fields)}")
        value, path, place = given.value, given.path, given.path
    elif fields:
        own = user.cls.Arguments.__struct_fields__
        value, path = {name: fields[name] for name in fields if name in own}, ""
        place = "/".join(fields)
    else:
        value, path = {}, f"plugin_args.{user.key}"
        place = path
    return convert_arguments(user.entry.source, user.cls.Arguments, value, path), place


def _checked(user: _User, plain: Any) -> typed.Arguments:
    """Return resolved arguments as the component's type."""
    type_ = prepared_type(user.cls)
    return convert_arguments(user.entry.source, type_, plain, f"plugin_args.{user.key}")


def _set_fields(user: _User, params: SamplingParams) -> dict[str, Any]:
    """Return the component's own fields that a request sets."""
    return {
        field: getattr(params, field)
        for field in getattr(user.cls, "params_fields", ())
        if getattr(params, field) != getattr(_DEFAULTS, field)
    }
