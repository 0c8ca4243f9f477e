"""Decoding of the messages that clients send to an engine process."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hardpoint.host.boundary.errors import RefusedInCallError, rejection_output
from hardpoint.host.registry.blame import describe
from hardpoint.host.system.encoding import Decoder, WireError
from hardpoint.plugins import EngineCoreRequest, HardpointError, RequestError
from hardpoint.process.protocol import RequestType, UtilityCall
from hardpoint.process.utility_calls import failed_call

from .loop import LoopQueues, Prepared, PreparedCall, Rejection

_log = logging.getLogger("hardpoint")

Check = Callable[[EngineCoreRequest], None]
"""Raises HardpointError for an invalid request."""

HashPrompt = Callable[[EngineCoreRequest], list[bytes]]
"""Returns the block hashes of a request's prompt."""

_MIN_ID_LENGTH, _MAX_ID_LENGTH = 1, 1000


class MessageReader:
    """Decodes frames into messages for the loop.

    An invalid message gets an error as its answer if its id can be decoded; else it is dropped,
    and logged.
    """

    def __init__(
        self,
        queues: LoopQueues,
        check: Check,
        hash_prompt: HashPrompt = lambda _request: [],
    ) -> None:
        """Create a reader.

        Args:
            check: called with each request before the loop gets it.
            hash_prompt: called with each request, in this thread rather than in the loop's.
        """
        self._queues = queues
        self._hash_prompt = hash_prompt
        self._check = check
        # By client, the ids of requests whose last output was not sent yet.
        self._live: defaultdict[int, set[str]] = defaultdict(set)
        self._requests: Decoder[EngineCoreRequest] = Decoder(EngineCoreRequest)
        self._lists: Decoder[list[EngineCoreRequest]] = Decoder(list[EngineCoreRequest])
        self._ids: Decoder[list[str]] = Decoder(list[str])
        self._calls: Decoder[UtilityCall] = Decoder(UtilityCall)

    def receive(self, client: int, frames: Sequence[Any]) -> None:
        """Decode one message of a client and queue it."""
        kind: RequestType | None = None
        try:
            kind = RequestType.from_wire(frames[0])
            message = self._decoded(kind, client, frames[1:])
        except BaseException as error:  # of any kind: other messages must still be served
            index = error.index if isinstance(error, RefusedInCallError) else 0
            self._reject(kind, client, frames[1:], _reported(kind, error), index)
            return
        if isinstance(message, list):  # the loop knows which of them are live, and of this client
            self._queues.abort(message, client)
            return
        if isinstance(message, PreparedCall):
            self._live[client].update(prepared.request.request_id for prepared in message.requests)
        elif isinstance(message, Prepared):
            self._live[client].add(message.request.request_id)
        self._queues.input.put(message)

    def request_ended(self, client: int, request_id: str) -> None:
        """Note that a request's last output was sent to its client. Safe in another thread."""
        self._live[client].discard(request_id)

    def _decoded(
        self, kind: RequestType, client: int, frames: Sequence[Any]
    ) -> Prepared | PreparedCall | list[str] | UtilityCall:
        match kind:
            case RequestType.ADD:
                arrived = time.monotonic()
                return self._prepared(self._requests.decode(frames), client, arrived)
            case RequestType.ADD_ALL:
                arrived = time.monotonic()
                requests = self._lists.decode(frames)
                ids = {request.request_id for request in requests}
                if len(ids) < len(requests):
                    raise RequestError("request_id: expected ids of their own of a call's requests")
                return PreparedCall(self._all_prepared(requests, client, arrived))
            case RequestType.ABORT:
                return self._ids.decode(frames)
        return msgspec.structs.replace(self._calls.decode(frames), client_index=client)

    def _all_prepared(
        self, requests: Sequence[EngineCoreRequest], client: int, arrived: float
    ) -> list[Prepared]:
        """Return the requests of a call with the values that this thread computes for them.

        Raises:
            RefusedInCallError: one is invalid.
        """
        prepared = []
        for index, request in enumerate(requests):
            try:
                prepared.append(self._prepared(request, client, arrived))
            except HardpointError as error:
                raise RefusedInCallError(index, error) from error
        return prepared

    def _prepared(self, request: EngineCoreRequest, client: int, arrived: float) -> Prepared:
        request.client_index = client  # which the message may name otherwise
        self._check(request)
        return Prepared(request, self._hash_prompt(request), arrived)

    def _reject(
        self,
        kind: RequestType | None,
        client: int,
        frames: Sequence[Any],
        error: HardpointError,
        index: int = 0,
    ) -> None:
        """Answer an invalid message with an error, without waiting for the loop.

        Args:
            index: index of the request of a call that is wrong, whose answer comes first.
        """
        if kind is RequestType.ADD and frames and _is_id(name := _request_id(frames[0])):
            self._refuse(name, client, error)
        elif kind is RequestType.ADD_ALL and frames and (names := _request_ids(frames[0])):
            first = names.pop(min(index, len(names) - 1))
            for name in (first, *names):
                self._refuse(name, client, error)
        elif (
            kind is RequestType.UTILITY
            and frames
            and type((start := _call_start(frames[0])).call_id) is int
        ):
            method = start.method if _is_id(start.method) else "unknown"
            call = UtilityCall(client, start.call_id, method)
            self._queues.output.put(client, failed_call(call, error))
        else:
            _log.warning("dropped a message of client %d: %s", client, error)

    def _refuse(self, name: str, client: int, error: HardpointError) -> None:
        # The client would mistake an error for the end of its live request of that id, so there
        # the loop decides.
        if name in self._live[client]:
            self._queues.input.put(Rejection(name, client, error))
        else:
            self._queues.output.put(client, rejection_output(name, error))


