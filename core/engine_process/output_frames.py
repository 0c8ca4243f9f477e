"""Outputs as frames; what cannot travel harms only the request or the call that it belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from hardpoint.core.refusal import refusal
from hardpoint.core.wire import Buffer, Encoder, TensorConsumer, UtilityOutput
from hardpoint.plugins import EngineCoreOutput, HardpointError

from .sender import Message

__all__ = ["OutputFrames"]

_log = logging.getLogger("hardpoint")


class OutputFrames:
    """Encodes what an engine sends. One thread at a time."""

    def __init__(
        self, abort: Callable[[list[str]], None], consumer: TensorConsumer | None = None
    ) -> None:
        """Prepare.

        Args:
            abort: ends requests whose outputs cannot be sent, by id.
            consumer: is offered large tensors; if it fails, they travel in frames.
        """
        self._abort = abort
        self._encoder = Encoder(consumer=consumer)
        self._plain = Encoder()
        self._lost: set[str] = set()  # told that they ended; the engine has yet to hear of it

    def encode_into(self, message: Message, buffer: bytearray) -> list[Buffer]:
        """Return the frames of a message, or of what stands in for it; the first is `buffer`.

        A result that cannot travel becomes a failed call. An output that cannot becomes an error
        of its request, which ends; the others of the message stay as they are.

        Raises:
            WireError: neither an output nor a result is the reason.
        """
        if self._lost:
            message = self._without_lost(message)
        try:
            return self._encoder.encode_into(message, buffer)
        except Exception as error:  # a plugin made what is in it: it may be anything
            _log.warning("a message cannot be sent as it is: %s", error)
            return self._plain.encode_into(self._sendable(message), buffer)

    def _sendable(self, message: Message) -> Message:
        if isinstance(message, UtilityOutput):
            error = self._error_of(message)
            return message if error is None else _failed(message, error)
        outputs, lost = [], []
        for output in message.outputs:
            if (words := self._what_is_wrong(output)) is None:
                outputs.append(output)
                continue
            outputs += refusal(output.request_id, HardpointError(words)).outputs
            if not output.finished:
                lost.append(output.request_id)
        if lost:
            self._lost.update(lost)
            self._abort(lost)
        return msgspec.structs.replace(message, outputs=outputs)

    def _without_lost(self, message: Message) -> Message:
        """Leave out what requests give after their error, up to their end."""
        if isinstance(message, UtilityOutput):
            return message
        outputs = []
        for output in message.outputs:  # behind the end, the id may be that of another request
            if output.request_id not in self._lost:
                outputs.append(output)
            elif output.finished:
                self._lost.discard(output.request_id)
        return msgspec.structs.replace(message, outputs=outputs)

    def _what_is_wrong(self, output: EngineCoreOutput) -> str | None:
        """Return why an output cannot be sent, with the name of its field; None if it can."""
        for name in output.__struct_fields__:
            if (error := self._error_of(getattr(output, name))) is not None:
                return f"the output's {name} cannot be sent: {error}"
        return None

    def _error_of(self, value: object) -> Exception | None:
        try:
            self._plain.encode(value)
        except Exception as error:
            return error
        return None


def _failed(message: UtilityOutput, error: Exception) -> UtilityOutput:
    return UtilityOutput.failed(message.call_id, f"the result: {error}")
