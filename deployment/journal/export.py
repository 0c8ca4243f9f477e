"""Exports of a journal without its texts: times, lengths, shared blocks."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from hardpoint.plugins import EngineCoreRequest
from hardpoint.plugins.kv_cache.block_hash import extra_keys
from hardpoint.toolkit.half_floats import float32_of

from .forcing import recorded_tokens
from .frames import JournalError
from .records import Event
from .run import Journal, request_of

MOONCAKE_BLOCK = 512
"""Tokens of a block in Mooncake's traces."""


class _Exported(msgspec.Struct):
    """A request, and the figures of it that are shown.

    Attributes:
        arrived: milliseconds since the journal began.
        first, ended: the same, for its first token and its end.
    """

    arrived: float
    request: EngineCoreRequest
    first: float | None = None
    ended: float | None = None
    reason: str | None = None
    preemptions: int = 0
    cached: int | None = None


def export(journal: Journal, form: str) -> Iterator[str]:
    """Yield the lines of a trace, each of a request, in the order of arrival.

    Args:
        journal: the journal.
        form: "redacted", or "mooncake": what that form has, which simulations read.

    Raises:
        JournalError: the journal is damaged, has no size of blocks, or there is no such form.
    """
    if form not in ("redacted", "mooncake"):
        raise JournalError(f"form: expected redacted or mooncake, got {form!r}")
    size = MOONCAKE_BLOCK
    if form == "redacted":
        size = journal.block_size
    blocks = _Blocks(size)
    lengths = {name: len(tokens) for name, tokens in recorded_tokens(journal).items()}
    arrivals = sorted(_collected(journal).items(), key=lambda item: item[1].arrived)
    for number, (name, one) in enumerate(arrivals):
        given = one.request.resumed
        count = lengths.get(name, 0) - (len(given.output_token_ids) if given is not None else 0)
        if form == "mooncake" and not count:
            continue  # that form has no request without output
        line: dict[str, Any] = {
            "timestamp": round(one.arrived),
            "input_length": len(one.request.prompt_token_ids),
            "output_length": count,
            "hash_ids": blocks.ids(one.request),
        }
        if form == "redacted":
            line = {"request": number, **line, **_details(one)}
        yield json.dumps(line)


def _details(one: _Exported) -> dict[str, Any]:
    params = one.request.params
    return {
        "priority": one.request.priority,
        "child_index": one.request.child_index,
        "max_tokens": params.max_tokens,
        "has_grammar": params.structured is not None,
        "cached_tokens": one.cached,
        "preemptions": one.preemptions,
        "first_token": one.first,
        "ended": one.ended,
        "finish_reason": one.reason,
    }


def _collected(journal: Journal) -> dict[str, _Exported]:
    found: dict[str, _Exported] = {}
    start = journal.header.clock
    for before, now, event in journal.events():
        for arrival in event.arrivals if event.failure is None else ():
            arrived = _milliseconds(event.arrived(arrival, before) - start)
            found[arrival.request_id] = _Exported(arrived, request_of(arrival))
        _note(found, event, _milliseconds(now - start))
    return found


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _note(found: dict[str, _Exported], event: Event, time: float) -> None:
    for plan in event.plans:
        for row in plan.new:
            if (one := found.get(row.request_id)) is not None and one.cached is None:
                one.cached = row.num_computed
        for name in found.keys() & set(plan.preempted):
            found[name].preemptions += 1
    for result in event.results:
        tokens = result.tokens if isinstance(result.tokens, dict) else {}
        for name in found.keys() & {name for name, ids in tokens.items() if ids}:
            if found[name].first is None:
                found[name].first = time
    for ended in event.ended:
        if (one := found.get(ended.request_id)) is not None:
            one.ended, one.reason = time, ended.reason


class _Blocks:
    """Numbers blocks by what they and all before them hold.

    The hashes are made with a salt that is not kept, and only their order of appearance is shown:
    who guesses a prompt cannot check the guess.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._salt = secrets.token_bytes(32)
        self._numbers: dict[bytes, int] = {}

    def ids(self, request: EngineCoreRequest) -> list[int]:
        size, tokens = self._size, request.prompt_token_ids
        extras = extra_keys(request, 0, -(-len(tokens) // size), size)
        known = tokens if request.prompt_embeds is None else _with_embeddings(request)
        parent = b""
        found = []
        for index, start in enumerate(range(0, len(tokens), size)):
            content = (parent, known[start : start + size], extras.get(index, b""))
            parent = self._hash(msgspec.msgpack.encode(content))
            found.append(self._numbers.setdefault(parent, len(self._numbers)))
        return found

    def _hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._salt, digest_size=16).digest()


def _with_embeddings(request: EngineCoreRequest) -> list[int | bytes]:
    """Return the ids of a prompt, and the bytes of an embedding where one stands."""
    try:
        rows = iter(request.prompt_embeds)
        return [
            float32_of(next(rows)).tobytes() if token is None else token
            for token in request.known_prompt_ids
        ]
    except (AttributeError, StopIteration, TypeError, ValueError) as cause:
        raise JournalError(
            f"journal: request {request.request_id!r}: prompt_embeds: expected a row for each "
            "position without a token id"
        ) from cause
