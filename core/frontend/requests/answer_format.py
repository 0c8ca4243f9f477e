"""The grammar of a request's answer: that which it asks for, and that of its calls of tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hardpoint import typed
from hardpoint.core.frontend.outputs.output_parsers import OutputParsers
from hardpoint.plugins import EngineCoreRequest, ReasoningMarkers, RequestError, SamplingParams
from hardpoint.plugins.config_tables import GrammarConfig
from hardpoint.plugins.structured import StructuralTag, StructuredOutputs
from hardpoint.registry.plugin_set import PluginSet


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


class GrammarOfRequest:
    """Checks that a request's grammar can be compiled, and fills in where its answer begins."""

    def __init__(
        self, plugins: PluginSet, config: GrammarConfig, why_no_grammars: str | None
    ) -> None:
        """Use the grammar backends of the plugins.

        Args:
            why_no_grammars: the reason if the engine has no grammars; None if it has.
        """
        self._plugins, self._config, self._why_no_grammars = plugins, config, why_no_grammars

    def use(self, plugins: PluginSet) -> None:
        """Use those of another generation of the plugins."""
        self._plugins = plugins

    def prepare(
        self,
        request: EngineCoreRequest,
        structured: StructuredOutputs,
        markers: ReasoningMarkers | None,
    ) -> None:
        """Fill in where the answer begins, for the grammar of a request.

        Raises:
            RequestError: no backend compiles it, or no token could show its end; names the field.
        """
        if request.reasoning_markers is None:
            request.reasoning_markers = markers
        if self._why_no_grammars is not None:
            raise RequestError(f"structured: this engine has no grammars: {self._why_no_grammars}")
        name = structured.backend or self._config.use
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
        if size > self._config.max_bytes:
            raise RequestError(
                f"structured.{structured.format}: expected at most {self._config.max_bytes} "
                f"bytes (grammar.max_bytes), got {size}"
            )
        if not request.stop_token_ids:
            why = "ignore_eos is true" if request.params.ignore_eos else "the model has none"
            raise RequestError(
                f"structured: it needs a token that ends the output, but {why}, and "
                f"stop_token_ids is empty"
            )


def is_answered_alike(params: SamplingParams, before: SamplingParams) -> bool:
    """Return whether the answer begins in the same place, after a hook changed parameters."""
    fields = ("structured", "reasoning_parser", "tool_parser")
    return all(getattr(params, name) == getattr(before, name) for name in fields)


def constrain_calls(
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
        return  # the request's own grammar is of the whole answer, which has no calls
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
    try:
        format = parser.call_format(schemas, required=required, parallel=calls.parallel)
    except RequestError:
        raise
    except (NotImplementedError, ValueError) as cause:
        raise RequestError(f"tools: output parser {parser.name!r}: {cause}") from cause
    structured = StructuredOutputs(
        # One keyword of a strict tool that is left out would be one too many.
        structural_tag=StructuralTag(format=format),
        lenient=schemas.keys().isdisjoint(calls.strict),
    )
    request.params = msgspec.structs.replace(request.params, structured=structured)
    markers = (parsers.reasoning or parser).markers()
    request.reasoning_markers = msgspec.structs.replace(markers, content_prefix=())
