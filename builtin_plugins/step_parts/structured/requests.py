"""Structured output in the frontend: checks that grammars can be compiled, validates answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from hardpoint.errors import PluginFaultError, RequestError
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    FrontendHalf,
    GrammarBackend,
    ReasoningMarkers,
)
from hardpoint.plugins.step_part import (
    FrontendHalfContext,
)

from .call_grammar import constrain_calls

if TYPE_CHECKING:
    from hardpoint.plugins.text.output_parser import ToolCalls


_CANNOT = "the answer cannot be validated"


class StructuredRequests(FrontendHalf):
    """Checks that a request's grammar can be compiled, and fills in where its answer begins.

    The answer of a lenient request, with a partly enforced grammar, is validated in the end.
    """

    for_parameters = ("structured",)

    def __init__(self, context: FrontendHalfContext, config: EngineConfig) -> None:
        """Ask for the vocabulary, which the engine gets then, if there is a backend.

        Raises:
            PluginNotFoundError: the backend that the configuration names is not enabled.
        """
        self._components, self._config = context.components, config.grammar
        self._why_no_grammars: str | None = None
        if not context.components.enabled("grammars"):
            hint = context.components.hint("grammars", self._config.use)
            self._why_no_grammars = f"no grammar backend is enabled{hint}"
            return
        context.components.source("grammars", self._config.use)
        try:
            context.vocabulary()
        except NotImplementedError as cause:
            self._why_no_grammars = str(cause)

    def prepare(self, request: EngineCoreRequest, reasoning: ReasoningMarkers | None) -> None:
        """Fill in where the answer begins.

        Raises:
            RequestError: no backend compiles the grammar, or no token could show its end; names the
                field.
        """
        structured = request.params.structured
        assert structured is not None, "asked for a request without a grammar"
        if request.reasoning_markers is None:
            request.reasoning_markers = reasoning
        if self._why_no_grammars is not None:
            raise RequestError(f"structured: this engine has no grammars: {self._why_no_grammars}")
        name = structured.backend or self._config.use
        if structured.backend is not None:
            self._components.check_name("grammars", name, "structured.backend")
        formats = self._formats(name)
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

    def prepare_calls(self, request: EngineCoreRequest, calls: ToolCalls) -> None:
        """Fill in the grammar of a request with constrained calls.

        Raises:
            RequestError: the parser of calls gives no such grammar.
        """
        constrain_calls(request, calls, self._takes_tags)

    def _takes_tags(self, backend: str | None) -> bool:
        cls = self._components.find("grammars", backend or self._config.use)
        return cls is not None and "structural_tag" in cast(type[GrammarBackend], cls).formats

    def _formats(self, name: str) -> Sequence[str]:
        """Return the formats that a backend compiles.

        Raises:
            RequestError: it is not enabled.
        """
        backend = self._components.find("grammars", name)
        if backend is None:
            known = self._components.enabled("grammars")
            raise RequestError(
                f"structured.backend: expected an enabled grammar backend "
                f"({', '.join(sorted(known))}), got {name!r}"
                f"{self._components.hint('grammars', name)}"
            )
        assert issubclass(backend, GrammarBackend), "the loader checks components"
        return backend.formats

    def reads_answer(self, request: EngineCoreRequest) -> bool:
        """Return whether an answer is to be validated against the whole schema."""
        structured = request.params.structured
        return structured is not None and structured.lenient and structured.json is not None

    def validate(self, request: EngineCoreRequest, answer: str) -> str | None:
        """Return the flaw of an answer that is to be JSON of a schema; None if it has none.

        The backend of the request validates, or the default one if that validates no answers. The
        text names a fault of a backend: the answer itself is there.
        """
        structured = request.params.structured
        assert structured is not None, "asked for a request without a grammar"
        backend = structured.backend or self._config.use
        for name in dict.fromkeys((backend, EngineConfig().grammar.use)):
            if self._components.find("grammars", name) is None:
                continue
            try:
                flaw: str | None = self._components.call(
                    "grammars", name, "validate", structured, answer
                )
            except NotImplementedError:
                continue
            except PluginFaultError as wrong:
                return f"{_CANNOT}: {wrong}"
            return flaw
        return f"{_CANNOT}: the grammar backend {backend!r} has no `validate`"
