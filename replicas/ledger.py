"""The requests that a client of several engines has in flight, and what each has got so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from hardpoint.plugins import EngineCoreOutput, EngineCoreRequest

if TYPE_CHECKING:
    from .replicas import Replica


class Entry:
    """A request in flight.

    Attributes:
        request: as it was sent first.
        call: ids of all requests of its call, of which all run or none.
        replica: the engine that it was sent to; None while it waits for one.
        pending_tokens: its part of the engine's pending prompt tokens.
        token_ids: its output so far.
        num_resumes: how often it went on at another engine.
        deaths: engines that died with it in the step, since it got its last token.
        is_suspect: whether there is one.
    """

    __slots__ = (
        "call",
        "deadline",
        "deaths",
        "has_output",
        "is_suspect",
        "num_resumes",
        "pending_tokens",
        "replica",
        "request",
        "token_ids",
    )

    def __init__(self, request: EngineCoreRequest, call: Sequence[str]) -> None:
        """Begin without an engine."""
        self.request = request
        self.call = call
        self.replica: Replica | None = None
        self.pending_tokens = 0
        self.token_ids: list[int] = []
        self.has_output = False
        self.num_resumes = 0
        self.deaths = 0
        self.is_suspect = False
        timeout = request.timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout

    @property
    def seconds_left(self) -> float | None:
        """The rest of its timeout; None is without limit."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 1e-3)

    def sent_to(self, replica: Replica) -> None:
        """Count it as in flight there."""
        cached = replica.cached_prefix_tokens(self.request)
        num_tokens = len(self.request.prompt_token_ids) + len(self.token_ids)
        self.pending_tokens = max(num_tokens - cached, 1)
        self.replica = replica
        replica.in_flight += 1
        replica.pending_prompt_tokens += self.pending_tokens

    def resumed(self) -> EngineCoreRequest:
        """Return the request as the next engine gets it."""
        return msgspec.structs.replace(self.request, timeout=self.seconds_left)

    def take(self, output: EngineCoreOutput) -> None:
        """Add an output; its prompt is computed once it has a token."""
        self.has_output = True
        if output.new_token_ids:
            self.token_ids += output.new_token_ids
            self.is_suspect, self.deaths = False, 0
            if self.pending_tokens and self.replica is not None:
                self.replica.pending_prompt_tokens -= self.pending_tokens
                self.pending_tokens = 0

    def leave(self) -> None:
        """Count it as in flight at its engine no more."""
        if (replica := self.replica) is not None:
            replica.in_flight -= 1
            replica.pending_prompt_tokens -= self.pending_tokens
            self.replica, self.pending_tokens = None, 0


class Ledger:
    """All requests in flight, by id. For one thread at a time."""

    def __init__(self) -> None:
        """Begin without any."""
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Iterate in the order in which they came."""
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> Entry | None:
        """Return the entry of an id; None if no request in flight has it."""
        return self._entries.get(request_id)

    def open(self, requests: Sequence[EngineCoreRequest]) -> list[Entry]:
        """Add the requests of a call."""
        call = tuple(request.request_id for request in requests)
        entries = [Entry(request, call) for request in requests]
        self._entries.update(zip(call, entries, strict=True))
        return entries

    def close(self, entry: Entry) -> None:
        """Remove a request."""
        self._entries.pop(entry.request.request_id, None)
        entry.leave()

    def of(self, replica: Replica) -> list[Entry]:
        """Return the entries of an engine."""
        return [entry for entry in self._entries.values() if entry.replica is replica]
