"""The adapter of logits processors in the form of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hardpoint.plugins import ComponentAdapter, Phase, PrepareContext
from hardpoint.toolkit.logits_calls import (
    CallSignature,
    ExternalProcessor,
    OwnObjects,
    is_transformers_form,
    with_ids,
)

if TYPE_CHECKING:
    from hardpoint.plugins.component.base import Component, Source


class Transformers(ComponentAdapter):
    """Adapts logits processors of transformers: classes, ready objects and lists of them."""

    contract = 1

    @classmethod
    def matches(cls, target: Any, kind: str | None) -> bool:
        """Return whether it has transformers' base class or signature."""
        return kind in (None, "logits_processors") and is_transformers_form(target)

    @classmethod
    def adapt(cls, target: Any, source: Source) -> type[Component]:
        """Return the component."""
        return TransformersProcessor.of(ExternalProcessor(target, source))


class TransformersProcessor(OwnObjects):
    """Runs a processor in transformers' form."""

    contract = 1
    phase = Phase.PENALTY
    adapter = "transformers LogitsProcessor"

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Check that the prompt has ids everywhere.

        Raises:
            ValueError: it has embeddings.
        """
        with_ids(CallSignature.TRANSFORMERS, context.prompt_token_ids)
        return arguments
