"""Arguments that `plugins check` draws: all that their type accepts, and nothing else."""

import enum
import math
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import strategies as st
from msgspec import Meta

from hardpoint import plugins
from hardpoint.testing.checking.drawn_arguments import UndrawnError, arguments_of
from hardpoint.testing.suite import Search
from hardpoint.typed import Strict, convert


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Inner(Strict):
    at_least: Annotated[int, Meta(gt=7)]
    word: Annotated[str, Meta(pattern="^[xyz]{3}$")] = "xyz"


class Cat(Strict, tag=True):
    lives: Annotated[int, Meta(ge=1, le=9)]


class Dog(Strict, tag_field="kind", tag="dog"):
    tricks: list[str]


class Bird(Strict, tag_field="kind", tag="bird"):
    wings: Literal[2]


class Range(Strict):
    low: Annotated[int, Meta(ge=0, le=9)]
    high: Annotated[int, Meta(ge=0, le=9)]

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low must be at most high")


class Tree(Strict):
    leaf: int
    left: "Tree | None" = None


class Renamed(Strict, rename="camel"):
    some_name: int


class Row(msgspec.Struct, array_like=True):
    x: int


INTS = [
    *(Meta(ge=5), Meta(gt=5), Meta(le=-5), Meta(lt=-5), Meta(ge=200), Meta(gt=-9, lt=-7)),
    *(Meta(multiple_of=7), Meta(ge=101, multiple_of=1000), Meta(lt=-3, multiple_of=10)),
    *(Meta(gt=2, le=30, multiple_of=3), Meta(le=0), Meta(lt=1, multiple_of=200)),
]
FLOATS = [
    *(Meta(gt=4), Meta(gt=5), Meta(ge=4), Meta(lt=-4), Meta(le=-4), Meta(le=3), Meta(gt=-3)),
    *(Meta(gt=1e20), Meta(lt=-1e20), Meta(gt=0, lt=1e-3), Meta(ge=2, le=2), Meta(gt=4, le=9)),
    *(Meta(multiple_of=0.5, ge=0, le=2), Meta(multiple_of=0.1), Meta(multiple_of=3, gt=100)),
    *(Meta(multiple_of=2, gt=0, lt=6), Meta(multiple_of=0.25, lt=-8), Meta(multiple_of=10)),
]
TEXTS = [
    *(Meta(pattern="^[a-z]+$"), Meta(pattern="[0-9]{3}"), Meta(pattern=r"\bfoo\b")),
    *(Meta(pattern="[0-9]", max_length=2), Meta(pattern="^[a-z]*$", min_length=20)),
    *(Meta(pattern=r"^v[0-9]+\.[0-9]+$", min_length=8, max_length=9), Meta(pattern="")),
    *(Meta(pattern="(?i)^(yes|no)$"), Meta(pattern="(?<=a)b"), Meta(pattern="^a|b$")),
    *(Meta(min_length=3), Meta(max_length=0), Meta(max_length=2), Meta(min_length=2, max_length=2)),
]
SIZES = [Meta(min_length=2), Meta(max_length=1), Meta(min_length=1, max_length=2)]
TYPES: list[Any] = [
    *(Annotated[int, meta] for meta in INTS),
    *(Annotated[float, meta] for meta in FLOATS),
    *(Annotated[str, meta] for meta in TEXTS),
    *(Annotated[kind, meta] for kind in (list[int], set[int], set[bool]) for meta in SIZES),
    *(Annotated[dict[str, float], meta] for meta in SIZES),
    *(bool, None, str, int, float, Color, Level, Literal["a", 1, None], int | str, float | None),
    *(Annotated[int, Meta(ge=200)] | None, Annotated[int, Meta(gt=3)] | Annotated[str, TEXTS[0]]),
    *(tuple[int, int], tuple[()], tuple[Annotated[int, INTS[0]], ...], frozenset[str]),
    *(dict[int, list[Inner]], dict[Color, Inner], dict[Annotated[str, TEXTS[1]], int]),
    *(list[tuple[str, Annotated[float, FLOATS[0]]]], set[tuple[int, str]], datetime | int),
    *(Inner, Cat, Dog, Dog | Bird, list[Cat], Range, list[Range], Tree, Renamed, Row | None),
]


def drawn(type_: Any, count: int = 30) -> list[Any]:
    """Return values of a strategy for a required field of a type, each accepted by the type."""
    space = {"__annotations__": {"it": type_}, "__module__": __name__}
    declared = type(plugins.Arguments)("Declared", (plugins.Arguments,), space)
    strategy = arguments_of(declared)
    assert strategy is not None
    values: list[Any] = []

    def check(value: Any) -> None:
        values.append(value["it"])
        convert(value, declared, path="arguments")
        msgspec.convert(value, declared)

    Search(count, seed=1).run(check, value=strategy)
    return values


@pytest.mark.parametrize("type_", TYPES, ids=str)
def test_drawn_values_are_of_their_type(type_):
    assert drawn(type_)


def test_drawn_values_differ():
    assert len({*drawn(Annotated[float, Meta(gt=4)])}) > 5
    assert {*drawn(Annotated[float, Meta(multiple_of=0.5, ge=0, le=2)])} == {0, 0.5, 1, 1.5, 2}
    assert len({*drawn(Annotated[int, Meta(ge=200)])}) > 3
    padded = drawn(Annotated[str, Meta(pattern="[0-9]{3}")])
    assert any(not text.isdigit() for text in padded)  # the pattern is searched
    assert {math.fmod(v, 3) for v in drawn(Annotated[float, Meta(multiple_of=3, gt=100)])} == {0}


@pytest.mark.parametrize(
    ("type_", "field"),
    [
        (bytes, "it"),
        (datetime, "it"),
        (list[datetime], "it"),
        (tuple[int, bytes], "it"),
        (dict[tuple[int, int], str], "it"),
        (Row, "it"),
        (Annotated[float, Meta(multiple_of=5, gt=0, lt=5)], "it"),
        (msgspec.defstruct("Outer", [("inner", list[bytes])]), "it.inner"),
    ],
)
def test_types_that_are_not_drawn_are_named(type_, field):
    with pytest.raises(UndrawnError) as error:
        drawn(type_)
    assert error.value.field == field


def test_fields_with_a_default_are_left_out():
    fields = [("a", int), ("b", int, 1), ("at", datetime | None, None), ("raw", bytes, b"")]
    strategy = arguments_of(msgspec.defstruct("Declared", fields))
    assert isinstance(strategy, st.SearchStrategy)
    keys: list[set[str]] = []
    Search(30, seed=1).run(lambda value: keys.append({*value}), value=strategy)
    assert {"a"} in keys
    assert {"a", "b", "at"} in keys
    assert not any("raw" in key for key in keys)
    assert arguments_of(plugins.Arguments) is None
