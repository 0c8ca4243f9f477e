"""Exports of a journal without its texts: times, lengths, shared blocks."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from hardpoint.plugins import EngineCoreRequest

from .forcing import recorded_tokens
from .frames import JournalError
from .records import Event
from .run import Journal, request_of

MOONCAKE_BLOCK = 512
"""Tokens of a block in Mooncake's traces."""


class _Exported(msgspec.Struct):
    """A request without its content.

    Attributes:
        arrived: milliseconds since the journal began.
        first, ended: the same, for its first token and its end.
    """

    number: int
    arrived: float
    request: EngineCoreRequest
    hash_ids: list[int]
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
        JournalError: the journal is damaged, or there is no such form.
    """
    if form not in ("redacted", "mooncake"):
        raise JournalError(f"form: expected redacted or mooncake, got {form!r}")
    size = MOONCAKE_BLOCK
    if form == "redacted":
        size = int(journal.header.config["kv_cache"]["block_size"])
    exported = _collected(journal, _Blocks(size))
    lengths = {name: len(tokens) for name, tokens in recorded_tokens(journal).items()}
    for name, one in exported.items():
        count = lengths.get(name, 0)
        if form == "mooncake" and not count:
            continue  # that form has no request without output
        line: dict[str, Any] = {
            "timestamp": round(one.arrived),
            "input_length": len(one.request.prompt_token_ids),
            "output_length": count,
            "hash_ids": one.hash_ids,
        }
        if form == "redacted":
            line = {"request": one.number, **line, **_details(one)}
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


def _collected(journal: Journal, blocks: _Blocks) -> dict[str, _Exported]:
    """Return the requests by id, with the figures that events have of them."""
    found: dict[str, _Exported] = {}
    now = journal.header.clock
    for record in journal.records():
        if not isinstance(record, Event):
            continue
        now = record.clock[-1] if record.clock else now
        time = round((now - journal.header.clock) * 1000, 3)
        for arrival in record.arrivals if record.failure is None else ():
            request = request_of(arrival)
            ids = blocks.ids(request)
            found[request.request_id] = _Exported(len(found), time, request, ids)
        _note(found, record, time)
    return found


def _note(found: dict[str, _Exported], event: Event, time: float) -> None:
    """Note the figures of known requests in an event."""
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
        """Return the numbers of a prompt's blocks, the last of which may be smaller."""
        lora = request.lora.name if request.lora is not None else None
        parent = self._hash(msgspec.msgpack.encode((request.cache_salt, lora)))
        found = []
        tokens = request.prompt_token_ids
        for start in range(0, len(tokens), self._size):
            content = msgspec.msgpack.encode(tokens[start : start + self._size])
            parent = self._hash(parent + content)
            found.append(self._numbers.setdefault(parent, len(self._numbers)))
        return found

    def _hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._salt, digest_size=16).digest()
