"""The output parsers of a request: the configured ones, chosen ones, or some of its own."""

from __future__ import annotations

import contextlib
from typing import Any

from hardpoint import typed
from hardpoint.errors import HardpointError, RequestError
from hardpoint.plugins import EngineCoreRequest, OutputParser
from hardpoint.toolkit.parsing.output_parsers import OutputParsers
from hardpoint.typed import prepared_type

from .choice import ConfiguredParsers


class RequestParsers:
    """Opens the output parsers of requests.

    Attributes:
        configured: parsers of the configuration.
    """

    def __init__(self, configured: ConfiguredParsers) -> None:
        self.configured = configured
        self._components, self._shared = configured.components, configured.shared
        self._chosen: dict[tuple[str, str], tuple[Any, OutputParser]] = {}
        """Parsers that requests name, with their identity, by kind and name."""
        self._replaced: list[OutputParser] = []

    @property
    def components(self) -> list[OutputParser]:
        """The latest parsers, except parsers of one request alone."""
        chosen = (parser for _, parser in self._chosen.values())
        return list(dict.fromkeys([*self._shared.components, *chosen]))

    def open(self, request: EngineCoreRequest) -> OutputParsers:
        """Return the output parsers of a request; the caller closes them.

        Raises:
            RequestError: a parser with the request's arguments cannot be created.
        """
        if request.params.reasoning_parser or request.params.tool_parser:
            return self._named(request)
        parsers_by_kind: dict[str, OutputParser] = {}
        with contextlib.ExitStack() as undo:
            for kind, name in self.configured.names:
                if (plain := request.plugin_args.get(key := f"{kind}/{name}")) is not None:
                    arguments = typed.convert(
                        plain,
                        prepared_type(self.configured.find(kind, name)),
                        path=f"plugin_args.{key}",
                        error=RequestError,
                        str_keys=True,
                    )
                    parsers_by_kind[kind] = self._created(kind, name, arguments)
                    undo.callback(parsers_by_kind[kind].close)
            parsers = (
                self._shared.with_own(parsers_by_kind) if parsers_by_kind else self._shared.hold()
            )
            undo.pop_all()
        return parsers

    def close(self) -> None:
        """Close all parsers that are not of one request alone."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.configured.close)
            for parser in (*self._replaced, *(parser for _, parser in self._chosen.values())):
                stack.callback(self._components.close, parser)
            self._chosen, self._replaced = {}, []

    def _named(self, request: EngineCoreRequest) -> OutputParsers:
        """Return the parsers that a request chooses by name, which all requests share.

        Raises:
            RequestError: there is none of that name, it cannot be created, or the request gives
                arguments for another one.
        """
        params, by_kind = request.params, dict[str, OutputParser]()
        opened: dict[Any, OutputParser] = {}  # a class of both roles is one component
        for kind, field, name in (
            ("reasoning_parsers", "reasoning_parser", params.reasoning_parser),
            ("tool_parsers", "tool_parser", params.tool_parser),
        ):
            configured = self._shared.by_kind.get(kind)
            if name is None:
                name = "none" if configured is None else configured.name
            if name == "none":
                continue
            cls = self._named_class(kind, field, name)
            if cls not in opened:
                configured_name = None if configured is None else configured.name
                if configured is None or cls is not self.configured.find(
                    kind, configured_name or ""
                ):
                    configured = self._chosen_one(kind, name)
                opened[cls] = configured
            by_kind[kind] = opened[cls]
        for kind, name in self.configured.names:
            if f"{kind}/{name}" in request.plugin_args and not self._prepares(kind, name):
                raise RequestError(
                    f"plugin_args.{name}: expected none where reasoning_parser or "
                    f"tool_parser chooses a parser, which gets no arguments"
                )
        fallback = self._shared.fallback if params.tool_parser is None else None
        return OutputParsers(self.configured.tokenizer, by_kind, (), fallback)

    def _named_class(self, kind: str, field: str, name: str) -> Any:
        self._components.check_name(kind, name, kind)
        if (cls := self.configured.find(kind, name)) is None:
            known = ", ".join(sorted(self._components.enabled(kind)))
            raise RequestError(
                f'{field}: expected "none" or an enabled parser ({known}), got '
                f"{name!r}{self._components.hint(kind, name)}"
            )
        return cls

    def _prepares(self, kind: str, name: str) -> bool:
        """Return whether every request has arguments of a parser, which its `prepare` makes."""
        cls: Any = self.configured.find(kind, name)
        unprepared: Any = OutputParser.prepare
        return bool(cls.prepare.__func__ is not unprepared.__func__)

    def _chosen_one(self, kind: str, name: str) -> OutputParser:
        identity = self._components.identity(kind, name)
        known, parser = self._chosen.get((kind, name), (None, None))
        if parser is None or known != identity:
            if parser is not None:  # a live change has replaced it; live requests keep theirs
                self._replaced.append(parser)
            parser = self._created(kind, name, None)
            self._chosen[kind, name] = identity, parser
        return parser

    def _created(self, kind: str, name: str, arguments: Any) -> OutputParser:
        try:
            return self.configured.create(kind, name, arguments)
        except HardpointError as cause:
            raise RequestError(str(cause)) from cause
