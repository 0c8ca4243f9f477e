"""What an engine process has to say to its clients, until it is sent."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from hardpoint.core.errors import rejection_output
from hardpoint.core.wire import Buffer, Encoder, TensorConsumer, UtilityOutput
from hardpoint.core.wire.merge_outputs import MergedOutputs
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, HardpointError

_log = logging.getLogger("hardpoint")

_LOOK_AGAIN_S = 0.01  # how often it is asked whether a client that was behind can take more
_MOST_HELD = 8192

Message = EngineCoreOutputs | UtilityOutput


class Outbox:
    """Holds messages by client. Putting one in never waits, and does not fill memory.

    What a client has not taken is merged: one entry per request, however many steps it came from.
    So what is held is at most the outputs of the requests that the client sent, and its answers;
    once they are many, `is_full` says that no more of its messages should be read.
    """

    def __init__(self, num_clients: int = 1) -> None:
        """Start empty."""
        self._held = [_Held() for _ in range(num_clients)]
        self._changed = threading.Condition()
        self._ends_at: float | None = None

    def put(self, client: int, message: Message) -> None:
        """Add a message; one for a client that there is not is dropped, and logged."""
        if not 0 <= client < len(self._held):
            _log.warning("dropped a message for client %d: there are %d", client, len(self._held))
            return
        with self._changed:
            self._held[client].put(message)
            self._changed.notify()

    def is_full(self, client: int) -> bool:
        """Whether a client is so far behind that it should send nothing more."""
        return len(self._held[client]) > _MOST_HELD

    def take(self, can_take: Callable[[int], bool]) -> tuple[int, Message] | None:
        """Wait for a message to a client that can take one.

        Returns:
            The client and the message; None when everything is taken after `end`, or its time is
            over.
        """
        with self._changed:
            while True:
                waiting = [client for client, held in enumerate(self._held) if len(held)]
                for client in waiting:
                    if can_take(client):
                        return client, self._held[client].take()
                ends_at = self._ends_at
                if ends_at is not None and (not waiting or time.monotonic() >= ends_at):
                    return None
                self._changed.wait(_LOOK_AGAIN_S if waiting else None)

    def end(self, seconds: float) -> None:
        """Let `take` return None once everything is taken, or after so many seconds."""
        with self._changed:
            self._ends_at = time.monotonic() + seconds
            self._changed.notify()


class _Held:
    """What waits for one client, in order; outputs stand where the first of them came."""

    def __init__(self) -> None:
        self._answers: deque[UtilityOutput] = deque()
        self._before = 0  # answers that came before the outputs
        self._outputs = MergedOutputs()

    def __len__(self) -> int:
        return len(self._answers) + len(self._outputs)

    def put(self, message: Message) -> None:
        if isinstance(message, EngineCoreOutputs):
            self._outputs.put(message)
        else:
            self._answers.append(message)
            self._before += not self._outputs

    def take(self) -> Message:
        outputs = None if self._before else self._outputs.take()
        if outputs is None:
            self._before -= 1
            return self._answers.popleft()
        self._before = len(self._answers)
        return outputs


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
            outputs += rejection_output(output.request_id, HardpointError(words)).outputs
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
