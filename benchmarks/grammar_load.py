"""Grammars and texts that fit them, for benchmarks/grammars.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_NUM_TEXTS = 8
_SYLLABLES = ["ka", "lo", "mi", "ten", "ra", "su", "ver", "pol", "da", "fi", "gre", "jo", "lin"]
_PRICES = {"type": "number", "minimum": 0, "maximum": 10_000}


def _phrase(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(count))


def _names(count: int) -> list[str]:
    rng = random.Random(count)
    return [f"{_phrase(rng, 2)} {index}" for index in range(count)]


TAGS = {"type": "array", "items": {"type": "string"}}
SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "active"],
    "additionalProperties": False,
}


def _small(rng: random.Random) -> str:
    record = {
        "name": _phrase(rng, 5),
        "age": rng.randint(0, 120),
        "tags": [_phrase(rng, 1) for _ in range(6)],
        "active": rng.random() < 0.5,
    }
    return json.dumps(record)


def _parameters(rng: random.Random, count: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer"},
        _PRICES,
        {"enum": ["low", "medium", "high"]},
        {"type": "array", "items": {"type": "string"}},
        {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
    ]
    properties = {
        f"{rng.choice(_SYLLABLES)}_{index}": kinds[index % len(kinds)] for index in range(count)
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[: count // 2],
        "additionalProperties": False,
    }


OBJECTS = {
    "strings of any length": {**SMALL, "properties": {**SMALL["properties"], "tags": TAGS}},
    "some with a maxLength": SMALL,
}
"""Schemas of the items of an array."""

_RNG = random.Random(1)
TOOLS = {f"{name.replace(' ', '_')}": _parameters(_RNG, 12) for name in _names(40)}


def _call(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(list(TOOLS))
    values: dict[str, Callable[[], Any]] = {
        "string": lambda: _phrase(rng, 4),
        "integer": lambda: rng.randint(0, 9999),
        "number": lambda: rng.randint(0, 999_999) / 100,
        "array": lambda: [_phrase(rng, 2) for _ in range(3)],
        "object": lambda: {"x": rng.randint(-9, 9), "y": 0.5},
    }
    arguments = {
        key: values[kind["type"]]() if "type" in kind else rng.choice(kind["enum"])
        for key, kind in TOOLS[name]["properties"].items()
    }
    return {"name": name, "arguments": arguments}


TOOL_CALL = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, parameters in TOOLS.items()
    ]
}


def _any_object(rng: random.Random) -> str:
    listed = [{"id": n, "text": _phrase(rng, 6), "ok": None} for n in range(5)]
    return json.dumps({"list": listed, "total": rng.random()})


def _log(rng: random.Random) -> str:
    lines = (
        f"20{rng.randint(10, 99)}-0{rng.randint(1, 9)}-{rng.randint(10, 28)} "
        f"{rng.choice(['INFO', 'WARN'])}: {_phrase(rng, 9)}."
        for _ in range(6)
    )
    return "\n".join(lines)


CHOICES = _names(1000)
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call>"],
        "tags": [
            {
                "type": "tag",
                "begin": f'<call>{{"name": "{name}", "arguments": ',
                "content": {"type": "json_schema", "json_schema": parameters},
                "end": "}</call>",
            }
            for name, parameters in list(TOOLS.items())[:10]
        ],
    },
}


def _tagged(rng: random.Random) -> str:
    name = ""
    while name not in list(TOOLS)[:10]:
        call = _call(rng)
        name = call["name"]
    return f"{_phrase(rng, 40)} <call>{json.dumps(call)}</call>"


@dataclass(frozen=True)
class Load:
    """A grammar, and texts that it allows.

    Attributes:
        structured: as a request gives it.
        text: returns one of the texts.
    """

    structured: dict[str, Any]
    text: Callable[[random.Random], str]

    def texts(self) -> list[str]:
        """Return texts, the same in each run."""
        rng = random.Random(0)
        return [self.text(rng) for _ in range(_NUM_TEXTS)]


LOADS = {
    "small schema": Load({"json": SMALL}, _small),
    "40 tools": Load({"json": TOOL_CALL}, lambda rng: json.dumps(_call(rng))),
    "json_object": Load({"json_object": True}, _any_object),
    "regex": Load({"regex": r"(20\d\d-\d\d-\d\d (INFO|WARN): [a-z0-9 ]{1,200}\.\n?){1,50}"}, _log),
    "choice of 1000": Load({"choice": CHOICES}, lambda rng: rng.choice(CHOICES)),
    "structural tag": Load({"structural_tag": TAG}, _tagged),
}


def schemas() -> list[dict[str, Any]]:
    """Return schemas of many sizes, from 2 to 100 properties."""
    rng = random.Random(2)
    flat = [_parameters(rng, count) for count in range(2, 22)]
    nested = [
        {"type": "array", "items": _parameters(rng, count), "maxItems": 100}
        for count in range(4, 24, 2)
    ]
    deep: dict[str, Any] = SMALL
    for level in range(10):
        deep = {
            "type": "object",
            "properties": {"next": deep, f"value_{level}": {"type": "string"}},
            "required": ["next"],
            "additionalProperties": False,
        }
    return [*flat, *nested, deep, _parameters(rng, 100), SMALL, TOOL_CALL]
