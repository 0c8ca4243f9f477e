"""The field `response_format` of OpenAI's routes: any text, JSON, or a structural tag."""

from __future__ import annotations

from typing import Any

import msgspec

from hardpoint.plugins import RequestError
from hardpoint.typed import Strict


class TextFormat(Strict, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Strict, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(Strict):
    """A JSON schema with a name.

    Attributes:
        strict: whether every keyword must be enforced; if not, keywords that cannot be are checked
            when the answer is finished.
    """

    name: str = "answer"
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class JsonSchemaResponseFormat(Strict, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    json_schema: NamedSchema


class StructuralTagFormat(Strict, tag_field="type", tag="structural_tag"):
    """A text made of parts, see `StructuredOutputs.structural_tag`."""

    format: Any = None
    structures: Any = None
    triggers: Any = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaResponseFormat | StructuralTagFormat


def structured_fields(answer_format: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the fields of `StructuredOutputs` for a format; None for any text.

    Raises:
        RequestError: a schema is missing.
    """
    match answer_format:
        case JsonObjectFormat():
            return {"json_object": True}
        case JsonSchemaResponseFormat():
            schema = answer_format.json_schema.schema
            if schema is None:
                raise RequestError("response_format.json_schema.schema: missing")
            return {"json": schema, "lenient": answer_format.json_schema.strict is not True}
        case StructuralTagFormat():
            tag = msgspec.to_builtins(answer_format)
            return {"structural_tag": {k: v for k, v in tag.items() if v is not None}}
    return None