def _reported(kind: RequestType | None, error: BaseException) -> HardpointError:
    if isinstance(error, RefusedInCallError):
        return error.error
    if isinstance(error, HardpointError):
        return error
    if isinstance(error, MemoryError):
        return WireError("it does not fit into memory")
    subject = "a message" if kind is None else f"a message of type {kind.name}"
    _log.error("looking at %s failed", subject, exc_info=error)
    return HardpointError(f"looking at {subject} failed: {describe(error)}")


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _MIN_ID_LENGTH <= len(value) <= _MAX_ID_LENGTH


class _RequestStart(msgspec.Struct):
    """The id of a request, of any type; other fields are ignored."""

    request_id: Any = None


class _CallStart(msgspec.Struct, array_like=True):
    """The first fields of a call, of any type; further fields are ignored."""

    client_index: Any = None
    call_id: Any = None
    method: Any = None


def _request_id(frame: Any) -> Any:
    try:
        return msgspec.msgpack.decode(frame, type=_RequestStart).request_id
    except Exception:  # the frame is damaged or truncated
        return _first_value(bytes(memoryview(frame)[: _MAX_ID_LENGTH + 24]))


def _request_ids(frame: Any) -> list[str]:
    try:
        starts = msgspec.msgpack.decode(frame, type=list[_RequestStart])
    except Exception:  # the frame is damaged or truncated
        return []
    ids = [start.request_id for start in starts]
    return ids if all(map(_is_id, ids)) else []


def _call_start(frame: Any) -> _CallStart:
    try:
        return msgspec.msgpack.decode(frame, type=_CallStart)
    except Exception:  # the frame is damaged or truncated
        return _CallStart()


_MAP_16 = 0xDE  # a header of 3 bytes; a smaller map (0x80 to 0x8F) has one of 1 byte
_FIXSTR, _STR_8, _STR_16 = range(0xA0, 0xC0), 0xD9, 0xDA
_ID_KEY = msgspec.msgpack.encode("request_id")


def _first_value(data: bytes) -> str | None:
    # By hand, because msgspec decodes no part of a message that is damaged further on. A client
    # waits for the answer to its request, so an id that can still be read is worth it.
    start = 3 if data[:1] == bytes([_MAP_16]) else 1
    if data[start : start + len(_ID_KEY)] != _ID_KEY:
        return None
    start += len(_ID_KEY)
    if len(data) <= start:
        return None
    head = data[start]
    if head in _FIXSTR:  # the length is in the low 5 bits
        size, start = head - _FIXSTR.start, start + 1
    elif head in (_STR_8, _STR_16):  # the length follows in 1 or 2 bytes, big-endian
        width = 1 if head == _STR_8 else 2
        size = int.from_bytes(data[start + 1 : start + 1 + width], "big")
        start += 1 + width
    else:
        return None
    text = data[start : start + size]
    try:
        return text.decode() if len(text) == size else None
    except UnicodeDecodeError:
        return None
