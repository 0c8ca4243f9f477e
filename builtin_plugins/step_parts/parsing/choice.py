"""The output parsers that the configuration chooses, by name or by the model's chat template."""

from __future__ import annotations

import logging
import operator
from typing import Any

from hardpoint.errors import ConfigError, PluginConflictError, RequestError
from hardpoint.plugins import EngineConfig, OutputParser, OutputParserContext, Tokenizer
from hardpoint.plugins.step_part import FrontendHalfContext
from hardpoint.toolkit.parsing.output_parsers import OutputParsers

_log = logging.getLogger("hardpoint")


class ConfiguredParsers:
    """The parsers of requests that choose no others and give them no arguments.

    Attributes:
        components: the enabled components.
        tokenizer: tokenizer of the model.
        shared: the parsers.
        names: their kinds and names; a parser of both roles is listed once.
    """

    def __init__(
        self, context: FrontendHalfContext, tokenizer: Tokenizer, config: EngineConfig
    ) -> None:
        """Open the parsers.

        Raises:
            PluginError: a configured parser is not enabled, or cannot be built.
            ConfigError: the tokenizer lacks markers of its format.
        """
        self.components, self.tokenizer = context.components, tokenizer
        by_kind = self._opened(config)
        has_format = "tool_parsers" in by_kind or config.tools.parser != "auto"
        fallback = None if has_format else self._of_any_model
        self.shared = OutputParsers(self.tokenizer, by_kind, (), fallback)
        names: dict[OutputParser, tuple[str, str]] = {}
        for kind, parser in by_kind.items():
            names.setdefault(parser, (kind, parser.name))
        self.names = tuple(names.values())
        _log_text_markers(self.shared, self.tokenizer)

    def find(self, kind: str, name: str) -> type[OutputParser] | None:
        """Return the class of a parser; None if it is not enabled."""
        component: Any = self.components.find(kind, name)
        cls: type[OutputParser] | None = component
        return cls

    def create(self, kind: str, name: str, arguments: Any = None) -> OutputParser:
        """Return a new parser.

        Args:
            arguments: arguments of the request; None is the defaults.

        Raises:
            PluginError: it is not enabled, or cannot be built.
            ConfigError: the tokenizer lacks markers of its format.
        """
        parser: OutputParser = self.components.create(
            kind, name, OutputParserContext, tokenizer=self.tokenizer, arguments=arguments
        )
        return parser

    def close(self) -> None:
        """Close the parsers."""
        for parser in self.shared.components:
            self.components.close(parser)

    def _opened(self, config: EngineConfig) -> dict[str, OutputParser]:
        opened: dict[Any, OutputParser] = {}  # a class of both roles is one component
        by_kind = {}
        for kind, setting in (
            ("reasoning_parsers", config.reasoning.parser),
            ("tool_parsers", config.tools.parser),
        ):
            name = self._fitting(kind) if setting == "auto" else setting
            if name is None or name == "none":
                continue
            cls = self.find(kind, name)
            try:
                if cls not in opened:
                    opened[cls] = self.create(kind, name)
            except ConfigError as cause:
                if setting != "auto":
                    raise
                _log.warning(
                    "%s: the chat template shows %r, which is left out: %s", kind, name, cause
                )
                continue
            by_kind[kind] = opened[cls]
        return by_kind

    def _fitting(self, kind: str) -> str | None:
        """Return the name of the parser with the markers of the model's chat template, or None.

        Raises:
            PluginConflictError: several distributions offer it, and no setting chooses one.
        """
        template = "".join(self.tokenizer.chat_templates.values())
        fitting = [
            (sum(map(len, marks)), name)
            for name in self.components.enabled(kind)
            if template and (cls := self.find(kind, name)) and (marks := cls.template_marks)
            if all(mark in template for mark in marks)
        ]
        if not fitting:
            return None
        _, name = max(fitting, key=operator.itemgetter(0))
        _log.info("%s: %s, for the model's chat template shows its markers", kind, name)
        try:
            self.components.check_name(kind, name, kind)
        except RequestError as conflict:
            raise PluginConflictError(str(conflict)) from None
        return name

    def _of_any_model(self) -> OutputParser | None:
        for name in self.components.enabled("tool_parsers"):
            if (cls := self.find("tool_parsers", name)) is not None and cls.any_model:
                return self.create("tool_parsers", name)
        return None


def _log_text_markers(parsers: OutputParsers, tokenizer: Tokenizer) -> None:
    if parsers.reasoning is None:
        return
    special = set(tokenizer.special_tokens.values())
    try:
        markers = parsers.reasoning.markers()
    except RequestError:  # each request is refused with it
        return
    texts = [
        repr(tokenizer.decode(marker, skip_special_tokens=False))
        for marker in (*markers.start, *markers.end)
        if not special.intersection(marker)
    ]
    if texts:
        _log.info(
            "reasoning_parsers: %s: %s: no special tokens of this tokenizer, so that any text with "
            "them counts; thinking budgets and grammars go by their usual tokens",
            parsers.reasoning.name,
            ", ".join(texts),
        )
