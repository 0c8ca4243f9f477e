"""Sessions, the blocks that they retain, and for how long."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hardpoint.errors import RequestError, shown
from hardpoint.plugins import (
    EngineCoreRequest,
    FrontendHalf,
    ModelRunnerOutput,
    ReasoningMarkers,
    Request,
    RequestFault,
    RequestStatus,
    SchedulerOutput,
    SchedulerStats,
)
from hardpoint.plugins.step_part import (
    AdmissionGate,
    EngineHalfContext,
    OutputFigures,
    ProgramCalls,
    RequestFilter,
    RequestLifecycle,
    StepObserver,
)

_LONGEST_NAME = 256


class RetainingRequests(FrontendHalf):
    """Lets the output of each request that retains blocks have the figures of the part."""

    for_fields = ("retention",)

    def __init__(self, name: str) -> None:
        self._name = name

    def prepare(
        self,
        request: EngineCoreRequest,
        reasoning: ReasoningMarkers | None,  # noqa: ARG002
    ) -> None:
        """Check a request's wish, and include the answer in its output.

        Raises:
            RequestError: a field is wrong.
        """
        check_retention(request)
        if self._name not in (include := request.params.include):
            params = msgspec.structs.replace(request.params, include=[*include, self._name])
            request.params = params


def check_retention(request: EngineCoreRequest) -> None:
    """Check the wish of a request.

    Raises:
        RequestError: a field is wrong.
    """
    assert request.retention is not None
    session, seconds = request.retention.session, request.retention.seconds
    if not 0 < len(session) <= _LONGEST_NAME:
        raise RequestError(
            f"session: expected a name of 1 to {_LONGEST_NAME} characters, got {shown(session)}"
        )
    if not (seconds > 0 and math.isfinite(seconds)):
        raise RequestError(f"retain_seconds: expected seconds > 0, got {seconds}")


@dataclass(eq=False)
class _Session:
    """A conversation.

    Attributes:
        key: salt of its requests, and its name.
        deadlines: deadline of each block that it retains, by its hash; infinite while one of
            its requests runs.
        live: its requests that have not ended.
    """

    key: tuple[str | None, str]
    deadlines: dict[bytes, float] = field(default_factory=dict)
    live: list[_Live] = field(default_factory=list)


@dataclass(eq=False)
class _Live:
    """A request that has not ended.

    Attributes:
        hashes: hashes of all its blocks that were computed.
        num_blocks: number of its computed blocks since it was last admitted.
        num_refused: number of these that did not fit into the share.
    """

    request: Request
    session: _Session | None
    seconds: float
    hashes: set[bytes] = field(default_factory=set)
    num_blocks: int = 0
    num_refused: int = 0


class RetainedSessions(
    RequestFilter, AdmissionGate, RequestLifecycle, StepObserver, OutputFigures, ProgramCalls
):
    """Knows which sessions retain which blocks, and writes the latest deadline of each block.

    A session is known while it retains anything, or has running requests. Sessions of other salts
    have other blocks, because a salt is part of their hashes: a share belongs to a salt.
    """

    for_fields = ("retention",)

    def __init__(
        self, context: EngineHalfContext, max_seconds: float, share: float, max_sessions: int
    ) -> None:
        """Begin without sessions; the arguments are options of the part."""
        self._hashes_of, self._clock = context.block_hashes, context.clock
        self._block_size, self._retained = context.block_size, context.retained
        self._max_seconds, self._share, self._max_sessions = max_seconds, share, max_sessions
        self._live: dict[str, _Live] = {}
        self._sessions: dict[tuple[str | None, str], _Session] = {}
        self._holders: dict[bytes, list[_Session]] = {}
        self._num_held: Counter[str | None] = Counter()  # blocks by salt
        self._ends: list[tuple[float, int, _Session, list[bytes]]] = []  # a heap
        self._order = itertools.count()
        self._is_used = False

    # Requests

    def check(self, request: EngineCoreRequest) -> None:
        """Check a request that another frontend may have made.

        Raises:
            RequestError: a field is wrong.
        """
        check_retention(request)

    def gate(self, request: Request) -> None:
        """Begin to follow a request."""
        source = request.source
        assert source.retention is not None, "it uses the part"
        self._is_used = True
        self._expire()
        key = source.cache_salt, source.retention.session
        session = self._sessions.get(key)
        if session is None and self._share and len(self._sessions) < self._max_sessions:
            session = self._sessions[key] = _Session(key)
        seconds = min(source.retention.seconds, self._max_seconds)
        live = self._live[request.request_id] = _Live(request, session, seconds)
        if session is not None:
            session.live.append(live)

    def result(
        self,
        plan: SchedulerOutput,
        result: ModelRunnerOutput,  # noqa: ARG002
    ) -> Mapping[str, RequestFault]:
        """Retain the blocks that a step has filled."""
        self._forget_lost()
        names = plan.num_scheduled_tokens.keys() & self._live.keys()
        if not names:
            return {}
        for new in plan.new_requests:
            if new.resumed and (live := self._live.get(new.source.request_id)) is not None:
                live.num_blocks = live.num_refused = 0  # its blocks may have been evicted
        computed = plan.num_computed_tokens()
        for name in plan.num_scheduled_tokens:
            if name not in names:
                continue
            live = self._live[name]
            tokens = computed[name] + plan.num_scheduled_tokens[name]
            end = min(tokens, live.request.num_tokens) // self._block_size
            if end > live.num_blocks:
                self._retain(live, self._hashes_of(live.request, end)[live.num_blocks : end])
        return {}

    def _retain(self, live: _Live, hashes: Sequence[bytes]) -> None:
        """Retain further blocks of a request, as far as the share of its salt allows it."""
        live.hashes.update(hashes)
        live.num_blocks += len(hashes)
        session = live.session
        if session is None:
            live.num_refused += len(hashes)
            return
        salt, limit = session.key[0], int(self._share * self._retained.num_blocks)
        for key in hashes:
            holders = self._holders.get(key)
            if holders is None:
                if self._num_held[salt] >= limit:
                    live.num_refused += 1
                    continue
                self._num_held[salt] += 1
                holders = self._holders[key] = []
            if key not in session.deadlines:
                holders.append(session)
            session.deadlines[key] = math.inf
            self._retained.deadlines[key] = math.inf

    def figures(self, request_id: str) -> Mapping[str, float | str | Sequence[float]]:
        """Return the answer to a request's wish."""
        if (live := self._live.get(request_id)) is None:  # it never ran
            return {"outcome": "rejected", "seconds": 0.0, "num_blocks": 0}
        assert live.request.source.retention is not None, "it uses the part"
        num_retained = live.num_blocks - live.num_refused
        requested = live.request.source.retention.seconds
        outcome = "accepted"
        if live.session is None or (live.num_refused and not num_retained):
            outcome = "rejected"
        elif live.num_refused or live.seconds < requested:
            outcome = "clipped"
        return {"outcome": outcome, "seconds": live.seconds, "num_blocks": num_retained}

    def updated(self, plan: SchedulerOutput) -> None:
        """Begin the time of requests that a step has ended; the next plan may be far."""
        for name in plan.num_scheduled_tokens:
            live = self._live.get(name)
            if live is not None and live.request.status is RequestStatus.FINISHED:
                self.ended(name)

    def ended(self, request_id: str) -> None:
        """Begin the time for which a request's blocks are retained."""
        live = self._live.pop(request_id, None)
        if live is None or (session := live.session) is None:
            return
        session.live.remove(live)
        until = self._clock() + live.seconds
        held = set().union(*(other.hashes for other in session.live))
        hashes = [key for key in live.hashes - held if key in session.deadlines]
        for key in hashes:
            self._set(session, key, until)
        if hashes:
            heapq.heappush(self._ends, (until, next(self._order), session, hashes))
        self._drop_if_empty(session)

    # Deadlines

    def _set(self, session: _Session, key: bytes, until: float | None) -> None:
        holders = self._holders[key]
        if until is None:
            del session.deadlines[key]
            holders.remove(session)
        else:
            session.deadlines[key] = until
        if holders:
            self._retained.deadlines[key] = max(holder.deadlines[key] for holder in holders)
            return
        del self._holders[key]
        self._retained.deadlines.pop(key, None)
        salt = session.key[0]
        self._num_held[salt] -= 1
        if not self._num_held[salt]:
            del self._num_held[salt]

    def _expire(self) -> None:
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            until, _, session, hashes = heapq.heappop(self._ends)
            for key in hashes:
                if session.deadlines.get(key) == until:
                    self._set(session, key, None)
            self._drop_if_empty(session)

    def _forget_lost(self) -> None:
        lost = self._retained.lost
        while lost:
            key = lost.pop()
            for session in list(self._holders.get(key, ())):
                self._set(session, key, None)
                self._drop_if_empty(session)

    def _drop_if_empty(self, session: _Session) -> None:
        if not session.live and not session.deadlines:
            self._sessions.pop(session.key, None)

    # Calls of programs

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a call of a program: "release" ends the retention of a session.

        Returns:
            "accepted", or "missing" if no session of the salt has that name.

        Raises:
            RequestError: it is another call, or its arguments are wrong.
        """
        if method != "release":
            raise RequestError(f'method: expected "release", got {shown(method)}')
        if set(arguments) != {"session", "cache_salt"}:
            raise RequestError(
                f"arguments: expected session and cache_salt, got {sorted(arguments)}"
            )
        self._expire()
        self._forget_lost()
        session = self._sessions.get((arguments["cache_salt"], arguments["session"]))
        if session is None:
            return "missing"
        for key in list(session.deadlines):
            self._set(session, key, None)
        self._drop_if_empty(session)
        return "accepted"

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add how many blocks are retained, found and evicted, once a request retains any."""
        if not self._is_used:
            return
        self._expire()
        self._forget_lost()
        stats.num_retained_blocks = len(self._retained.deadlines)
        stats.num_retained_hits = self._retained.num_hits
        stats.num_retained_evictions = self._retained.num_evicted
