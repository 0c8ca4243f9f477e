"""In-flight request table of a client of several engines, with the outputs so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from hardpoint.plugins import EngineCoreOutput, EngineCoreRequest
from hardpoint.plugins.requests import ResumedOutputs

if TYPE_CHECKING:
    from .replica import Replica


_LEAST_S = 1e-3  # left of the timeout of a request whose time is up


class Entry:
    """An in-flight request, and its outputs so far.

    Attributes:
        request: as it was sent first.
        call: ids of all requests of its call, of which all run or none.
        replica: the engine that it was sent to; None while it waits for one.
        has_output: whether any came, at any engine.
        num_resumes: how often its engine died.
        num_moves: how often it went on at another engine.
        deaths: engines that died with it in the step, since it got its last token.
        is_suspect: whether there is one.
        version: version of the weights that its tokens follow from; None if of several.
    """

    __slots__ = (
        "_deadline",
        "_num_prompt_logprobs",
        "_num_routed_positions",
        "_observed",
        "_part_figures",
        "_pending",
        "_token_ids",
        "_weight_runs",
        "call",
        "deaths",
        "has_output",
        "is_suspect",
        "num_moves",
        "num_resumes",
        "replica",
        "request",
        "version",
    )

    def __init__(self, request: EngineCoreRequest, call: Sequence[str]) -> None:
        self.request = request
        self.call = call
        self.replica: Replica | None = None
        self.has_output = False
        self.num_resumes = self.num_moves = 0
        self.deaths = 0
        self.is_suspect = False
        self.version: str | None = None
        timeout, before = request.timeout, request.resumed or ResumedOutputs([])
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._pending = 0  # of the prompt tokens that its engine has to compute
        self._token_ids = list(before.output_token_ids)
        observed = before.observed_logprobs
        self._observed = None if observed is None else list(observed)
        self._num_prompt_logprobs = before.num_prompt_logprobs
        self._num_routed_positions = before.num_routed_positions
        self._part_figures, self._weight_runs = before.part_figures, before.weight_runs

    def send_to(self, replica: Replica, version: str) -> None:
        """Count it as in flight at an engine with a version of its weights."""
        if not self.has_output:
            self.version = version
        cached = replica.cached_prefix_tokens(self.request)
        num_tokens = len(self.request.prompt_token_ids) + len(self._token_ids)
        self.replica, self._pending = replica, max(num_tokens - cached, 1)
        replica.add(self.request.request_id, self._pending)

    def leave(self) -> None:
        """Count it as in flight at its engine no more."""
        if (replica := self.replica) is not None:
            replica.remove(self.request.request_id, self._pending)
            self.replica, self._pending = None, 0

    def read(self, output: EngineCoreOutput) -> None:
        """Add an output; its prompt is computed once it has a token."""
        self.has_output = True
        if output.new_token_ids:
            self._token_ids += output.new_token_ids
            self.is_suspect, self.deaths = False, 0
            if self._pending and self.replica is not None:
                self.replica.computed(self._pending)
                self._pending = 0
        if output.observed_logprobs is not None:
            self._observed = self._observed or []
            self._observed += output.observed_logprobs
        if output.prompt_logprobs is not None:
            self._num_prompt_logprobs += len(output.prompt_logprobs)
        if output.routed_experts is not None:
            self._num_routed_positions += len(output.routed_experts)
        if output.part_figures is not None:
            self._part_figures = output.part_figures
        if output.weight_runs:
            self._weight_runs = output.weight_runs
            last = output.weight_runs[-1]
            self.version = last.version if last.version == last.kv_version else None

    def resumed(self) -> EngineCoreRequest:
        """Return the request as the next engine gets it."""
        request = self.request
        timeout = self._deadline and max(self._deadline - time.monotonic(), _LEAST_S)
        resumed = request.resumed
        if self.num_moves and self.has_output and request.pooling_params is None:
            before = 0 if resumed is None else resumed.num_resumes
            resumed = ResumedOutputs(
                self._token_ids,
                self._observed,
                self._num_prompt_logprobs,
                self._num_routed_positions,
                before + self.num_moves,
                self._part_figures,
                self._weight_runs,
            )
        return msgspec.structs.replace(
            request, timeout=timeout, resumed=resumed, is_admitted=self.num_moves > 0
        )


class Ledger:
    """All requests in flight, by id. For one thread at a time."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
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

    def has(self, entry: Entry) -> bool:
        """Return whether a request is in flight still."""
        return self._entries.get(entry.request.request_id) is entry

    def close(self, entry: Entry) -> None:
        """Remove a request."""
        self._entries.pop(entry.request.request_id, None)
        entry.leave()

    def of(self, replica: Replica) -> list[Entry]:
        """Return the entries of an engine."""
        return [entry for entry in self._entries.values() if entry.replica is replica]
