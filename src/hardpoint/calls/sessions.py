"""Sessions in LLM and AsyncLLM: conversations whose blocks are retained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from hardpoint.errors import shown
from hardpoint.plugins import RequestError

__all__ = ["AsyncSessionCalls", "SyncSessionCalls"]

Released = Literal["accepted", "missing"]

_PART = "retention"


class _Caller(Protocol):
    def call_part(
        self, part: str, method: str, arguments: Mapping[str, Any] | None = None
    ) -> Any: ...


class _AsyncCaller(Protocol):
    async def call_part(
        self, part: str, method: str, arguments: Mapping[str, Any] | None = None
    ) -> Any: ...


class SyncSessionCalls:
    """The call for sessions of a program that waits for it."""

    def release_session(self: _Caller, session: str, *, cache_salt: str | None = None) -> Released:
        """Let the blocks that a session retains be evicted as others; return the outcome.

        Args:
            session: as in the requests of the conversation, `RequestOptions`.
            cache_salt: salt of these requests.

        Returns:
            "accepted", or "missing" if no session with this salt retains anything.

        Raises:
            RequestError: a field is wrong.
        """
        released: Released = self.call_part(_PART, "release", _arguments(session, cache_salt))
        return released


class AsyncSessionCalls:
    """The call for sessions of a program that runs an event loop."""

    async def release_session(
        self: _AsyncCaller, session: str, *, cache_salt: str | None = None
    ) -> Released:
        """Do what `LLM.release_session` does."""
        released: Released = await self.call_part(_PART, "release", _arguments(session, cache_salt))
        return released


def _arguments(session: Any, cache_salt: Any) -> dict[str, Any]:
    """Return the arguments of the call of the part.

    Raises:
        RequestError: one is no text.
    """
    for name, value in (("session", session), ("cache_salt", cache_salt)):
        if not isinstance(value, str) and not (name == "cache_salt" and value is None):
            raise RequestError(f"{name}: expected a text, got {shown(value)}")
    return {"session": session, "cache_salt": cache_salt}
