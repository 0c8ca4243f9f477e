"""Types and docstrings as text, and the places that use them."""

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta
from msgspec import inspect as types

from hardpoint.plugins import EngineConfig, Options
from hardpoint.plugins.config_tables import PluginUse, SchedulerConfig
from hardpoint.typed import convert, json_schema
from hardpoint.typed.describing import (
    attribute_docs,
    child_type,
    first_paragraph,
    struct_fields,
    type_text,
    walk_structs,
)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Base(Options):
    """A base.

    Attributes:
        a, b: both of them,
            on two lines.

    Not an attribute: this is prose.
    """

    a: int
    b: Annotated[float, Meta(gt=0, description="not shown, the docstring wins")] = 1.0


class Derived(Base):
    """One line.
    And another.

    More.

    Attributes:
        c: a list.
    """

    c: list[int] = []
    d: Annotated[str, Meta(description="by Meta")] = "x"


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        (int, "a whole number"),
        (Annotated[int, Meta(ge=1)], "a whole number >= 1"),
        (Annotated[float, Meta(gt=0, lt=1)], "a number > 0 and < 1"),
        (Annotated[float, Meta(ge=0, le=1)], "a number from 0 to 1"),
        (str, "a string"),
        (Annotated[str, Meta(min_length=1)], "a non-empty string"),
        (bool, "true or false"),
        (int | None, "a whole number, or none"),
        (int | str, "a whole number or a string"),
        (Literal["a", "b"], '"a" or "b"'),
        (Colour, '"red" or "blue"'),
        (list[str], "a list, each a string"),
        (tuple[str, ...], "a list, each a string"),
        (dict[str, int], "a table, each a whole number"),
        (dict[str, Any], "a table"),
        (Base, "a table of a, b"),
        (bytes, "bytes"),
    ],
)
def test_types_as_text(type_, message):
    assert type_text(types.type_info(type_)) == message


def test_attributes_come_from_the_docstring_and_its_bases():
    both = "both of them, on two lines."
    assert attribute_docs(Base) == {"a": both, "b": both}
    assert attribute_docs(Derived) == {"a": both, "b": both, "c": "a list."}


def test_first_paragraph_is_one_line():
    assert first_paragraph(Derived) == "One line. And another."
    assert first_paragraph(type("Plain", (), {})) == ""


def test_fields_of_a_table():
    a, b, c, d = struct_fields(Derived)
    assert (a.name, a.type_text, a.required) == ("a", "a whole number", True)
    assert (b.default, b.required, b.doc) == (1.0, False, "both of them, on two lines.")
    assert (c.default, c.doc) == ([], "a list.")
    assert d.doc == "by Meta"
    (scheduler,) = (field for field in struct_fields(EngineConfig) if field.name == "scheduler")
    assert scheduler.table is SchedulerConfig


def test_every_table_of_the_configuration_is_found_once():
    tables = list(walk_structs(EngineConfig))
    assert tables[0] is EngineConfig
    assert PluginUse in tables
    assert len(tables) == len(set(tables))


def test_child_types():
    root = types.type_info(EngineConfig)
    assert child_type(root, "nothing") is None
    enable = child_type(child_type(root, "plugins"), "enable")
    assert type_text(child_type(child_type(enable, "[0]"), "use")) == "a non-empty string"


def test_every_value_of_the_configuration_is_documented_in_its_schema():
    schema = json_schema(EngineConfig)
    engine = schema["$defs"]["EngineConfig"]
    assert engine["description"] == "The whole configuration of an engine."
    assert engine["properties"]["seed"]["description"].startswith("for requests without a seed")
    undocumented = [
        (name, key)
        for name, table in schema["$defs"].items()
        for key, content in table["properties"].items()
        if not (content.get("description") or "$ref" in content)
    ]
    assert undocumented == []


def test_a_mapping_of_many_names_the_key_at_fault():
    class Table(Options):
        bias: dict[int, Annotated[float, Meta(le=1)]] = {}

    data = {"bias": {**dict.fromkeys(range(100), 0.5), 57: 2.0}}
    with pytest.raises(ValueError, match=r"^x\.bias\.57: expected a number <= 1, got 2\.0$"):
        convert(data, Table, path="x")
