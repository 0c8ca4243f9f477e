"""The arguments of a request for the components that take some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hardpoint import typed
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts
from hardpoint.host.boundary.plugin_health import PluginHealth
from hardpoint.host.registry.discovery import check_unique
from hardpoint.host.registry.kinds import KINDS, Number
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.registry.request_arguments import prepare_arguments, prepares
from hardpoint.plugins import (
    EngineCoreRequest,
    PrepareContext,
    ReasoningMarkers,
    RequestError,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.step_part.part import ToolCalls
from hardpoint.toolkit.parsing.output_parsers import OutputParsers
from hardpoint.typed import ReadOnlyList, read_only

from .argument_takers import DEFAULTS, LOGITS, ArgumentTaker, Given, processor_taker, takers_of
from .request_parsers import RequestParsers

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


class PluginArguments:
    """Gathers, checks and completes each request's arguments for each component."""

    def __init__(
        self,
        plugins: PluginSet,
        health: PluginHealth,
        vocab_size: int,
        tokenizer: Tokenizer,
        parsers: OutputParsers,
        parts: FrontendParts,
    ) -> None:
        """Load the classes; instances of most live elsewhere.

        Args:
            parsers: parsers of requests that give them no arguments.
            parts: frontend halves of step parts, which complete requests.
        """
        self._parts = parts
        self.parsers = RequestParsers(plugins, tokenizer, vocab_size, parsers)
        self._health = health
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._gone: dict[str, int] = {}  # last generation of processors that were switched off
        self._load(plugins)

    def check(self, plugins: PluginSet) -> None:
        """Check that another generation of the plugins can be used.

        Raises:
            ConfigError: parsers change that are in use by the configuration.
            PluginError: a class cannot be loaded.
        """
        self.parsers.check(plugins)
        self._takers_of(plugins)

    def use(self, plugins: PluginSet) -> None:
        """Take the arguments of another generation of the plugins, and show it to step parts."""
        gone = {e.name: self._plugins.manifest.generation for e in self._plugins.entries(LOGITS)}
        self.parsers.use(plugins)
        self._parts.use(plugins)
        self._load(plugins)
        self._gone = {
            name: generation
            for name, generation in (self._gone | gone).items()
            if plugins.find(LOGITS, name) is None
        }

    def close(self) -> None:
        """Close the parsers that requests have chosen."""
        self.parsers.close()

    def _load(self, plugins: PluginSet) -> None:
        self._takers, self._plugins = self._takers_of(plugins), plugins
        self._by_name: dict[str, list[ArgumentTaker]] = {}
        for taker in (*self.parsers.takers, *self._takers):
            for name in (taker.entry.name, f"{taker.entry.kind}/{taker.entry.name}"):
                self._by_name.setdefault(name, []).append(taker)
        self._honoured = {field for taker in self._takers for field in taker.fields}

    def _takers_of(self, plugins: PluginSet) -> list[ArgumentTaker]:
        takers = [processor_taker(plugins, entry) for entry in plugins.entries(LOGITS)]
        for kind in KINDS.values():
            if kind.takes_arguments and kind.number is not Number.BY_NAME and kind.name != LOGITS:
                takers += takers_of(plugins, plugins.entries(kind.name))
        return takers

    def resolve(
        self,
        request: EngineCoreRequest,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        calls: CallRules | None = None,
    ) -> tuple[dict[str, Any], OutputParsers]:
        """Fill in, for each component that the request uses, its arguments as plain data.

        Also fills in `reasoning_ended`, and what step parts need.

        Args:
            request: to fill in.
            tools: JSON schemas of arguments, by the name of the tool.
            calls: calls of the tools that a grammar allows.

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
            field: resolved[taker.key][field]
            for taker in (self._takers if given else ())
            if taker.key in given
            for field in taker.fields & resolved[taker.key].keys()
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
            parsers: parsers of that request.

        Returns:
            The output parsers of the changed request, which the caller closes.

        Raises:
            RequestError: as `resolve`.
        """
        given = self._located(request.plugin_args)
        request.plugin_args = {key: arguments.value for key, arguments in given.items()}
        stale = [
            taker
            for taker in self._takers
            if taker.set_fields(request.params) != taker.set_fields(before.params)
            and request.plugin_args.get(taker.key) == before.plugin_args.get(taker.key)
        ]
        for taker in stale:
            request.plugin_args.pop(taker.key, None)
        self._check(request.plugin_args)
        self._refuse_unhonoured(request.params)
        if self.parsers.are_alike(request, before):
            parsers.hold()
        else:
            parsers = self.parsers.open(request)
        try:
            if _is_answered_alike(request.params, before.params):
                request.reasoning_markers = before.reasoning_markers
            else:
                request.reasoning_markers = None
            self._parts.prepare(request, parsers.markers)
            request.plugin_args |= self._resolved(request, stale, {}, parsers.markers)
        except BaseException:
            parsers.close()
            raise
        return parsers

    def _resolve_all(
        self,
        request: EngineCoreRequest,
        given: Mapping[str, Given],
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        calls: CallRules | None = None,
    ) -> OutputParsers:
        """Fill in a request's resolved arguments, and what step parts and reasoning need.

        Returns:
            Its output parsers, which the caller closes.
        """
        self._refuse_unhonoured(request.params)
        request.plugin_args = {}
        if self.parsers.takers:
            request.plugin_args = self._resolved(request, self.parsers.takers, given, None)
        parsers = self.parsers.open(request)
        try:
            markers = parsers.markers
            if calls is not None and not tools:
                raise RequestError("calls: expected none without tools")
            if tools:
                if parsers.tools is None and calls is not None and calls.required is not None:
                    parsers = parsers.of_any_model()
                if parsers.tools is None:
                    raise RequestError(
                        "tools: no parser finds calls in what the model writes; set tools.parser "
                        '("hermes", for example)'
                    )
                rules = calls or CallRules()
                of_reasoning = parsers.reasoning or parsers.tools
                given_calls = ToolCalls(
                    parser=parsers.tools,
                    tools=tools,
                    required=rules.required,
                    strict=rules.strict,
                    parallel=rules.parallel,
                    prefix=lambda: parsers.content_prefix,
                    markers=of_reasoning.markers,
                )
                self._parts.prepare_calls(request, given_calls)
            if markers is not None:
                markers = msgspec.structs.replace(markers, calls=markers.calls if tools else ())
                request.reasoning_ended = markers.ended(request.known_prompt_ids)
            self._parts.prepare(request, markers)
            request.plugin_args |= self._resolved(request, self._takers, given, markers)
        except BaseException:
            parsers.close()
            raise
        return parsers

    def _resolved(
        self,
        request: EngineCoreRequest,
        takers: Sequence[ArgumentTaker],
        given: Mapping[str, Given],
        reasoning: ReasoningMarkers | None,
    ) -> dict[str, dict[str, Any]]:
        resolved = {}
        for taker in self._used(takers, request.params, given):
            arguments, path = taker.arguments(request.params, given.get(taker.key))
            name = taker.entry.name
            if taker.is_processor and (name in self._health.ended or name in self._health.deadly):
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
        self, takers: Sequence[ArgumentTaker], params: SamplingParams, given: Mapping[str, Given]
    ) -> Iterator[ArgumentTaker]:
        changed = {f for f in self._honoured if getattr(params, f) != getattr(DEFAULTS, f)}
        for taker in takers:
            if (
                taker.key in given
                or not changed.isdisjoint(taker.fields)
                or taker.uses
                or (taker.uses is None and taker.is_asked_for(params))
            ):
                yield taker

    def _check(self, plugin_args: Mapping[str, Any]) -> None:
        for taker in (*self.parsers.takers, *self._takers):
            if taker.key in plugin_args:
                if taker.is_processor:
                    self._health.check(taker.entry.name)
                taker.checked(plugin_args[taker.key])

    def _located(self, plugin_args: Mapping[str, Any]) -> dict[str, Given]:
        """Return the arguments that a request gives, by the key of the component that they are for.

        Raises:
            RequestError: they are for no component that takes any, for one of several, or two are
                for the same.
        """
        located: dict[str, Given] = {}
        for name, value in plugin_args.items():
            path = f"plugin_args.{name}"
            found = self._by_name.get(name, ())
            if not found:
                raise RequestError(f"{path}: {self._why_unknown(name)}")
            if len(found) > 1:
                choices = " or ".join(f"{taker.entry.kind}/{taker.entry.name}" for taker in found)
                raise RequestError(f"{path}: could be {choices}")
            check_unique(found[0].entry, path, RequestError)
            key = found[0].key
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


def _is_answered_alike(params: SamplingParams, before: SamplingParams) -> bool:
    fields = ("structured", "reasoning_parser", "tool_parser")
    return all(getattr(params, name) == getattr(before, name) for name in fields)
