"""The load of soak.py: kinds of requests, clients that go away, and counts of the results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from http_streams import Client, Timeline

REQUEST_S = 120.0
DEADLINES_S = (0.1, 0.3, 1.0)
HALF_CLOSED_S = 2.0
_LATE_S = 1.0
_REFUSED = ("429 ", "503 overloaded", "stream: overloaded")
_KEPT = 100


class Point(Enum):
    """Where a client goes away."""

    IN_BODY = "in the request's body"
    BEFORE_HEADERS = "before the answer's head"
    FIRST_TOKEN = "at the first token"
    MID_STREAM = "mid stream"
    HALF_CLOSED = "half-closed"


async def disconnect(
    client: Client, path: str, body: dict[str, Any], point: Point, rng: random.Random
) -> None:
    """Send a request over a connection of its own and go away at a point before its end."""
    parts, content = urlsplit(client.url), json.dumps(body).encode()
    headers = {"Host": parts.netloc, "Content-Type": "application/json", "Connection": "close"}
    headers |= {**client.headers, "Content-Length": str(len(content))}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    request = "\r\n".join([*lines, "", ""]).encode() + content
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        if point is Point.IN_BODY:
            writer.write(request[: rng.randrange(1, len(request))])
            await asyncio.sleep(rng.random() * 0.02)
            return
        writer.write(request)
        if point is Point.BEFORE_HEADERS:
            await asyncio.sleep(rng.random() * 0.005)
        elif point is Point.HALF_CLOSED:
            writer.write_eof()
            await asyncio.sleep(rng.random() * HALF_CLOSED_S)
        else:
            limit = max(2, int(body["max_tokens"]) - 1)
            chunks = 1 if point is Point.FIRST_TOKEN else rng.randint(2, limit)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(REQUEST_S):
                    while chunks and (line := await reader.readline()):
                        chunks -= line.startswith(b"data:")
    finally:
        if rng.random() < 0.5:
            writer.close()
        else:
            writer.transport.abort()


@dataclass(frozen=True)
class Traffic:
    """The requests of a key.

    Attributes:
        streams: number of streams, each of which sends one request after the other.
        leaving, failing, timed: shares of the requests whose client goes away, that use the
            failing processor, that have a deadline.
        pause_s, retry_s: mean pauses after an answer, and after an error.
        per_minute: limit of the requests that the server admits; 0 if there is none.
    """

    streams: int
    leaving: float = 0.0
    failing: float = 0.0
    timed: float = 0.0
    pause_s: float = 0.0
    retry_s: float = 0.0
    per_minute: int = 0


@dataclass
class Counts:
    """The results of a load.

    Attributes:
        ends: how requests ended, by key and kind.
        lost: errors of requests that ought to have ended well, by key and error.
        failed: errors of requests that use the failing processor.
        left: clients that went away, by where.
        compared: number of answers that were compared.
        wrong, late: descriptions of wrong answers and of ends long after a deadline.
        events: kills and changes of the number of engines, with their results.
        timelines: answers by key.
    """

    ends: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    timelines: dict[str, list[Timeline]] = field(default_factory=dict)

    def record(
        self,
        key: str,
        number: int,
        right: str,
        timeline: Timeline,
        *,
        timeout: float | None = None,
        is_limited: bool = False,
        is_failing: bool = False,
    ) -> None:
        """Count a request that has ended.

        Args:
            key: key of the request.
            number: number of its question.
            right: answer to the same question alone.
            timeline: the answer.
            timeout: seconds until the request's deadline.
            is_limited: whether admission limits may reject the request.
            is_failing: whether the request uses the failing processor.
        """
        seconds = timeline.ended - (timeline.written or timeline.sent)
        error = timeline.error
        if (
            timeout is not None
            and seconds >= timeout
            and (error.startswith("408 ") or not error)
            and timeline.text != right
        ):
            self.ends[f"{key}: deadline"] += 1
            if seconds > timeout + _LATE_S:
                self.late.append(f"{key}: {seconds:.1f} s of {timeout:g} s")
            right = right[: len(timeline.text)]
        elif error and is_failing:
            self.failed[error] += 1
            return
        elif error and is_limited and error.startswith(_REFUSED):
            self.ends[f"{key}: refused"] += 1
            return
        elif error:
            self.ends[f"{key}: lost"] += 1
            self.lost[f"{key}: {error}"] += 1
            return
        else:
            self.ends[f"{key}: {'survived' if is_failing else 'whole'}"] += 1
        self.compared += 1
        if timeline.text != right:
            self.wrong.append(f"{key}: question {number}: {timeline.text!r} for {right!r}")
        if not is_failing:
            self.timelines.setdefault(key, []).append(timeline)

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return the counts as plain data, with rates in so many seconds and times in ms."""
        counters = ("ends", "lost", "failed", "left", "compared", "late", "events")
        return {
            **{name: getattr(self, name) for name in counters},
            "different": len(self.wrong),
            "wrong": self.wrong[:_KEPT],
            "rates": {key: len(listed) / seconds for key, listed in self.timelines.items()},
            "times": {key: times_of(listed) for key, listed in self.timelines.items()},
        }

    def problems(self, allowed: float) -> list[str]:
        """Return the problems; a share of `allowed` of the answers may be wrong."""
        checks = {
            f"{self.lost.total()} requests without a fault of their own failed": self.lost,
            f"{len(self.late)} requests ended long after their deadline": self.late,
            f"{len(self.wrong)} of {self.compared} answers differ from answers without load": (
                len(self.wrong) > allowed * self.compared
            ),
            "no answer was compared": not self.compared,
        }
        return [problem for problem, is_found in checks.items() if is_found]


def times_of(timelines: Sequence[Timeline]) -> dict[str, dict[str, float]]:
    """Return p50 and p99 of the times of answers, in milliseconds."""
    times = {
        "ttft": [timeline.first - timeline.sent for timeline in timelines if timeline.chunks],
        "tpot": [
            (timeline.last - timeline.first) / (timeline.chunks - 1)
            for timeline in timelines
            if timeline.chunks > 1
        ],
        "itl": [gap for timeline in timelines for gap in timeline.gaps],
        "e2e": [timeline.ended - timeline.sent for timeline in timelines],
    }
    ordered = {name: sorted(seconds) or [0.0] for name, seconds in times.items()}
    return {
        name: {f"p{share}": 1e3 * listed[len(listed) * share // 100] for share in (50, 99)}
        for name, listed in ordered.items()
    }
