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
    for number, (name, exported) in enumerate(arrivals):
        resumed = exported.request.resumed
        count = lengths.get(name, 0) - (len(resumed.output_token_ids) if resumed is not None else 0)
        if form == "mooncake" and not count:
            continue  # that form has no request without output
        line: dict[str, Any] = {
            "timestamp": round(exported.arrived),
            "input_length": len(exported.request.prompt_token_ids),
            "output_length": count,
            "hash_ids": blocks.ids(exported.request),
        }
        if form == "redacted":
            line = {"request": number, **line, **_details(exported)}
        yield json.dumps(line)


def _details(exported: _Exported) -> dict[str, Any]:
    params = exported.request.params
    return {
        "priority": exported.request.priority,
        "child_index": exported.request.child_index,
        "max_tokens": params.max_tokens,
        "has_grammar": params.structured is not None,
        "cached_tokens": exported.cached,
        "preemptions": exported.preemptions,
        "first_token": exported.first,
        "ended": exported.ended,
        "finish_reason": exported.reason,
    }


def _collected(journal: Journal) -> dict[str, _Exported]:
    exported: dict[str, _Exported] = {}
    start = journal.header.clock
    for before, now, event in journal.events():
        for arrival in event.arrivals if event.failure is None else ():
            arrived = _milliseconds(event.arrived(arrival, before) - start)
            exported[arrival.request_id] = _Exported(arrived, request_of(arrival))
        _note(exported, event, _milliseconds(now - start))
    return exported


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _note(exported_by_id: dict[str, _Exported], event: Event, time: float) -> None:
    for plan in event.plans:
        for row in plan.new:
            if (
                exported := exported_by_id.get(row.request_id)
            ) is not None and exported.cached is None:
                exported.cached = row.num_computed
        for name in exported_by_id.keys() & set(plan.preempted):
            exported_by_id[name].preemptions += 1
    for result in event.results:
        tokens = result.tokens if isinstance(result.tokens, dict) else {}
        for name in exported_by_id.keys() & {name for name, ids in tokens.items() if ids}:
            if exported_by_id[name].first is None:
                exported_by_id[name].first = time
    for ended in event.ended:
        if (exported := exported_by_id.get(ended.request_id)) is not None:
            exported.ended, exported.reason = time, ended.reason


class _Blocks:
    """Numbers blocks by their tokens and the tokens before them.

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
        numbers = []
        for index, start in enumerate(range(0, len(tokens), size)):
            content = (parent, known[start : start + size], extras.get(index, b""))
            parent = self._hash(msgspec.msgpack.encode(content))
            numbers.append(self._numbers.setdefault(parent, len(self._numbers)))
        return numbers

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
