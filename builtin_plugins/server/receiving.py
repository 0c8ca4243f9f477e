"""Bodies of requests as they come in: within their size, their time and the server's memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator

from starlette.requests import Request

from .access.counts import key_of
from .config import ServerConfig, ServerLimits
from .errors import AnswerError, unavailable
from .streaming import ClientGoneError

SMALL_BYTES = 64 << 10
"""A body up to this size has room in any case, so that a few large ones never keep out all."""

_SLOWEST_BYTES = 10_000
_RETRY_SECONDS = 1.0


_TEXT_BYTES = 8 << 20  # of a body without images


def body_limit(limits: ServerLimits, image_bytes: int = 0) -> int:
    """Return the size that a body may have.

    Args:
        limits: limits of the server.
        image_bytes: size of the images that a prompt may have, before they are base64.
    """
    if limits.body_bytes is not None:
        return limits.body_bytes
    return _TEXT_BYTES + 4 * -(-image_bytes // 3)


class BodyReceiver:
    """Receives bodies.

    Attributes:
        held: bytes of large bodies that are not yet used.
        max_bytes: size that a body may have.
    """

    def __init__(self, settings: ServerConfig, image_bytes: int = 0) -> None:
        """Receive within the limits of a configuration; `image_bytes` as for `body_limit`."""
        self.held = 0
        self._held_of: Counter[str] = Counter()  # by the key's name
        self.max_bytes = body_limit(settings.limits, image_bytes)
        # One body that is allowed has room where nothing else is held.
        self._room = max(settings.limits.buffered_bytes, self.max_bytes)
        self._room_of_key = max(settings.limits.buffered_bytes // 2, self.max_bytes)
        self._seconds = settings.body_seconds

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Provide a request's body; its bytes count as held until the context ends.

        Raises:
            AnswerError: it is too long or too slow, or there is no room for it.
            ClientGoneError: the client is gone.
        """
        parts: list[bytes] = []
        key = key_of(request.scope["state"])
        size = held = 0
        setting = " (server.limits.body_bytes)"
        try:
            async for part in self.parts(request, self.max_bytes, setting):
                size += len(part)
                parts.append(part)
                if size > SMALL_BYTES:
                    has_room = self.hold(size - held, key)
                    held = size
                    if not has_room:
                        raise _no_room()
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            self.hold(-held, key)

    async def parts(
        self, request: Request, max_bytes: int, setting: str = ""
    ) -> AsyncGenerator[bytes, None]:
        """Yield a request's body as it comes in.

        Args:
            max_bytes: size that it may have.
            setting: what limits it, for the message.

        Raises:
            AnswerError: it is too long or too slow.
            ClientGoneError: the client is gone.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_long(max_bytes, setting)
        size, more = 0, True
        begun = asyncio.get_running_loop().time()
        while more:
            part, more = await self._part(request, self.deadline(begun, size))
            size += len(part)
            if size > max_bytes:
                raise _too_long(max_bytes, setting)
            yield part

    def deadline(self, begun: float, size: int) -> float:
        """Return when the next part of a body has to be there, by the clock of the event loop.

        Args:
            begun: when it began to come in.
            size: bytes of it that have come.
        """
        now = asyncio.get_running_loop().time()
        return min(begun + size / _SLOWEST_BYTES, now) + self._seconds

    def hold(self, change: int, key: str) -> bool:
        """Count bytes that are held, or if negative no more; return whether they have room.

        Args:
            change: number of the bytes.
            key: name of the key that sent them; empty without a key.
        """
        self.held += change
        self._held_of[key] += change
        room = self._room_of_key if key else self._room
        has_room = self.held <= self._room and self._held_of[key] <= room
        if not self._held_of[key]:
            del self._held_of[key]
        return has_room

    async def _part(self, request: Request, deadline: float) -> tuple[bytes, bool]:
        try:
            async with asyncio.timeout_at(deadline):
                message = await request.receive()
        except TimeoutError:
            raise AnswerError(
                408,
                f"body: expected its next part within {self._seconds:g} s (server.body_seconds), "
                f"and {_SLOWEST_BYTES} bytes per second after that time",
                headers={"connection": "close"},
            ) from None
        if message["type"] != "http.request":
            raise ClientGoneError
        return message.get("body", b""), message.get("more_body", False)


def _no_room() -> AnswerError:
    error = unavailable(
        "the server holds as many bytes of bodies as it may "
        "(server.limits.buffered_bytes); try again later",
        _RETRY_SECONDS,
        code="overloaded",
    )
    error.headers["connection"] = "close"
    return error


def _too_long(max_bytes: int, setting: str) -> AnswerError:
    return AnswerError(
        413,
        f"body: expected at most {max_bytes} bytes{setting}",
        headers={"connection": "close"},
    )
