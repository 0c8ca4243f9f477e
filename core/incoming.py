"""What clients send to an engine process, and what becomes of what is none of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hardpoint.plugins import EngineCoreRequest, HardpointError, RequestError

from .engine_loop import LoopQueues, Message, Refusal
from .utilities import failed_call
from .wire import Decoder, RequestType, UtilityCall, WireError

__all__ = ["Check", "MessageReader", "RequestCheck"]

_log = logging.getLogger("hardpoint")

Check = Callable[[EngineCoreRequest], None]
"""Raises HardpointError where a request is wrong."""

_SHORTEST_ID = 1
_LONGEST_ID = 1000


class RequestCheck:
    """Looks at what a model could not bear, so that one bad request harms nobody else."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size` is one more than the largest token id."""
        self._vocab_size = vocab_size

    def __call__(self, request: EngineCoreRequest) -> None:
        """Check a request.

        Raises:
            RequestError: it cannot be computed.
        """
        if request.pooling_params is not None:
            raise RequestError("pooling_params: no model of this engine pools")
        if request.prompt_embeds is not None:
            raise RequestError("prompt_embeds: expected token ids, this engine takes no embeddings")
        ids = request.prompt_token_ids
        if not ids:
            raise RequestError("prompt_token_ids: expected at least one token, got none")
        for token in (min(ids), max(ids)):
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"prompt_token_ids: expected token ids from 0 to {self._vocab_size - 1}, "
                    f"got {token}"
                )


class MessageReader:
    """Turns frames into messages for the loop.

    What is no message is answered if it can be read whose it is; else it is dropped, and logged.
    """

    def __init__(self, queues: LoopQueues, check: Check) -> None:
        """Prepare.

        Args:
            queues: of the loop.
            check: looks at each request before the loop gets it.
        """
        self._queues = queues
        self._check = check
        self._requests: Decoder[EngineCoreRequest] = Decoder(EngineCoreRequest)
        self._ids: Decoder[list[str]] = Decoder(list[str])
        self._calls: Decoder[UtilityCall] = Decoder(UtilityCall)

    def take(self, client: int, frames: Sequence[Any]) -> None:
        """Decode one message of a client and queue it."""
        kind: RequestType | None = None
        try:
            kind = RequestType.from_wire(frames[0])
            message = self._decoded(kind, client, frames[1:])
        except (HardpointError, MemoryError) as error:
            self._refuse(kind, client, frames[1:], error)
            return
        if isinstance(message, list):
            self._queues.aborts.put(message)
        self._queues.input.put(message)

    def _decoded(self, kind: RequestType, client: int, frames: Sequence[Any]) -> Message:
        match kind:
            case RequestType.ADD:
                request = self._requests.decode(frames)
                _check_client(request.client_index, client)
                self._check(request)
                return request
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
        error: HardpointError | MemoryError,
    ) -> None:
        known = error if isinstance(error, HardpointError) else WireError("it does not fit memory")
        start = _beginning(frames[0]) if frames else []
        if kind is RequestType.ADD and start and _is_id(start[0]):
            self._queues.input.put(Refusal(start[0], client, known))
        elif kind is RequestType.UTILITY and len(start) > 1 and type(start[1]) is int:
            method = start[2] if len(start) > 2 and _is_id(start[2]) else "unknown"
            call = UtilityCall(client, start[1], method)
            self._queues.output.put(client, failed_call(call, known))
        else:
            _log.warning("dropped a message of client %d: %s", client, error)


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
