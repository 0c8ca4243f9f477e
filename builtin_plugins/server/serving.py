"""Runs a server's applications: listening, signals, draining, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from hardpoint.plugins import ConfigError, HardpointError
from hardpoint.plugins.server import AsyncGenerator
from hardpoint.toolkit.curve_keys import is_loopback

from .access.guard import accepted_names
from .application import Application
from .assembly import Applications
from .operations.addresses import BoundAddress, allow_descriptors
from .operations.connections import ServerConnection
from .operations.loop_watch import Outliving, blame_stop, watched
from .operations.notify import ServiceManager
from .receiving import body_limit
from .service import ServerPhase, Service

_log = logging.getLogger("hardpoint")

ENGINE_DIED = 3
"""Exit code of a server whose engine died and is not restarted."""

_POLL_SECONDS = 0.1
_BACKLOG = 2048
_LAST_ANSWERS_SECONDS = 1.0
SIGNAL_CODE = 128
"""Exit code of a server that a signal ended, less the number of the signal."""


class _Listener(uvicorn.Server):
    """A uvicorn server without signal handlers, and with a limit for TLS handshakes."""

    def __init__(self, config: uvicorn.Config, handshake_seconds: float) -> None:
        super().__init__(config)
        self._handshake_seconds = handshake_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        connection: Any = config.http_protocol_class
        protocol = functools.partial(
            connection, config=config, server_state=self.server_state, app_state={}
        )
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                protocol,
                sock=bound,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=self._handshake_seconds if config.ssl else None,
            )
            for bound in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """A server that runs until a signal, or until its engine is dead."""

    def __init__(
        self,
        applications: Applications,
        users: BoundAddress | None,
        admin: BoundAddress | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        """Serve the applications on their addresses; users' on none if other processes do.

        Args:
            manager: is notified, if there is one.
        """
        self._manager = manager or ServiceManager()
        self._service = applications.service
        self._bound: list[BoundAddress] = []
        self._listeners: list[_Listener] = []
        if users is not None:
            self._bound.append(users)
            self._listeners.append(self._listener(applications.users, users))
        if admin is not None:
            assert applications.admin is not None
            self._bound.append(admin)
            self._listeners.append(self._listener(applications.admin, admin))
        self._signals = 0
        self._code = 0
        self._at_once = False
        self._end = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._serves_users = users is not None

    def _listener(self, application: Application, address: BoundAddress) -> _Listener:
        settings = self._service.settings
        protocol: Any = functools.partial(
            ServerConnection,
            settings,
            self._service.traffic,
            self._service.requests.receiver,
            application.takes_websocket,
        )
        keep_alive: Any = settings.keep_alive_seconds  # uvicorn takes fractions as well
        return _Listener(
            uvicorn.Config(
                application,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                date_header=True,
                proxy_headers=False,
                ws="none",  # a ServerConnection becomes one itself
                ws_max_size=body_limit(settings.limits),
                ws_ping_interval=settings.heartbeat_seconds or None,
                ws_ping_timeout=settings.send_seconds,
                ws_per_message_deflate=False,
                http=protocol,
                backlog=_BACKLOG,
                timeout_keep_alive=keep_alive,
                timeout_graceful_shutdown=1,
                ssl_certfile=settings.tls_certificate if address.is_encrypted else None,
                ssl_keyfile=settings.tls_key if address.is_encrypted else None,
            ),
            settings.header_seconds,
        )

    @property
    def is_listening(self) -> bool:
        """Whether it answers connections."""
        return all(listener.started for listener in self._listeners)

    def stop(self) -> None:
        """End the server now; requests that run are ended."""
        self._at_once = True
        self._end.set()

    async def run(
        self, *, handle_signals: bool = True, announce: Callable[[], None] | None = None
    ) -> int:
        """Serve until the end; return the exit code.

        Args:
            handle_signals: drain at SIGINT and SIGTERM; for the main thread alone. Later signals
                stay without effect until the event loop is closed.
            announce: called once connections are answered.

        Raises:
            ConfigError: an address was taken by another program.
            Exception: the server can no longer watch its engine.
        """
        if handle_signals:
            loop = asyncio.get_running_loop()
            for name in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(name, self._signalled, name)
        allow_descriptors(self._service.settings.limits.connections)
        for bound in self._bound:
            bound.check()
        with watched(self._service.engine, self._service.faults):
            return await self._run(announce)

    async def _run(self, announce: Callable[[], None] | None) -> int:
        listening = [
            asyncio.ensure_future(listener.serve([bound.socket]))
            for listener, bound in zip(self._listeners, self._bound, strict=True)
        ]
        ended = asyncio.ensure_future(self._end.wait())
        using = asyncio.ensure_future(self._use_engine())
        watching = asyncio.ensure_future(self._watch(announce))
        try:
            await asyncio.wait([ended, watching, *listening], return_when=asyncio.FIRST_COMPLETED)
            failure = watching.exception() if watching.done() else None
        finally:
            self._manager.stopping()
            for task in (ended, watching, using, self._draining, *self._background):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._end_requests()
            for listener in self._listeners:
                listener.should_exit = True
                listener.force_exit = self._at_once
            results = await asyncio.gather(*listening, return_exceptions=True)
            self._disconnect()
        _raise_first(results)
        if failure is not None:
            raise failure
        return self._code

    async def _use_engine(self) -> None:
        """Use the engine once; an engine that dies before that is not restarted."""
        with contextlib.suppress(HardpointError):
            await self._service.engine.plugins.health()

    async def _end_requests(self) -> None:
        load = self._service.load
        self._service.phase = ServerPhase.REFUSING
        if not load.num_own:
            return
        _log.warning("%d requests are ended unfinished", load.num_own)
        load.end_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWERS_SECONDS):
                while load.num_own:
                    await asyncio.sleep(_POLL_SECONDS / 10)

    def _disconnect(self) -> None:
        for listener in self._listeners:
            for connection in list(listener.server_state.connections):
                connection.transport.abort()

    def _signalled(self, name: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            self._drain(name.name)
        elif self._signals == 2:
            _log.warning("a second signal (%s): requests that run are ended", name.name)
            self._code = SIGNAL_CODE + name
            self.stop()

    def _drain(self, reason: str) -> None:
        if self._draining is None:
            self._manager.stopping()
            self._draining = asyncio.ensure_future(self._finish_requests(reason))

    async def _finish_requests(self, reason: str) -> None:
        """Announce that no more requests should come, serve on for a while, then finish."""
        settings, service = self._service.settings, self._service
        _log.info("%s: /ready says 503 for %g s", reason, settings.drain_delay)
        service.phase = ServerPhase.LEAVING
        service.traffic.closes = True
        await asyncio.sleep(settings.drain_delay)
        service.phase = ServerPhase.REFUSING
        for task in self._background:
            task.cancel()
        _log.info("requests are refused; %d are being answered", service.load.num_own)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_seconds):
                while service.load.num_own or service.traffic.num_own or self._has_unsent():
                    await asyncio.sleep(_POLL_SECONDS)
        self._end.set()

    def _has_unsent(self) -> bool:
        return any(
            isinstance(connection, ServerConnection)
            and connection.transport.get_write_buffer_size()
            for listener in self._listeners
            for connection in listener.server_state.connections
        )

    async def _watch(self, announce: Callable[[], None] | None) -> None:
        """Announce the server; drain it when it is asked to; end it when its engine is dead."""
        service = self._service
        while not self.is_listening:
            await asyncio.sleep(_POLL_SECONDS / 10)
        if announce is not None:
            with contextlib.suppress(OSError):  # who reads it may be gone
                announce()
        self._manager.ready()
        if self._serves_users:
            self._background = [
                asyncio.create_task(service.faults.run_background(owned))
                for owned in service.background
            ]
        while (dead := service.engine.dead_error) is None:
            service.follow_levels()
            if service.drain_asked and self._serves_users:  # else they are drained elsewhere
                self._drain("POST /drain")
            if not service.engine.is_running:
                service.paused = None  # an engine that was restarted is not paused
            self._manager.ping()
            await asyncio.sleep(_POLL_SECONDS)
        _log.error("the engine has ended, and so does the server: %s", dead)
        service.phase = ServerPhase.REFUSING
        service.traffic.closes = True
        self._code = ENGINE_DIED
        await asyncio.sleep(_LAST_ANSWERS_SECONDS)  # so that its requests are answered, with 503
        self._end.set()


def _raise_first(results: Sequence[BaseException | None]) -> None:
    """Raise the first error of listeners, if there is one.

    Raises:
        ConfigError: the address is another program's.
        BaseException: any other.
    """
    for result in results:
        if isinstance(result, OSError):
            raise ConfigError(f"server.port: it cannot listen: {result.strerror}") from None
        if result is not None:
            raise result


def begin_outliving(
    outliving: Outliving[int],
    task: asyncio.Task[int],
    engine: AsyncGenerator,
    applications: Applications,
) -> None:
    """Let a server go on from now on when a plugin stops its event loop."""
    outliving.begin(task, functools.partial(blame_stop, engine, applications.service.faults))


def loop_factory() -> Any:
    """Return the factory of servers' event loops; None is Python's own."""
    try:
        import uvloop  # noqa: PLC0415 - not for every system
    except ImportError:
        return None
    return uvloop.new_event_loop


def announce(service: Service, users: BoundAddress, admin: BoundAddress | None) -> None:
    """Print the addresses of a server, and on standard error whether anybody may use it."""
    with contextlib.suppress(OSError):  # the reader may have closed the pipe
        print(f"Serving {service.names[0]} at {users.url}", flush=True)
        if admin is not None:
            print(f"Serving administrators at {admin.url}", flush=True)
        if (warning := exposure(service, users)) is not None:
            print(f"hardpoint: warning: {warning}", file=sys.stderr, flush=True)


def exposure(service: Service, users: BoundAddress) -> str | None:
    """Return a warning if other machines can use the server without a key, otherwise None."""
    if service.has_keys or users.host is None or is_loopback(users.host):
        return None
    names = accepted_names(users.host, service.settings.allowed_hosts)
    accepted = "any" if "*" in names else ", ".join(sorted(names))
    return (
        "other machines can use this server without a key (--api-key or server.keys_file sets "
        f"one); accepted host names: {accepted} (--allowed-hosts or server.allowed_hosts)"
    )
