"""Errors of typed values: path, value and expectation, word by word."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from hardpoint.plugins import Arguments, ConfigError, Options, RequestError
from hardpoint.typed import Strict, convert, join_path, json_schema, suggest


class Colour(enum.IntEnum):
    RED = 0
    BLUE = 1


class Inner(Strict):
    """A table.

    Attributes:
        size: size of something.
    """

    size: Annotated[int, Meta(ge=1)] = 1
    name: Annotated[str, Meta(min_length=1)] = "x"


class Outer(Strict):
    number: Annotated[float, Meta(gt=0, le=2)] = 1.0
    flag: bool = False
    choice: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    maybe: Annotated[int, Meta(ge=1)] | None = None
    inner: Inner = Inner()
    listed: list[Inner] = []
    either: list[str | Inner] = []
    mapped: dict[str, Inner] = {}
    biases: dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(le=100)]] = {}
    deep: dict[str, dict[str, list[int]]] = {}
    anything: Any = None


class Needs(Strict):
    key: str


def message(value, type_=Outer, path="a.b"):
    with pytest.raises(ConfigError) as error:
        convert(value, type_, path=path)
    return str(error.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"number": 0}, "a.b.number: expected a number > 0, got 0"),
        ({"number": 3.5}, "a.b.number: expected a number <= 2, got 3.5"),
        ({"flag": 1}, "a.b.flag: expected true or false, got 1"),
        ({"maybe": 0}, "a.b.maybe: expected a whole number >= 1, got 0"),
        ({"inner": {"size": 0}}, "a.b.inner.size: expected a whole number >= 1, got 0"),
        ({"inner": 3}, "a.b.inner: expected a table, got 3"),
        ({"listed": [{}, {"size": 0}]}, "a.b.listed[1].size: expected a whole number >= 1, got 0"),
        ({"listed": {}}, "a.b.listed: expected a list, got {}"),
        ({"mapped": {"k": {"size": 0}}}, "a.b.mapped.k.size: expected a whole number >= 1, got 0"),
        ({"mapped": {"k": 0}}, "a.b.mapped.k: expected a table, got 0"),
        ({"biases": {7: 200.0}}, "a.b.biases.7: expected a number <= 100, got 200.0"),
        (
            {"biases": {n: 200.0 if n == 37 else 0.0 for n in range(100)}},
            "a.b.biases.37: expected a number <= 100, got 200.0",
        ),
        (
            {"deep": {"x": {"y": [1]}, "p.q": {"y": [1], "z": [1, "w"]}}},
            "a.b.deep.p.q.z[1]: expected a whole number, got 'w'",
        ),
    ],
)
def test_path_message_and_value(value, expected):
    assert message(value) == expected


@pytest.mark.parametrize(
    ("value", "start", "end"),
    [
        ({"number": "1"}, "a.b.number: expected a number", ", got '1'"),
        ({"maybe": "1"}, "a.b.maybe: expected a whole number", ", got '1'"),
        ({"choice": "c"}, 'a.b.choice: expected "a" or "b"', ", got 'c'"),
        ({"colour": 7}, "a.b.colour: ", ", got 7"),
        ({"inner": {"name": ""}}, "a.b.inner.name: expected a string", ", got ''"),
        ({"biases": {3: 1.0, -1: 1.0}}, "a.b.biases: expected a whole number >= 0 as key", "-1"),
        ({"biases": {"x": 1.0, 3: 1.0}}, "a.b.biases: expected a whole number", " as key, got 'x'"),
        ({"biases": {"3": 1.0}}, "a.b.biases: expected a whole number", " as key, got '3'"),
        ({"deep": {"k": {"m": [], 4: []}}}, "a.b.deep.k: expected a string as key", ", got 4"),
    ],
)
def test_what_would_be_right_comes_first_and_the_value_last(value, start, end):
    assert message(value).startswith(start)
    assert message(value).endswith(end)


class TestUnknownFields:
    def test_suggests_and_lists(self):
        assert message({"numbr": 1}).startswith(
            "a.b.numbr: unknown field (did you mean 'number'?); known here: number, flag, "
        )

    def test_without_anything_close_only_lists(self):
        assert message({"inner": {"zzz": 1}}) == (
            "a.b.inner.zzz: unknown field; known here: size, name"
        )

    @pytest.mark.parametrize(
        ("value", "path"),
        [
            ({"mapped": {"k": {"sise": 1}}}, "a.b.mapped.k.sise"),
            ({"listed": [{"sise": 1}]}, "a.b.listed[0].sise"),
            ({"either": ["x", {"sise": 1}]}, "a.b.either[1].sise"),
        ],
    )
    def test_inside_lists_mappings_and_unions(self, value, path):
        assert message(value) == (
            f"{path}: unknown field (did you mean 'size'?); known here: size, name"
        )

    def test_a_table_without_fields_lists_none(self):
        assert message({"x": 1}, Options) == "a.b.x: unknown field"

    def test_a_name_that_is_not_one_line_is_quoted(self):
        assert message({"x\ny": 1}, Options) == r"a.b.'x\ny': unknown field"


class TestNumbers:
    @pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
    def test_must_be_finite_everywhere(self, number):
        assert message({"number": number}) == f"a.b.number: expected a finite number, got {number}"
        assert message({"anything": [{"k": number}]}).startswith("a.b.anything[0].k: expected a fi")
        assert message({"biases": {7: number}}).startswith("a.b.biases.7: expected a finite number")

    def test_whole_numbers_are_taken_as_numbers(self):
        assert convert({"number": 2}, Outer, path="").number == 2.0

    def test_true_is_no_number(self):
        assert message({"maybe": True}).startswith("a.b.maybe: expected a whole number")


def test_a_missing_field():
    assert message({}, Needs) == "a.b.key: missing, and it has no default"


def test_an_empty_path():
    assert message({}, Needs, path="") == "key: missing, and it has no default"
    assert message(3, Needs, path="plugin.x") == "plugin.x: expected a table, got 3"


def test_instances_are_checked_too():
    """Constructing a struct checks nothing, so it must happen here."""
    assert message(Outer(number=-1.0)) == "a.b.number: expected a number > 0, got -1.0"
    assert message(Outer(inner=Inner(size=0))) == (
        "a.b.inner.size: expected a whole number >= 1, got 0"
    )
    assert convert(Outer(number=2.0), Outer, path="") == Outer(number=2.0)


def test_the_error_type_is_the_callers():
    with pytest.raises(RequestError, match=r"^number: expected"):
        convert({"number": 0}, Outer, path="", error=RequestError)


class TestStrict:
    @pytest.mark.parametrize("base", [Strict, Options, Arguments])
    def test_subclasses_are_frozen_closed_and_keyword_only(self, base):
        class Mine(base):
            size: int = 1

        with pytest.raises(AttributeError, match="immutable"):
            Mine().size = 2
        with pytest.raises(TypeError, match="positional"):
            Mine(2)
        assert message({"sise": 1}, Mine).startswith("a.b.sise: unknown field")

    def test_a_required_field_may_follow_an_optional_one(self):
        class Mine(Options):
            size: int = 1
            key: str

        assert convert({"key": "k"}, Mine, path="") == Mine(key="k")


def test_json_schema_has_limits_and_forbids_more():
    definition = json_schema(Inner)["$defs"]["Inner"]
    assert definition["properties"]["size"]["minimum"] == 1
    assert definition["additionalProperties"] is False


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("a", "b"), "a.b"),
        (("", "b"), "b"),
        (("a", ""), "a"),
        (("a", "[0]", "b"), "a[0].b"),
        ((), ""),
    ],
)
def test_join_path(parts, joined):
    assert join_path(*parts) == joined


def test_suggest():
    assert suggest("tempertaure", ["top_p", "temperature"]) == " (did you mean 'temperature'?)"
    assert suggest("zzz", ["top_p", "temperature"]) == ""
    assert suggest("x", []) == ""


def test_msgspec_still_writes_its_errors_as_we_read_them():
    """Our messages are made from these; a new msgspec with other messages shows here."""
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert({"biases": {7: 200.0}}, Outer)
    assert str(error.value) == "Expected `float` <= 100.0 - at `$.biases[...]`"


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "options"),
        ({"anything": object()}, "options.anything"),
        (Outer(anything=[1, {"a": object()}]), "options.anything[1].a"),
        ({"anything": (1, {object()})}, "options.anything[1][0]"),
        ({"mapped": {"x": object(), "y": 1}}, "options.mapped.x"),
    ],
)
def test_what_is_no_plain_data_is_named_by_its_path(value, where):
    with pytest.raises(ConfigError) as error:
        convert(value, Outer, path="options")
    expected = f"{where}: expected plain data: a builtins.object cannot be converted"
    assert str(error.value) == expected


class _Circle(Strict, tag_field="type", tag="circle"):
    radius: float


class _Square(Strict, tag_field="type", tag="square"):
    side: float


class _Shapes(Strict):
    shapes: list[_Circle | _Square]


def test_unknown_fields_of_a_tagged_struct_are_answered_with_its_own():
    data = {"shapes": [{"type": "square", "side": 1, "radios": 2}]}
    with pytest.raises(ConfigError) as raised:
        convert(data, _Shapes, path="")
    assert str(raised.value) == "shapes[0].radios: unknown field; known here: side"
