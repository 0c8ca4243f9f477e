"""Readers of traces in foreign forms: lengths, times, and common prefixes of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from hardpoint import typed
from hardpoint.errors import HardpointError
from hardpoint.journal.frames import MARK
from hardpoint.plugins import EngineCoreRequest

from .workload import Segment, SimulatedRequest, cut

if TYPE_CHECKING:
    from hardpoint.journal.run import Journal

_HEAD = 4096
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
        timestamp: milliseconds, from any time on.
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
        timestamp: seconds, from any time on.
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


class MinimalLine(msgspec.Struct):
    """A request with known lengths and time only; other fields are ignored.

    Source: guidellm's `trace_synthetic`.

    Attributes:
        timestamp: seconds, from any time on.
        input_length, output_length: tokens.
    """

    timestamp: float
    input_length: Length
    output_length: Length


class GuidellmInfo(msgspec.Struct, frozen=True):
    """Conversation of a request in guidellm; other fields are ignored.

    Attributes:
        conversation_id: name of its conversation.
        turn_index: its place there.
    """

    conversation_id: str | None = None
    turn_index: Annotated[int, Meta(ge=0)] = 0


class GuidellmRequest(msgspec.Struct):
    """A request of a report of guidellm; other fields are ignored.

    Source: `GenerativeRequestStats` of guidellm 0.8.1.

    Attributes:
        request_start_time: when it was sent, in seconds since 1970.
        prompt_tokens, output_tokens: tokens.
        info: what else is known.
    """

    request_start_time: float
    prompt_tokens: Length
    output_tokens: Length
    info: GuidellmInfo = GuidellmInfo()


Reader = Callable[[Path, int | None], list[SimulatedRequest]]
"""Reads a file; the number is the tokens that each of `hash_ids` stands for, None is usual."""


def read_trace(
    path: Path | str, form: str = "auto", *, block_size: int | None = None
) -> list[SimulatedRequest]:
    """Return the requests of a trace, in the order of their times, which count from the first one.

    Args:
        path: the file.
        form: a key of `FORMS`; "auto" finds it by the first line.
        block_size: tokens that each of `hash_ids` stands for; None is 512 in Mooncake's form and
            16 in Bailian's, and for forms without them.

    Raises:
        TraceError: the form is not known, has no `hash_ids`, or a line is wrong; names file, line
            and field.
    """
    file = Path(path)
    try:
        if form == "auto":
            form = _form_of(file)
        if form not in FORMS:
            raise TraceError(f"form: expected one of auto, {', '.join(FORMS)}, got {form!r}")
        if block_size is not None and form not in _WITH_HASH_IDS:
            raise TraceError(
                f"{path}: block_size (--hash-tokens): expected none, because the form {form!r} has "
                f"no hash_ids, got {block_size}"
            )
        requests = FORMS[form](file, block_size)
    except OSError as error:
        raise TraceError(f"{path}: the trace cannot be read: {error.strerror}") from None
    if not requests:
        raise TraceError(f"{path}: expected at least one request, got none")
    return requests


def _form_of(path: Path) -> str:
    with path.open("rb") as binary:
        if binary.read(len(MARK)) == MARK:
            return "journal"
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
        rest = file.read(_HEAD)
    try:
        plain = msgspec.json.decode(first)
    except (msgspec.DecodeError, RecursionError):
        # guidellm's reports are one object over many lines.
        plain = {"benchmarks": []} if first.lstrip().startswith("{") and '":' in rest else None
    fields = plain.keys() if isinstance(plain, dict) else ()
    for name, form in _FORM_OF_FIELD.items():
        if name in fields:
            return form
    raise TraceError(
        f"{path}: its form is not known: expected JSON lines with chat_id, hash_ids or "
        f"input_length, a report of guidellm or a journal; a form can be named ({', '.join(FORMS)})"
    )


def read_minimal(path: Path | str) -> list[SimulatedRequest]:
    """Return the requests of a trace of lengths and times, in the order of their times.

    Times count from the first one; prompts have nothing in common.

    Args:
        path: a file of JSON lines, see `MinimalLine`.

    Raises:
        TraceError: a line is wrong.
        OSError: the file cannot be read.
    """
    new_ids = itertools.count(_OWN_IDS)
    return _from_zero(
        SimulatedRequest(
            at=line.timestamp,
            prompt=(Segment(next(new_ids), line.input_length),),
            output=Segment(next(new_ids), line.output_length),
        )
        for _, line in _lines(path, MinimalLine)
    )


def read_journal(path: Path | str) -> list[SimulatedRequest]:
    """Return the requests of a journal of an engine that have outputs, in the order of arrival.

    Times count from the first one. Prompts share what the engine's cache could have found: whole
    blocks of `kv_cache.block_size` tokens, of earlier prompts and of their outputs. Requests have
    their tags, priorities and sessions (`retention`).

    Args:
        path: a file that `engine.journal` has named.

    Raises:
        TraceError: the journal is damaged, or has no size of blocks.
        OSError: the file cannot be read.
    """
    from hardpoint.journal.run import Journal  # noqa: PLC0415 - only journals need it

    try:
        return _from_zero(_journal_requests(Journal(path)))
    except HardpointError as error:
        raise TraceError(str(error)) from error


def _journal_requests(journal: Journal) -> Iterator[SimulatedRequest]:
    """Yield the requests of a journal that have outputs, in the order of arrival."""
    from hardpoint.core.kv_cache import BlockHashes  # noqa: PLC0415 - as above
    from hardpoint.journal.forcing import recorded_tokens  # noqa: PLC0415 - as above

    size = journal.block_size
    hashes = BlockHashes(size, part_keys=_key_of_embeddings)
    new_ids = itertools.count()
    holders: dict[bytes, SimulatedRequest] = {}  # the first with a block and all before it
    outputs = recorded_tokens(journal)
    for at, source in _arrivals(journal):
        # What another engine had generated of it is computed here as a prompt is.
        resumed_ids = [] if source.resumed is None else list(source.resumed.output_token_ids)
        prompt = [*source.prompt_token_ids, *resumed_ids]
        positions = sorted(outputs.get(source.request_id, {}).items())
        output = [token for position, token in positions if position >= len(resumed_ids)]
        if not output:
            continue
        tokens = [*prompt, *output]
        whole = msgspec.structs.replace(source, prompt_token_ids=tokens, resumed=None)
        blocks = hashes.of_prompt(whole)
        known = list(itertools.takewhile(holders.__contains__, blocks[: len(prompt) // size]))
        text: tuple[Segment, ...] = ()
        if known:
            holder = holders[known[-1]]
            text = cut((*holder.prompt, holder.output), len(known) * size)
        if rest := len(prompt) - len(known) * size:
            text = (*text, Segment(next(new_ids), rest))
        request = SimulatedRequest(
            at=at,
            prompt=text,
            output=Segment(next(new_ids), len(output)),
            session=None if source.retention is None else source.retention.session,
            tags=source.tags,
            priority=source.priority,
        )
        for block in blocks:
            holders.setdefault(block, request)
        yield request


def _arrivals(journal: Journal) -> list[tuple[float, EngineCoreRequest]]:
    from hardpoint.journal.run import request_of  # noqa: PLC0415 - as above

    arrivals: dict[str, tuple[float, EngineCoreRequest]] = {}
    for before, _, event in journal.events():
        for arrival in event.arrivals if event.failure is None else ():
            arrivals[arrival.request_id] = event.arrived(arrival, before), request_of(arrival)
    return sorted(arrivals.values(), key=lambda arrival: arrival[0])


def _key_of_embeddings(source: EngineCoreRequest, span: range) -> bytes:  # noqa: ARG001
    return b"" if source.prompt_embeds is None else source.request_id.encode()


def read_guidellm(path: Path | str) -> list[SimulatedRequest]:
    """Return the successful requests of a report of guidellm, in the order of their times.

    Those of all its benchmarks, with times from the first one on. A later turn of a conversation
    begins with the prompt and the answer of the turn before it.

    Args:
        path: a file `benchmarks.json`, with all requests (guidellm keeps them by
            default).

    Raises:
        TraceError: the report or a request is wrong.
        OSError: the file cannot be read.
    """
    try:
        plain = msgspec.json.decode(Path(path).read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: expected a JSON object, {error}") from None
    benchmarks = plain.get("benchmarks") if isinstance(plain, dict) else None
    if not isinstance(benchmarks, list):
        raise TraceError(f"{path}: benchmarks: expected a list, got {typed.shown(benchmarks)}")
    records: list[GuidellmRequest] = []
    for number, benchmark in enumerate(benchmarks):
        where = f"benchmarks[{number}].requests"
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        done = requests.get("successful") if isinstance(requests, dict) else None
        if not isinstance(done, list):
            raise TraceError(
                f"{path}: {where}.successful: expected a list, got {typed.shown(done)}"
            )
        for place, record in enumerate(done):
            inside = f"{where}.successful[{place}]"
            try:
                records.append(
                    typed.convert(record, GuidellmRequest, path=inside, error=TraceError)
                )
            except TraceError as error:
                raise TraceError(f"{path}: {error}") from None
    return _guidellm_turns(records)


def _guidellm_turns(requests: list[GuidellmRequest]) -> list[SimulatedRequest]:
    new_ids = itertools.count(_OWN_IDS)
    last: dict[str, SimulatedRequest] = {}
    turns = []
    for request in sorted(
        requests, key=lambda request: (request.request_start_time, request.info.turn_index)
    ):
        session = request.info.conversation_id
        before = last.get(session) if session is not None else None
        turn = SimulatedRequest(
            at=request.request_start_time,
            prompt=_after(before, request.prompt_tokens, new_ids),
            output=Segment(next(new_ids), request.output_tokens),
            session=session,
        )
        if session is not None:
            last[session] = turn
        turns.append(turn)
    return _from_zero(turns)


def read_mooncake(path: Path | str, *, block_size: int = 512) -> list[SimulatedRequest]:
    """Return the requests of a trace in Mooncake's form, in the order of their times.

    Times count from the first one.

    Args:
        path: a file of JSON lines, see `MooncakeLine`.
        block_size: tokens that each of `hash_ids` stands for.

    Raises:
        TraceError: a line is wrong.
        OSError: the file cannot be read.
    """
    new_ids, requests = itertools.count(_OWN_IDS), []
    for where, line in _lines(path, MooncakeLine):
        prompt = _blocks(where, line.hash_ids, line.input_length, block_size, new_ids)
        output = Segment(next(new_ids), line.output_length)
        requests.append(SimulatedRequest(at=line.timestamp / 1e3, prompt=prompt, output=output))
    return _from_zero(requests)


def read_bailian(path: Path | str, *, block_size: int = 16) -> list[SimulatedRequest]:
    """Return the requests of a trace in Bailian's form, in the order of their times.

    Times count from the first one. Each conversation is a session. One whose first turns are not in
    the file begins with the first that is.

    Args:
        path: a file of JSON lines, see `BailianLine`.
        block_size: tokens that each of `hash_ids` stands for.

    Raises:
        TraceError: a line is wrong.
        OSError: the file cannot be read.
    """
    new_ids = itertools.count(_OWN_IDS)
    turns: dict[int, SimulatedRequest] = {}
    for where, line in _lines(path, BailianLine):
        if line.chat_id in turns:
            raise TraceError(f"{where}: chat_id: {line.chat_id} is the id of an earlier line")
        before = turns.get(line.parent_chat_id)
        if line.hash_ids is not None:
            prompt = _blocks(where, line.hash_ids, line.input_length, block_size, new_ids)
        else:
            prompt = _after(before, line.input_length, new_ids)
        turns[line.chat_id] = SimulatedRequest(
            at=line.timestamp,
            prompt=prompt,
            output=Segment(next(new_ids), line.output_length),
            session=str(line.chat_id) if before is None else before.session,
        )
    return _from_zero(turns.values())


Line = TypeVar("Line", MooncakeLine, BailianLine, MinimalLine)


def _lines(path: Path | str, form: type[Line]) -> Iterator[tuple[str, Line]]:
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            where = f"{path}:{number}"
            try:
                plain = msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError) as error:
                raise TraceError(f"{where}: expected a JSON object, {error}") from None
            if not isinstance(plain, dict):
                raise TraceError(f"{where}: expected a JSON object, got {typed.shown(plain)}")
            try:
                yield where, typed.convert(plain, form, path="", error=TraceError)
            except TraceError as error:
                raise TraceError(f"{where}: {error}") from None


def _blocks(
    where: str, ids: Sequence[int], length: int, block_size: int, new_ids: Iterator[int]
) -> tuple[Segment, ...]:
    """Return the segments of a prompt; tokens that no id stands for are its own."""
    whole, rest = divmod(length, block_size)
    if len(ids) not in (whole, whole + bool(rest)):
        few = whole if not rest else f"{whole} or {whole + 1}"
        raise TraceError(
            f"{where}: hash_ids: expected {few} for input_length {length} in blocks of "
            f"{block_size} tokens, got {len(ids)}"
        )
    segments = [Segment(block_id, block_size) for block_id in ids[:whole]]
    if rest:
        last = ids[whole] if len(ids) > whole else next(new_ids)
        segments.append(Segment(last, rest))
    return tuple(segments)


def _after(
    before: SimulatedRequest | None, length: int, new_ids: Iterator[int]
) -> tuple[Segment, ...]:
    known = () if before is None else (*before.prompt, before.output)
    prompt = cut(known, length - 1)
    left = length - sum(segment.length for segment in prompt)
    return (*prompt, Segment(next(new_ids), left))


def _from_zero(requests: Iterable[SimulatedRequest]) -> list[SimulatedRequest]:
    """Return requests in the order of their times, beginning at 0.

    Those that end their conversations are marked as its last.
    """
    ordered = sorted(requests, key=lambda request: request.at)
    start = ordered[0].at if ordered else 0.0
    last = {request.session: place for place, request in enumerate(ordered)}
    return [
        msgspec.structs.replace(
            ordered_request,
            at=ordered_request.at - start,
            is_last=ordered_request.session is not None and last[ordered_request.session] == place,
        )
        for place, ordered_request in enumerate(ordered)
    ]


FORMS: dict[str, Reader] = {
    "mooncake": lambda path, size: read_mooncake(path, block_size=size or 512),
    "bailian": lambda path, size: read_bailian(path, block_size=size or 16),
    "minimal": lambda path, _: read_minimal(path),
    "guidellm": lambda path, _: read_guidellm(path),
    "journal": lambda path, _: read_journal(path),
}
"""Readers by form."""

_WITH_HASH_IDS = ("mooncake", "bailian")

_FORM_OF_FIELD = {
    "chat_id": "bailian",
    "hash_ids": "mooncake",
    "input_length": "minimal",
    "benchmarks": "guidellm",
}
"""Forms by a field of the first line; the first that it has decides."""
