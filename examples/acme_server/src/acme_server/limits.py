"""A middleware that limits how many requests a client makes in a minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from hardpoint.plugins.server import Client, Middleware

_SECONDS = 60.0
_FREE = ("/health", "/ready", "/metrics", "/acme/usage")


def rate_limit(per_minute: int, clock: Callable[[], float] = time.monotonic) -> Middleware:
    """Return a middleware that refuses further requests of a client with 429."""

    def wrap(app: ASGIApp) -> ASGIApp:
        times: dict[str, deque[float]] = {}

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            client: Client = scope["state"]["client"]
            if scope["path"] not in _FREE:
                _count(times.setdefault(client.name, deque()), per_minute, clock())
            await app(scope, receive, send)

        return limited

    return Middleware(wrap=wrap)


def _count(times: deque[float], limit: int, now: float) -> None:
    while times and times[0] <= now - _SECONDS:
        times.popleft()
    if len(times) >= limit:
        seconds = max(1, round(times[0] + _SECONDS - now))
        raise HTTPException(
            429,
            f"expected at most {limit} requests in a minute; try again in {seconds} s",
            {"retry-after": str(seconds)},
        )
    times.append(now)
