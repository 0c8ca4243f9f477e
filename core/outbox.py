"""What an engine process has to say to its clients, until it is sent."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs

from .wire import UtilityOutput

__all__ = ["Outbox", "absorb"]

_log = logging.getLogger("hardpoint")
_LOOK_AGAIN_S = 0.01  # how often it is asked whether a client that was behind can take more
_MOST_HELD = 8192

T = TypeVar("T")

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
        self._outputs: EngineCoreOutputs | None = None
        self._places: dict[str, int] | None = None  # of requests in `_outputs`, once it is merged

    def __len__(self) -> int:
        outputs = self._outputs
        return len(self._answers) + (0 if outputs is None else max(len(outputs.outputs), 1))

    def put(self, message: Message) -> None:
        if isinstance(message, UtilityOutput):
            self._answers.append(message)
            self._before += self._outputs is None
        elif self._outputs is None:
            self._outputs = message
        else:
            self._outputs = self._merged(self._outputs, message)

    def take(self) -> Message:
        outputs = self._outputs
        if self._before or outputs is None:
            self._before -= 1
            return self._answers.popleft()
        self._outputs = self._places = None
        self._before = len(self._answers)
        return outputs

    def _merged(self, held: EngineCoreOutputs, later: EngineCoreOutputs) -> EngineCoreOutputs:
        if self._places is None:
            held = msgspec.structs.replace(held, outputs=[_own(each) for each in held.outputs])
            self._places = {output.request_id: i for i, output in enumerate(held.outputs)}
        for output in later.outputs:
            place = self._places.get(output.request_id)
            if place is not None and not held.outputs[place].finished:
                absorb(held.outputs[place], output)
            else:  # new to the client, or another request that got the id of an ended one
                self._places[output.request_id] = len(held.outputs)
                held.outputs.append(_own(output))
        return msgspec.structs.replace(
            later,
            outputs=held.outputs,
            finished_requests=_either(held.finished_requests, later.finished_requests),
            scheduler_stats=_latest(held.scheduler_stats, later.scheduler_stats),
            wave_complete=_latest(held.wave_complete, later.wave_complete),
            start_wave=_latest(held.start_wave, later.start_wave),
        )


def _own(output: EngineCoreOutput) -> EngineCoreOutput:
    """Return a copy that can be added to."""
    return msgspec.structs.replace(
        output,
        new_token_ids=list(output.new_token_ids),
        logprobs=_extended(None, output.logprobs),
        prompt_logprobs=_extended(None, output.prompt_logprobs),
    )


def absorb(held: EngineCoreOutput, later: EngineCoreOutput) -> None:
    """Have one output, whose lists are its own, say what a later one of its request says too."""
    held.new_token_ids += later.new_token_ids
    held.logprobs = _extended(held.logprobs, later.logprobs)
    held.prompt_logprobs = _extended(held.prompt_logprobs, later.prompt_logprobs)
    if later.events:
        held.events = [*held.events, *later.events]
    if later.finish_reason is not None:
        held.finish_reason, held.stop_reason = later.finish_reason, later.stop_reason
        held.error, held.error_kind = later.error, later.error_kind
        held.faulty_plugin = later.faulty_plugin
    held.num_nans_in_logits += later.num_nans_in_logits
    for name in _TOLD_ONCE:
        if (value := getattr(later, name)) is not None:
            setattr(held, name, value)


_TOLD_ONCE = (
    "num_cached_tokens",
    "prefill_stats",
    "kv_transfer_params",
    "pooling_output",
    "routed_experts",
    "trace_headers",
)


def _extended(held: list[T] | None, later: list[T] | None) -> list[T] | None:
    if held is None:
        return None if later is None else list(later)
    held += later or ()
    return held


def _either(first: set[str] | None, later: set[str] | None) -> set[str] | None:
    return None if first is None and later is None else (first or set()) | (later or set())


def _latest(first: Any, later: Any) -> Any:
    return first if later is None else later
