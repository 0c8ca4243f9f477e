"""Readers of traces that others have published: lengths, times, and what prompts have in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from hardpoint import typed
from hardpoint.errors import HardpointError

from .workload import Segment, SimulatedRequest, cut

_OWN_IDS = 2**31  # of segments that no id of a trace names

HashId = Annotated[int, Meta(ge=0, lt=_OWN_IDS)]
Length = Annotated[int, Meta(ge=1, le=100_000_000)]
Time = Annotated[float, Meta(ge=0)]


class TraceError(HardpointError, ValueError):
    """A line of a trace cannot be read; the message names file, line and field."""


class MooncakeLine(msgspec.Struct):
    """A request of Mooncake's traces; other fields are ignored.

    Source: kvcache-ai/Mooncake, FAST25-release/traces.

    Attributes:
        timestamp: milliseconds since the start.
        input_length: tokens of the prompt.
        output_length: tokens that were generated.
        hash_ids: one per block of the prompt; equal ones are equal blocks after equal ones.
    """

    timestamp: Time
    input_length: Length
    output_length: Length
    hash_ids: list[HashId]


class BailianLine(msgspec.Struct):
    """A request of Bailian's traces of Qwen; other fields are ignored.

    Source: alibaba-edu/qwen-bailian-usagetraces-anon.

    Attributes:
        chat_id: identity of the request.
        parent_chat_id: identity of the turn before it; -1 for the first one.
        timestamp: seconds since the start.
        input_length, output_length: tokens.
        hash_ids: one per block of the prompt, as Mooncake's; without them, a prompt begins with
            that of the turn before it and its answer.
    """

    chat_id: int
    timestamp: Time
    input_length: Length
    output_length: Length
    parent_chat_id: int = -1
    hash_ids: list[HashId] | None = None


def read_mooncake(path: Path | str, *, block_size: int = 512) -> list[SimulatedRequest]:
    """Return the requests of a trace in Mooncake's form, in the order of their times.

    Args:
        path: a file of JSON lines, see `MooncakeLine`.
        block_size: tokens that each of `hash_ids` stands for.

    Raises:
        TraceError: a line is wrong.
        OSError: the file cannot be read.
    """
    own, requests = itertools.count(_OWN_IDS), []
    for where, line in _lines(path, MooncakeLine):
        prompt = _blocks(where, line.hash_ids, line.input_length, block_size, own)
        output = Segment(next(own), line.output_length)
        requests.append(SimulatedRequest(at=line.timestamp / 1e3, prompt=prompt, output=output))
    return sorted(requests, key=_time)


def read_bailian(path: Path | str, *, block_size: int = 16) -> list[SimulatedRequest]:
    """Return the requests of a trace in Bailian's form, in the order of their times.

    Each conversation is a session. One whose first turns are not in the file begins with the first
    that is.

    Args:
        path: a file of JSON lines, see `BailianLine`.
        block_size: tokens that each of `hash_ids` stands for.

    Raises:
        TraceError: a line is wrong.
        OSError: the file cannot be read.
    """
    own = itertools.count(_OWN_IDS)
    turns: dict[int, SimulatedRequest] = {}
    for where, line in _lines(path, BailianLine):
        if line.chat_id in turns:
            raise TraceError(f"{where}: chat_id: {line.chat_id} is that of an earlier line")
        before = turns.get(line.parent_chat_id)
        if line.hash_ids is not None:
            prompt = _blocks(where, line.hash_ids, line.input_length, block_size, own)
        else:
            known = () if before is None else (*before.prompt, before.output)
            prompt = cut(known, line.input_length - 1)
            left = line.input_length - sum(segment.length for segment in prompt)
            prompt = (*prompt, Segment(next(own), left))
        turns[line.chat_id] = SimulatedRequest(
            at=line.timestamp,
            prompt=prompt,
            output=Segment(next(own), line.output_length),
            session=str(line.chat_id) if before is None else before.session,
        )
    return sorted(turns.values(), key=_time)


Line = TypeVar("Line", MooncakeLine, BailianLine)


def _lines(path: Path | str, form: type[Line]) -> Iterator[tuple[str, Line]]:
    """Yield the lines of a file, each with its place; empty ones are left out."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            where = f"{path}:{number}"
            try:
                plain = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise TraceError(f"{where}: expected a JSON object, {error}") from None
            if not isinstance(plain, dict):
                raise TraceError(f"{where}: expected a JSON object, got {typed.shown(plain)}")
            try:
                yield where, typed.convert(plain, form, path="", error=TraceError)
            except TraceError as error:
                raise TraceError(f"{where}: {error}") from None


def _blocks(
    where: str, ids: Sequence[int], length: int, block_size: int, own: Iterator[int]
) -> tuple[Segment, ...]:
    """Return the segments of a prompt; tokens that no id stands for are its own."""
    whole, rest = divmod(length, block_size)
    if len(ids) not in (whole, whole + bool(rest)):
        few = whole if not rest else f"{whole} or {whole + 1}"
        raise TraceError(
            f"{where}: hash_ids: expected {few} for input_length {length} in blocks of "
            f"{block_size} tokens, got {len(ids)}"
        )
    segments = [Segment(one, block_size) for one in ids[:whole]]
    if rest:
        last = ids[whole] if len(ids) > whole else next(own)
        segments.append(Segment(last, rest))
    return tuple(segments)


def _time(request: SimulatedRequest) -> float:
    return request.at
