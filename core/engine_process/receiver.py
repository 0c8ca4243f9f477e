"""What clients send to an engine process, and what becomes of what is none of it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hardpoint.core.engine.utility_calls import failed_call
from hardpoint.core.errors import rejection_output
from hardpoint.core.wire import Decoder, RequestType, TensorProvider, UtilityCall, WireError
from hardpoint.plugins import EngineCoreRequest, HardpointError, RequestError

from .loop import LoopQueues, Message, Prepared, Refusal

_log = logging.getLogger("hardpoint")

Check = Callable[[EngineCoreRequest], None]
"""Raises HardpointError where a request is wrong."""

HashPrompt = Callable[[EngineCoreRequest], list[bytes]]
"""Returns the block hashes of a request's prompt."""

_SHORTEST_ID = 1
_LONGEST_ID = 1000


class MessageReader:
    """Turns frames into messages for the loop.

    What is no message is answered if it can be read whose it is; else it is dropped, and logged.
    """

    def __init__(
        self,
        queues: LoopQueues,
        check: Check,
        provider: TensorProvider | None = None,
        hash_prompt: HashPrompt = lambda _request: [],
    ) -> None:
        """Prepare.

        Args:
            queues: of the loop.
            check: looks at each request before the loop gets it.
            provider: finds tensors that travel out of band.
            hash_prompt: is called for each request here, so that the loop need not do it.
        """
        self._queues = queues
        self._hash_prompt = hash_prompt
        self._check = check
        self._live: defaultdict[int, set[str]] = defaultdict(set)  # by client
        self._requests: Decoder[EngineCoreRequest] = Decoder(EngineCoreRequest, provider=provider)
        self._ids: Decoder[list[str]] = Decoder(list[str])
        self._calls: Decoder[UtilityCall] = Decoder(UtilityCall, provider=provider)

    def take(self, client: int, frames: Sequence[Any]) -> None:
        """Decode one message of a client and queue it."""
        kind: RequestType | None = None
        try:
            kind = RequestType.from_wire(frames[0])
            message = self._decoded(kind, client, frames[1:])
        except Exception as error:  # whatever it is, those who sent other messages are served
            self._refuse(kind, client, frames[1:], _told(kind, error))
            return
        if isinstance(message, list):
            self._queues.abort(message)
            return
        if isinstance(message, Prepared):
            self._live[client].add(message.request.request_id)
        self._queues.input.put(message)

    def told_of_end(self, client: int, request_id: str) -> None:
        """Take it that a client was sent a request's last output. Safe in another thread."""
        self._live[client].discard(request_id)

    def _decoded(self, kind: RequestType, client: int, frames: Sequence[Any]) -> Message:
        match kind:
            case RequestType.ADD:
                request = self._requests.decode(frames)
                _check_client(request.client_index, client)
                self._check(request)
                return Prepared(request, self._hash_prompt(request))
            case RequestType.ABORT:
                return self._ids.decode(frames)
            case RequestType.UTILITY:
                call = self._calls.decode(frames)
                _check_client(call.client_index, client)
                return call
        raise WireError(f"request type: {kind.name} is for data-parallel engines, this is none")

    def _refuse(
        self,
        kind: RequestType | None,
        client: int,
        frames: Sequence[Any],
        error: HardpointError,
    ) -> None:
        """Answer at once, whatever the loop does meanwhile.

        Where the id is that of a request whose end the client does not know yet, the loop decides:
        the client would take the answer for that end.
        """
        start = _beginning(frames[0]) if frames else []
        if kind is RequestType.ADD and start and _is_id(start[0]):
            if start[0] in self._live[client]:
                self._queues.input.put(Refusal(start[0], client, error))
            else:
                self._queues.output.put(client, rejection_output(start[0], error))
        elif kind is RequestType.UTILITY and len(start) > 1 and type(start[1]) is int:
            method = start[2] if len(start) > 2 and _is_id(start[2]) else "unknown"
            call = UtilityCall(client, start[1], method)
            self._queues.output.put(client, failed_call(call, error))
        else:
            _log.warning("dropped a message of client %d: %s", client, error)


def _told(kind: RequestType | None, error: Exception) -> HardpointError:
    """Return what the sender is told of an error; one that nobody meant to raise is logged too."""
    if isinstance(error, HardpointError):
        return error
    if isinstance(error, MemoryError):
        return WireError("it does not fit memory")
    what = "a message" if kind is None else f"a message of type {kind.name}"
    _log.error("looking at %s failed", what, exc_info=error)
    return HardpointError(f"looking at {what} failed: {type(error).__name__}: {error}")


def _check_client(named: int, client: int) -> None:
    """Refuse a message whose answers would go to somebody else."""
    if named != client:
        raise RequestError(f"client_index: expected {client}, the client that sent it, got {named}")


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _SHORTEST_ID <= len(value) <= _LONGEST_ID


class _Opening(msgspec.Struct, array_like=True):
    """The first fields of a request or of a call, whatever they are and whatever follows."""

    first: Any = None
    second: Any = None
    third: Any = None


def _beginning(frame: Any) -> list[Any]:
    """Return the first fields of a message that cannot be decoded as what it should be."""
    try:
        opening = msgspec.msgpack.decode(frame, type=_Opening)
    except Exception:  # it is damaged, or ends too early
        return _first_string(bytes(memoryview(frame)[: _LONGEST_ID + 8]))
    return [opening.first, opening.second, opening.third]


def _first_string(data: bytes) -> list[Any]:
    """Return the string that a msgpack array begins with, if it does, whatever follows."""
    at = 3 if data[:1] == b"\xdc" else 1  # the array's header
    head = data[at : at + 1]
    if b"\xa0" <= head <= b"\xbf":
        size, at = head[0] - 0xA0, at + 1
    elif head in (b"\xd9", b"\xda"):
        width = 1 if head == b"\xd9" else 2
        size, at = int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width
    else:
        return []
    try:
        text = data[at : at + size].decode()
    except UnicodeDecodeError:
        return []
    return [text] if len(data) >= at + size else []
