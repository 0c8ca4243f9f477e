"""The output parsers of a request: the configured ones, chosen ones, or some of its own."""

from __future__ import annotations

import contextlib

from hardpoint import typed
from hardpoint.host.boundary.text_guards import open_parser
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.registry.request_arguments import prepares
from hardpoint.plugins import (
    ConfigError,
    EngineCoreRequest,
    HardpointError,
    OutputParser,
    RequestError,
    Tokenizer,
)
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.toolkit.parsing.output_parsers import OutputParsers

from .argument_takers import takers_of


class RequestParsers:
    """Opens the output parsers of requests.

    Attributes:
        takers: those of the configured parsers that take arguments.
    """

    def __init__(
        self, plugins: PluginSet, tokenizer: Tokenizer, vocab_size: int, shared: OutputParsers
    ) -> None:
        """`shared` are of requests that choose no others and give them no arguments."""
        self._tokenizer, self._vocab_size, self._shared = tokenizer, vocab_size, shared
        self._chosen: dict[tuple[str, str], OutputParser] = {}  # by name and FQCN
        self._replaced: list[OutputParser] = []
        self._plugins = plugins
        self.use(plugins)

    def check(self, plugins: PluginSet) -> None:
        """Check that another generation of the plugins has the parsers that are configured.

        Raises:
            ConfigError: it has not.
        """
        for kind, parser in self._shared.by_kind.items():
            entry = self._plugins.find(kind, parser.name)
            if entry is None or not entry.is_same(plugins.find(kind, parser.name)):
                raise ConfigError(
                    f"{kind}/{parser.name}: the configuration chooses this parser for all "
                    f"requests, so it cannot be changed while the engine runs; restart it"
                )

    def use(self, plugins: PluginSet) -> None:
        """Take the parsers of another generation of the plugins; live requests keep theirs."""
        for key in list(self._chosen):
            before, after = (
                [e for e in one.manifest.entries if (e.name, e.value) == key]
                for one in (self._plugins, plugins)
            )
            if before != after:
                self._replaced.append(self._chosen.pop(key))
        self._plugins = plugins
        self.takers = takers_of(plugins, _entries(self._shared, plugins))

    @property
    def components(self) -> list[OutputParser]:
        """The latest ones, but for those of one request alone."""
        return [*self._shared.components, *self._chosen.values()]

    def open(self, request: EngineCoreRequest) -> OutputParsers:
        """Return the output parsers of a request; the caller closes them.

        Raises:
            RequestError: one that has the request's arguments cannot be created.
        """
        if request.params.reasoning_parser or request.params.tool_parser:
            return self._named(request)
        takers = [taker for taker in self.takers if taker.key in request.plugin_args]
        if not takers:
            return self._shared.hold()
        own: dict[str, OutputParser] = {}
        with contextlib.ExitStack() as undo:
            for taker in takers:
                arguments = taker.checked(request.plugin_args[taker.key])
                own[taker.entry.kind] = self._made(taker.entry, arguments)
                undo.callback(own[taker.entry.kind].close)
            parsers = self._shared.with_own(own)
            _ = parsers.markers  # a parser that fails refuses the request, and no output
            undo.pop_all()
        return parsers

    def are_alike(self, request: EngineCoreRequest, before: EngineCoreRequest) -> bool:
        """Return whether a request has the same parsers, after a hook changed it."""
        fields = ("reasoning_parser", "tool_parser")
        return all(
            getattr(request.params, name) == getattr(before.params, name) for name in fields
        ) and all(
            request.plugin_args.get(taker.key) == before.plugin_args.get(taker.key)
            for taker in self.takers
        )

    def close(self) -> None:
        """Close the parsers that requests have chosen."""
        while self._chosen:
            _, parser = self._chosen.popitem()
            parser.close()
        while self._replaced:
            self._replaced.pop().close()

    def _named(self, request: EngineCoreRequest) -> OutputParsers:
        """Return the parsers that a request chooses by name, which all requests share.

        Raises:
            RequestError: there is none of that name, it cannot be created, or the request gives
                arguments for another one.
        """
        params, by_kind = request.params, dict[str, OutputParser]()
        opened: dict[str, OutputParser] = {}  # a class of both roles is one component
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
                if configured is None or configured.name != entry.name:
                    configured = self._chosen_one(entry)
                opened[entry.value] = configured
            by_kind[kind] = opened[entry.value]
        for taker in self.takers:
            if taker.key in request.plugin_args and not prepares(taker.cls):
                raise RequestError(
                    f"plugin_args.{taker.entry.name}: expected none where reasoning_parser or "
                    f"tool_parser chooses a parser, which gets no arguments"
                )
        fallback = self._shared.fallback if params.tool_parser is None else None
        return OutputParsers(self._tokenizer, by_kind, (), fallback)

    def _named_entry(self, kind: str, field: str, name: str) -> PluginEntry:
        entry = self._plugins.find(kind, name, RequestError)
        if entry is None:
            known = sorted(entry.name for entry in self._plugins.entries(kind))
            raise RequestError(
                f'{field}: expected "none" or an enabled parser ({", ".join(known)}), got '
                f"{name!r}{typed.suggest(name, known)}{self._plugins.hint(name, kind)}"
            )
        return entry

    def _chosen_one(self, entry: PluginEntry) -> OutputParser:
        key = entry.name, entry.value
        if key not in self._chosen:
            self._chosen[key] = self._made(entry, None)
        return self._chosen[key]

    def _made(self, entry: PluginEntry, arguments: typed.Arguments | None) -> OutputParser:
        try:
            return open_parser(self._plugins, entry, self._tokenizer, self._vocab_size, arguments)
        except HardpointError as cause:
            raise RequestError(str(cause)) from cause


def _entries(parsers: OutputParsers, plugins: PluginSet) -> list[PluginEntry]:
    found: dict[OutputParser, PluginEntry] = {}
    for kind, parser in parsers.by_kind.items():
        found.setdefault(parser, plugins.get(kind, parser.name))
    return list(found.values())
