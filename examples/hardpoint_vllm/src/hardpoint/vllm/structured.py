"""vLLM's parameters for the form of an output, which become Hardpoint's structured outputs."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import msgspec

from hardpoint.errors import RequestError
from hardpoint.plugins.structured import StructuredOutputs

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass
class StructuredOutputsParams:
    """The form of an answer: one of the first six fields is given.

    `backend` and `disable_fallback` change no output: `grammar.use` selects the backend.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: none or several of the first six are given.
        """
        names = self._given()
        if len(names) > 1:
            raise ValueError(
                f"structured_outputs: expected one of {', '.join(_FORMS)}, got {', '.join(names)}"
            )

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """Return parameters of these fields; None is a field's default."""
        names = {parameter.name for parameter in fields(cls)}
        if unknown := values.keys() - names:
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
        return cls(**{name: value for name, value in values.items() if value is not None})

    def _given(self) -> list[str]:
        return [name for name in _FORMS if getattr(self, name) not in (None, False)]

    def all_constraints_none(self) -> bool:
        """Return whether none is given."""
        return not self._given()

    def native(self) -> StructuredOutputs | None:
        """Return Hardpoint's object.

        Raises:
            RequestError: a field is wrong.
        """
        if not (names := self._given()):
            return None
        (name,) = names
        value = getattr(self, name)
        if name == "structural_tag" and isinstance(value, str):
            value = msgspec.json.decode(value)
        form = StructuredOutputs.checked({name: value}, "structured_outputs")
        return self._with_json_options(form) if name in ("json", "json_object") else form

    def _with_json_options(self, form: StructuredOutputs) -> StructuredOutputs:
        """Return the form with the options for JSON: a grammar that has the schema."""
        schema: Any = {"type": "object"} if form.json_object else form.json
        if self.disable_additional_properties:
            schema = _closed(schema)
            form = StructuredOutputs.checked({"json": schema}, "structured_outputs")
        options: dict[str, Any] = {}
        if self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        elif self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        if not options:
            return form
        if not isinstance(schema, Mapping):
            raise RequestError(
                f"structured_outputs.json: expected a schema that is a table with "
                f"{next(iter(options))}, got {schema!r}"
            )
        text = json_module.dumps({**schema, "x-guidance": options})
        return StructuredOutputs.checked({"grammar": f"start: %json {text}"}, "structured_outputs")


def _closed(schema: Any) -> Any:
    """Return a schema with `additionalProperties: false` in objects that leave it out."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _closed(item) for name, item in schema.items()}
    if isinstance(schema.get("properties"), Mapping) and schema.get("type") in (None, "object"):
        closed.setdefault("additionalProperties", False)
    return closed


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """The name of StructuredOutputsParams before vLLM 0.11."""


@dataclass
class GuidedDecodingRequest:
    """The form of an answer as `LLM.generate` took it before vLLM 0.10, with its field names."""

    guided_json: str | dict[str, Any] | type | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_json_object: bool | None = None
    structural_tag: str | None = None

    def form(self) -> StructuredOutputsParams:
        """Return the same with the field names of today.

        Raises:
            ValueError: several forms are given.
        """
        return StructuredOutputsParams(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            json_object=self.guided_json_object,
            structural_tag=self.structural_tag,
            whitespace_pattern=self.guided_whitespace_pattern,
            backend=self.guided_decoding_backend,
        )
