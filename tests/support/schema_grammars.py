"""Grammars of llguidance for JSON schemas, over single bytes."""

from __future__ import annotations

import itertools
import json

from hardpoint.builtin_plugins.grammars.llguidance import LLGuidance
from hardpoint.plugins.grammars import GrammarContext, Vocabulary
from hardpoint.plugins.structured import StructuredOutputs

BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(256)))


def open_backend(**options) -> LLGuidance:
    return LLGuidance(
        GrammarContext(
            name="llguidance",
            options=LLGuidance.Options(**options),
            vocabulary=BYTES,
            vocab_size=256,
        )
    )


BACKEND = open_backend()


def compiled(schema, *, lenient=False, backend=BACKEND):
    """Return the state before the first byte."""
    return backend.compile(StructuredOutputs.checked({"json": schema, "lenient": lenient}))


def takes(state, text: str) -> bool:
    """Return whether a grammar takes a whole text."""
    state = state.fork()
    return all(state.advance(byte) for byte in text.encode()) and state.can_end()


def takes_value(state, value) -> bool:
    """Return whether it takes a value with its properties in any order."""
    return any(takes(state, json.dumps(text)) for text in orders(value))


def orders(value):
    """Yield a value with its properties in each order."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for items in itertools.product(*(list(orders(value[name])) for name in names)):
                yield dict(zip(names, items, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(orders(item)) for item in value)))
    else:
        yield value
