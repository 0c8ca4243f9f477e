"""Runs a server's applications: sockets, signals, draining, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence

import uvicorn

from hardpoint.plugins import ConfigError
from hardpoint.plugins.server import ServerConfig

from .assembly import Applications
from .service import Phase

_log = logging.getLogger("hardpoint")

ENGINE_DIED = 3
"""Exit code of a server whose engine died and is not restarted."""

_POLL_SECONDS = 0.1
_BACKLOG = 2048
_SEND_BUFFER = 1 << 16


class _Listener(uvicorn.Server):
    """A uvicorn server whose signals somebody else handles."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(settings: ServerConfig) -> socket.socket:
    """Return the bound socket of the users' address, which does not listen yet.

    Raises:
        ConfigError: the address is in use, or none of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: without it, the body of an answer waits for the client to acknowledge
    # its headers, which takes 40 ms. asyncio sets it for some sockets alone.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Of connections: what a client does not read waits here, and then in the engine, merged.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    try:
        bound.bind((settings.host, settings.port))
    except OSError as cause:
        bound.close()
        raise ConfigError(
            f"server.port: {settings.host}:{settings.port} cannot be bound: {cause.strerror}"
        ) from None
    return bound


class Serving:
    """A server that runs until a signal, or until its engine is dead."""

    def __init__(self, applications: Applications, sockets: Sequence[socket.socket]) -> None:
        """Serve the users' application on sockets that are bound."""
        self._service = applications.service
        self._sockets = list(sockets)
        self._signals = 0
        self._code = 0
        self._end = asyncio.Event()
        settings = self._service.settings
        self._listener = _Listener(
            uvicorn.Config(
                applications.users,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                date_header=True,
                proxy_headers=False,
                ws="none",
                http="httptools",
                backlog=_BACKLOG,
                timeout_keep_alive=max(1, round(settings.keep_alive_seconds)),
                timeout_graceful_shutdown=1,
                root_path=settings.root_path,
            )
        )

    @property
    def is_listening(self) -> bool:
        """Whether it answers connections."""
        return self._listener.started

    def stop(self) -> None:
        """End the server now; requests that run are ended."""
        self._listener.force_exit = True
        self._end.set()

    async def run(self, *, handle_signals: bool = True) -> int:
        """Serve until the end; return the exit code.

        Args:
            handle_signals: drain at SIGINT and SIGTERM; for the main thread alone.
        """
        loop = asyncio.get_running_loop()
        names = (signal.SIGINT, signal.SIGTERM) if handle_signals else ()
        for name in names:
            loop.add_signal_handler(name, self._signalled, name)
        listening = asyncio.ensure_future(self._listener.serve(self._sockets))
        watching = asyncio.ensure_future(self._watch())
        try:
            await self._end.wait()
        finally:
            watching.cancel()
            self._listener.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await listening
            for name in names:
                loop.remove_signal_handler(name)
        return self._code

    def _signalled(self, name: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            self._draining = asyncio.ensure_future(self._drain(name))
        else:
            _log.warning("a second signal (%s): requests that run are ended", name.name)
            self._code = 128 + name
            self.stop()

    async def _drain(self, name: signal.Signals) -> None:
        """Say that no more requests should come, serve on for a while, then finish those here."""
        settings, service = self._service.settings, self._service
        _log.info("%s: /ready says 503 for %g s", name.name, settings.drain_delay)
        service.phase = Phase.LEAVING
        await asyncio.sleep(settings.drain_delay)
        service.phase = Phase.REFUSING
        _log.info("requests are refused; %d are being answered", service.load.open)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_seconds):
                while service.load.open:
                    await asyncio.sleep(_POLL_SECONDS)
        if service.load.open:
            _log.warning("%d requests are ended unfinished", service.load.open)
        self._end.set()

    async def _watch(self) -> None:
        """End the server when its engine is dead for good."""
        while (dead := self._service.engine.dead_error) is None:
            await asyncio.sleep(_POLL_SECONDS)
        _log.error("the engine has ended, and so does the server: %s", dead)
        self._service.phase = Phase.REFUSING
        self._code = ENGINE_DIED
        await asyncio.sleep(1.0)  # so that waiting requests are answered, with 503
        self._end.set()
