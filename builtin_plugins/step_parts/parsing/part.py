"""Output parsing as a step part: drives the `reasoning_parsers` and `tool_parsers` kinds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from hardpoint.errors import ConfigError
from hardpoint.plugins import EngineConfig, EngineCoreRequest, FrontendHalf, StepPart
from hardpoint.plugins.step_part import FrontendHalfContext
from hardpoint.plugins.text import OutputFormat

from .choice import ConfiguredParsers
from .formats import ParsedFormat
from .requests import RequestParsers

if TYPE_CHECKING:
    from hardpoint.plugins.component.base import Component
    from hardpoint.plugins.step_part.components import ComponentFactory
    from hardpoint.plugins.text.output_parser import RequestedCalls


class OutputParsing(StepPart):
    """Finds reasoning and calls of tools in outputs, by the parsers that the settings name.

    A fault of a parser ends the request that it is about.
    """

    contract = 1
    fault_scope = "request"

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf | None:
        """Return the half that opens the parsers of requests; None without a tokenizer.

        Raises:
            PluginError, ConfigError: a parser that the configuration names cannot be used.
        """
        if context.tokenizer is None:
            return None
        configured = ConfiguredParsers(context, context.tokenizer, self.context.config)
        return ParsedRequests(configured)


class ParsedRequests(FrontendHalf):
    """Gives requests the formats of their parsers."""

    for_parameters: Collection[str] = ("reasoning_parser", "tool_parser")

    def __init__(self, configured: ConfiguredParsers) -> None:
        self._parsers = RequestParsers(configured)
        if configured.names:
            self.for_parameters = ()  # parsers of the configuration read every output

    @property
    def components(self) -> Sequence[Component]:
        """The latest parsers, except parsers of one request alone."""
        return self._parsers.components

    @property
    def named_components(self) -> Mapping[str, str | None]:  # type: ignore[override]
        """The parsers of the configuration."""
        by_kind = self._parsers.configured.shared.by_kind
        names: dict[str, str | None] = dict.fromkeys(("reasoning_parsers", "tool_parsers"))
        return names | {kind: parser.name for kind, parser in by_kind.items()}

    def prepare_change(
        self,
        components: ComponentFactory,
        config: EngineConfig,  # noqa: ARG002
    ) -> None:
        """Check that the parsers of the configuration stay as they are.

        Raises:
            ConfigError: one changes.
        """
        configured = self._parsers.configured
        for kind, name in configured.names:
            if components.identity(kind, name) != configured.components.identity(kind, name):
                raise ConfigError(
                    f"{kind}/{name}: the configuration chooses this parser for all "
                    f"requests, so it cannot be changed while the engine runs; restart it"
                )

    def output_format(
        self, request: EngineCoreRequest, calls: RequestedCalls | None
    ) -> OutputFormat | None:
        """Return the format of a request's parsers; None without parsers, or if it pools.

        Raises:
            RequestError: the request names a parser that is not enabled, or a parser failed.
        """
        params, names = request.params, self._parsers.configured.names
        is_parsed = names or params.reasoning_parser or params.tool_parser or calls is not None
        if not is_parsed or request.pooling_params is not None:
            return None
        parsers = self._parsers.open(request)
        if calls is not None and calls.required is not None and parsers.tools is None:
            parsers = parsers.of_any_model()
        return ParsedFormat(parsers, calls, request.params.structured) if parsers else None

    def close(self) -> None:
        """Close the parsers."""
        self._parsers.close()
