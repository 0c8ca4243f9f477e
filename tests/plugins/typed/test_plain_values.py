"""Tables with keys that are not texts: from JSON and from Python, and as stable bytes."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
import tomllib
import uuid
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Meta

from hardpoint.plugins import ConfigError
from hardpoint.typed import Strict, convert, stable_bytes, toml_text


class Level(enum.IntEnum):
    LOW = 1


class Inner(Strict):
    weights: dict[int, float] = {}


@dataclasses.dataclass
class Plain:
    weights: dict[int, float]


class Tables(Strict):
    ints: dict[Annotated[int, Meta(ge=0)], float] = {}
    floats: dict[float, int] = {}
    either: dict[int | str, int] = {}
    levels: dict[Level, int] = {}
    some: dict[Literal[1, 2], int] = {}
    days: dict[date, int] = {}
    ids: dict[uuid.UUID, int] = {}
    amounts: dict[Decimal, int] = {}
    raw: dict[bytes, int] = {}
    pairs: dict[tuple[int, int], int] = {}
    inner: Inner = Inner()
    listed: list[Inner] = []
    plain: Plain | None = None
    deep: dict[int, dict[int, int]] = {}
    anything: Any = None


NUMBER = uuid.UUID(int=7)


@pytest.mark.parametrize(
    ("value", "field", "expected"),
    [
        ({"ints": {"7": 0.5}}, "ints", {7: 0.5}),
        ({"ints": {7: 0.5, "8": 1}}, "ints", {7: 0.5, 8: 1.0}),
        ({"floats": {"0.5": 1}}, "floats", {0.5: 1}),
        ({"floats": {1: 1}}, "floats", {1.0: 1}),
        ({"either": {"7": 1, 8: 1}}, "either", {"7": 1, 8: 1}),
        ({"levels": {"1": 1}}, "levels", {Level.LOW: 1}),
        ({"some": {"2": 1}}, "some", {2: 1}),
        ({"days": {"2024-02-03": 1}}, "days", {date(2024, 2, 3): 1}),
        ({"ids": {str(NUMBER): 1}}, "ids", {NUMBER: 1}),
        ({"amounts": {"1.50": 1}}, "amounts", {Decimal("1.50"): 1}),
        ({"raw": {"YQ==": 1}}, "raw", {b"a": 1}),
        ({"pairs": {(1, 2): 1}}, "pairs", {(1, 2): 1}),
        ({"inner": {"weights": {"7": 1}}}, "inner", Inner(weights={7: 1.0})),
        ({"listed": [{}, {"weights": {"7": 1}}]}, "listed", [Inner(), Inner(weights={7: 1.0})]),
        ({"deep": {"1": {"2": 3}}}, "deep", {1: {2: 3}}),
        ({"plain": {"weights": {"7": 1}}}, "plain", Plain({7: 1.0})),
        ({"anything": {"7": 1, 8: 1}}, "anything", {"7": 1, 8: 1}),
    ],
)
def test_texts_stand_for_keys_of_other_types(value, field, expected):
    converted = convert(value, Tables, path="a", str_keys=True)
    assert getattr(converted, field) == expected
    assert convert(converted, Tables, path="a", str_keys=True) == converted


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"ints": {"x": 1, "7": 1}}, "a.ints: expected a whole number as key, got 'x'"),
        ({"ints": {"7": 1, "x": 1}}, "a.ints: expected a whole number as key, got 'x'"),
        ({"ints": {"-7": 1, "7": 1}}, "a.ints: expected a whole number >= 0 as key, got '-7'"),
        ({"ints": {"7.5": 1}}, "a.ints: expected a whole number as key, got '7.5'"),
        ({"ints": {"07": 1}}, "a.ints: expected a whole number as key, got '07'"),
        ({"ints": {"7": "x", "8": 1}}, "a.ints.7: expected a number, got 'x'"),
        ({"ints": {"7": 1, "8": "x"}}, "a.ints.8: expected a number, got 'x'"),
        ({"ints": {7: 1, "7": 2}}, "a.ints: expected each key once, got [7, '7']"),
        ({"floats": {"1": 1, "1.0": 2}}, "a.floats: expected each key once, got ['1', '1.0']"),
        (
            {"listed": [{}, {"weights": {7: 1, "7": 2}}]},
            "a.listed[1].weights: expected each key once, got [7, '7']",
        ),
        ({"deep": {"5": {7: 1, "7": 2}}}, "a.deep.5: expected each key once, got [7, '7']"),
        ({"floats": {"nan": 1}}, "a.floats: expected a finite number as key, got nan"),
        ({"floats": {float("inf"): 1}}, "a.floats: expected a finite number as key, got inf"),
        (
            {"ints": {str(2**70): 1}},
            f"a.ints: expected a whole number of at most 64 bits as key, got {2**70}",
        ),
        (
            {"ints": {2**70: 1}},
            f"a.ints: expected a whole number of at most 64 bits as key, got {2**70}",
        ),
        ({"deep": {"1": {"2": "3"}}}, "a.deep.1.2: expected a whole number, got '3'"),
    ],
)
def test_what_does_not_fit_is_named(value, message):
    with pytest.raises(ConfigError) as error:
        convert(value, Tables, path="a", str_keys=True)
    assert str(error.value) == message


class TestStableBytes:
    def test_texts_alone_are_json(self):
        assert stable_bytes({"b": [1, 2.5], "a": {"x": None}}) == b'{"a":{"x":null},"b":[1,2.5]}'

    @pytest.mark.parametrize(
        "values",
        [
            [{1: "a", 2: "b"}, {2: "b", 1: "a"}],
            [{1: "a", "b": 2}, {"b": 2, 1: "a"}],
            [{(1, 2): 3, (0, 9): 4}, {(0, 9): 4, (1, 2): 3}],
            [{None: 1, True: 2}, {True: 2, None: 1}],
            [{1: {2: 3, 4: 5}}, {1: {4: 5, 2: 3}}],
            [{"x", "y", "z"}, {"z", "x", "y"}],
            [{1, "x", None}, {None, "x", 1}],
            [Inner(weights={1: 1.0, 2: 2.0}), Inner(weights={2: 2.0, 1: 1.0})],
            [Plain({1: 1.0, 2: 2.0}), Plain({2: 2.0, 1: 1.0})],
        ],
    )
    def test_order_does_not_matter(self, values):
        assert len({stable_bytes(value) for value in values}) == 1

    def test_other_values_have_other_bytes(self):
        values = [
            *({1: 0}, {"1": 0}, {True: 0}, {None: 0}, {1.5: 0}, {"1.5": 0}, {(1,): 0}, {b"1": 0}),
            *([[1, 0]], [(1, 1)], {1: 1}, {1: [0]}, {1: {0: 0}}, {1: {"0": 0}}, {1: True}),
            *(
                {1: date(2024, 2, 3)},
                Plain({1: 0.5}),
                Inner(weights={1: 0.5}),
                {"weights": {1: 0.5}},
            ),
        ]
        assert len({stable_bytes(value) for value in values}) == len(values)

    def test_every_process_has_the_same(self):
        program = (
            "from hardpoint.typed import stable_bytes\n"
            "texts = set(map(str, range(50)))\n"
            "print(stable_bytes({'a': texts}).hex(), stable_bytes({1: texts, 'b': texts}).hex())"
        )
        outputs = [
            subprocess.run(
                [sys.executable, "-c", program],
                env={"PYTHONHASHSEED": str(seed)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in (1, 2)
        ]
        assert outputs[0] == outputs[1]


TOML_VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text('a ."é'), values),
    max_leaves=8,
)


@given(TOML_VALUES)
@example("\x7f")
def test_values_in_toml_are_read_as_they_were(value):
    assert tomllib.loads(f"a = {toml_text(value)}") == {"a": value}


def test_values_that_toml_has_no_form_for():
    assert toml_text(None) == "none"
    assert toml_text({7: (1, 2.5)}) == '{ "7" = [1, 2.5] }'
