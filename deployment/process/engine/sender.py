"""Per-client queues of unsent messages, and their encoding."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from hardpoint.host.boundary.errors import rejection_output
from hardpoint.host.system.encoding import Buffer, Encoder
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, HardpointError
from hardpoint.process.output_coalescer import OutputCoalescer
from hardpoint.process.protocol import UtilityOutput

_log = logging.getLogger("hardpoint")

_RETRY_INTERVAL_S = 0.01  # how often a client that accepted no message is tried again
_MAX_UNSENT = 8192

Message = EngineCoreOutputs | UtilityOutput


class ClientSendQueues:
    """Queues of unsent messages, one per client. `put` never waits.

    Unsent outputs are merged: one entry per request, however many steps it came from. So a queue
    is bounded by the requests that its client sent, and its utility results; `is_full` means that
    they are many, and no more of the client's messages should be read.
    """

    def __init__(self, num_clients: int = 1) -> None:
        self._queues = [_ClientQueue() for _ in range(num_clients)]
        self._changed = threading.Condition()
        self._deadline: float | None = None

    def __len__(self) -> int:
        return len(self._queues)

    def put(self, client: int, message: Message) -> None:
        """Add a message; one for a client that does not exist is dropped, and logged."""
        if not 0 <= client < len(self._queues):
            _log.warning("dropped a message for client %d: there are %d", client, len(self._queues))
            return
        with self._changed:
            self._queues[client].put(message)
            self._changed.notify()

    def is_full(self, client: int) -> bool:
        """Return whether a client has left too much unread to be allowed more messages."""
        return len(self._queues[client]) > _MAX_UNSENT

    def pop(self, can_send: Callable[[int], bool]) -> tuple[int, Message] | None:
        """Wait for a message to a client that accepts one now.

        Args:
            can_send: returns whether a client does.

        Returns:
            The client and the message; after `end`, None once the queues are empty or the time
            is over.
        """
        with self._changed:
            while True:
                waiting = [client for client, queue in enumerate(self._queues) if queue.messages]
                for client in waiting:
                    if can_send(client):
                        return client, self._queues[client].pop()
                deadline = self._deadline
                if deadline is not None and (not waiting or time.monotonic() >= deadline):
                    return None
                self._changed.wait(_RETRY_INTERVAL_S if waiting else None)

    def end(self, timeout_s: float) -> None:
        """Let `pop` return None once the queues are empty, or after the timeout."""
        with self._changed:
            self._deadline = time.monotonic() + timeout_s
            self._changed.notify()


class _ClientQueue:
    """Unsent messages of one client in order; merged outputs keep the place of the first of them.

    So a client never gets a utility result before the outputs that came before it.

    Attributes:
        messages: utility results and, while there are unsent outputs, `_outputs`, once.
    """

    def __init__(self) -> None:
        self._outputs = OutputCoalescer()
        self.messages: deque[UtilityOutput | OutputCoalescer] = deque()

    def __len__(self) -> int:
        """Return the number of utility results and outputs. In any thread."""
        return len(self.messages) + max(len(self._outputs) - 1, 0)

    def put(self, message: Message) -> None:
        if isinstance(message, UtilityOutput):
            self.messages.append(message)
            return
        if not self._outputs:
            self.messages.append(self._outputs)
        self._outputs.put(message)

    def pop(self) -> Message:
        message = self.messages.popleft()
        if isinstance(message, UtilityOutput):
            return message
        outputs = message.pop()
        assert outputs is not None  # the coalescer is queued only while it holds a batch
        return outputs


class OutputEncoder:
    """Encodes the messages that an engine sends. One thread at a time."""

    def __init__(self, abort: Callable[[list[str], int], None]) -> None:
        """`abort` gets the ids of requests with outputs that cannot be encoded, and the client."""
        self._abort = abort
        self._encoder = Encoder()
        # Requests whose client got an error instead of an output, until the engine has ended them.
        self._failed_ids: set[str] = set()

    def encode_into(self, message: Message, buffer: bytearray, client: int) -> list[Buffer]:
        """Return the frames of a message, or of its replacement; the first is `buffer`.

        A utility result that cannot be encoded becomes a failed call. An output that cannot
        becomes an error of its request, which ends; the others of the message stay as they are.

        Args:
            message: outputs, or a result.
            buffer: gets the first frame.
            client: index of the one that gets it.

        Raises:
            WireError: the cause is neither an output nor a result.
        """
        if self._failed_ids:
            message = self._without_failed(message)
        try:
            return self._encoder.encode_into(message, buffer)
        except Exception as error:  # plugins made its contents, so this may be any exception
            _log.warning("a message cannot be sent as it is: %s", error)
            return self._encoder.encode_into(self._replacement(message, client), buffer)

    def _replacement(self, message: Message, client: int) -> Message:
        if isinstance(message, UtilityOutput):
            error = self._encoding_error(message)
            return message if error is None else _failed_call(message, error)
        outputs, failed = [], []
        for output in message.outputs:
            if (reason := self._invalid_field(output)) is None:
                outputs.append(output)
                continue
            outputs += rejection_output(output.request_id, HardpointError(reason)).outputs
            if not output.finished:
                failed.append(output.request_id)
        if failed:
            self._failed_ids.update(failed)
            self._abort(failed, client)
        return msgspec.structs.replace(message, outputs=outputs)

    def _without_failed(self, message: Message) -> Message:
        if isinstance(message, UtilityOutput):
            return message
        outputs = []
        for output in message.outputs:  # after the last output, another request may have the id
            if output.request_id not in self._failed_ids:
                outputs.append(output)
            elif output.finished:
                self._failed_ids.discard(output.request_id)
        return msgspec.structs.replace(message, outputs=outputs)

    def _invalid_field(self, output: EngineCoreOutput) -> str | None:
        for name in output.__struct_fields__:
            if (error := self._encoding_error(getattr(output, name))) is not None:
                return f"the output's {name} cannot be sent: {error}"
        return None

    def _encoding_error(self, value: object) -> Exception | None:
        try:
            self._encoder.encode(value)
        except Exception as error:
            return error
        return None


def _failed_call(message: UtilityOutput, error: Exception) -> UtilityOutput:
    return UtilityOutput.failed(message.call_id, f"the result: {error}")
