"""The head's side of engines that join: one socket for all, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from hardpoint.errors import ConfigError
from hardpoint.host.system.encoding import WireError
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.process.zmq_resources import end_context

from .admission import Admission, Doorkeeper, Keys, key_of
from .connection_watch import INTERVAL_S, ConnectionWatch
from .joined_host import JoinedHost, Order
from .messages import (
    MOST_TEXT,
    MessageKind,
    ProcessEnd,
    RemoteFailure,
    Welcome,
    decode,
    encode,
    kind_of,
    printable,
)
from .pieces import MOST_FRAME_BYTES
from .polling import Source, readable
from .session import EngineSession, Frames

_log = logging.getLogger("hardpoint")

ANY_PORT = ":*"
_ANY_PORTS = (ANY_PORT, ":0")
"""End an address of which the system chooses the port."""

_HANDSHAKE_MS = 5000  # within which libzmq closes a connection that is not secured
_BACKLOG = 128
_SEND_HWM = 256
_RECEIVE_HWM = 128  # messages of a connection that are not read, most of them pieces
_START_S = 30.0  # for a welcomed engine to start its process
_INTERVAL_S = 1.0  # between two heartbeats, at most
_RETRY_S = 0.02
_MOST_AT_ONCE = 256  # messages that are read before others get a turn


class JoinListener:
    """Lets engines join, and passes messages on between them and their clients.

    Attributes:
        address: where engines join.
        leave: called with the rank of an engine that its machine wants to end, in the thread.
    """

    # All but `order` and `close` runs in the thread. An engine is gone once its session is not in
    # `_sessions`: whatever it sends later is answered with GONE, and dropped.

    def __init__(self, parallel: ParallelConfig, keys: Keys | None, admission: Admission) -> None:
        """Bind the address and start the thread.

        Args:
            keys: whose owners may join; None is everybody.

        Raises:
            ConfigError: the address cannot be bound.
        """
        assert parallel.join_address is not None
        self.address = parallel.join_address
        self.leave: Callable[[int], None] = _ignore
        self._limit_s = parallel.heartbeat_seconds
        self._interval_s = min(self._limit_s / 5, _INTERVAL_S)
        self._admission = admission
        self._context = zmq.Context(io_threads=1)
        self._door = None if keys is None else Doorkeeper(self._context, keys, admission.refused)
        self._router = self._context.socket(zmq.ROUTER)
        self._watch = ConnectionWatch(self._router, admission)
        try:
            self._bind(keys)
        except zmq.ZMQError as cause:
            self._close_router(0)
            if self._door is not None:
                self._door.stop()
            self._context.destroy(0)
            raise ConfigError(
                f"parallel.join_address: {self.address} cannot be used: "
                f"{zmq.strerror(cause.errno or 0)}"
            ) from None
        self._sessions: dict[bytes, EngineSession] = {}  # by routing id
        self._orders: queue.SimpleQueue[tuple[Order, JoinedHost]] = queue.SimpleQueue()
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="EngineJoins", daemon=True)
        self._thread.start()
        _log.info("engines may join at %s%s", self.address, "" if keys else ", without keys")

    def _bind(self, keys: Keys | None) -> None:
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MOST_FRAME_BYTES),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.BACKLOG, _BACKLOG),
            (zmq.SNDHWM, _SEND_HWM),
            (zmq.RCVHWM, _RECEIVE_HWM),
            (zmq.IPV6, int("[" in self.address)),
        ):
            self._router.setsockopt(option, value)
        if keys is not None:
            self._router.curve_publickey, self._router.curve_secretkey, _ = keys.pair
            self._router.curve_server = True
        self._router.bind(self.address)
        if self.address.endswith(_ANY_PORTS):
            self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def order(self, order: Order, host: JoinedHost) -> None:
        """Do something for a host. In any thread."""
        if self._is_closed.is_set():
            return
        self._orders.put((order, host))
        with contextlib.suppress(OSError):
            self._theirs.send(b"!")

    def close(self) -> None:
        """End all sessions, and stop listening."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        with contextlib.suppress(BlockingIOError):
            self._theirs.send(b"!")
        self._thread.join()
        if self._door is not None:
            self._door.stop()
        self._ours.close()
        self._theirs.close()
        end_context(self._context, f"the sockets at {self.address}")

    # The thread

    def _run(self) -> None:
        next_beat = time.monotonic()
        while not self._is_closed.is_set():
            try:
                if (now := time.monotonic()) >= next_beat:
                    next_beat = now + self._interval_s
                    self._beat(now)
                self._watch.cut_flooding(now)
                self._turn(min(max(next_beat - time.monotonic(), 0.0), INTERVAL_S))
            except Exception:  # of one message; the other engines go on
                _log.exception("a message of an engine that joined failed")
        for session in list(self._sessions.values()):
            self._send(session, MessageKind.STOP)
            self._end(session, "was left by its head")
        self._close_router(int(self._interval_s * 1000))

    def _close_router(self, linger_ms: int) -> None:
        self._watch.close()
        self._router.close(linger_ms)

    def _turn(self, wait_s: float) -> None:
        sources: list[Source] = [self._router, self._watch.events, self._ours.fileno()]
        sessions = list(self._sessions.values())
        cut = [session for session in sessions if session.is_cut]
        for session in sessions:
            if not session.flush() or session.held is not None:
                wait_s = min(wait_s, _RETRY_S)
            if session.to_engine and session.takes_requests:
                sources.append(session.to_engine)
        ready = readable(sources, wait_s)
        if self._ours.fileno() in ready:
            self._obey()
        if self._watch.events in ready:
            self._watch.read_events()
        is_all_read = self._router not in ready or self._read()
        for session in sessions:
            if session.held is not None or session.to_engine in ready:
                self._forward(session)
            if session.end is None and session in cut and is_all_read:
                self._lose(session, "has lost its connection")
            elif session.end is not None and session.flush():
                self._end(session)

    def _read(self) -> bool:
        """Read messages of engines; return whether none are left."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_MOST_AT_ONCE):
                self._receive(self._router.recv_multipart(zmq.NOBLOCK, copy=False))
            return False
        return True

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass
        with contextlib.suppress(queue.Empty):
            while True:
                order, host = self._orders.get_nowait()
                session = self._session_of(host)
                match order:
                    case "offer":
                        self._admission.offer(host)
                    case "drop":
                        self._admission.withdraw(host)
                        if session is not None:
                            self._reply(session.routing, MessageKind.GONE, session.id)
                            self._end(session, "was closed")
                        host.release()
                    case "stop" | "kill" if session is not None:
                        self._send(
                            session, MessageKind.STOP if order == "stop" else MessageKind.KILL
                        )

    def _session_of(self, host: JoinedHost) -> EngineSession | None:
        return next((session for session in self._sessions.values() if session.host is host), None)

    # Messages of engines

    def _receive(self, frames: Frames) -> None:
        routing, kind = frames[0].bytes, kind_of(frames[1].bytes) if len(frames) > 2 else None
        session = self._sessions.get(routing)
        self._watch.message_read(frames[1], has_session=session is not None)
        if session is None:
            if kind is MessageKind.HELLO and len(frames) == 4:
                self._hello(routing, frames[3])
            else:
                self._admission.refused("a message without a session")
                if kind is not None and len(frames[2]) == 16:
                    self._reply(routing, MessageKind.GONE, frames[2].bytes)
            return
        if len(frames) < 3 or frames[2].bytes != session.id:
            self._lose(session, "sent a malformed message")
            return
        session.received_at = time.monotonic()
        try:
            session.count()
            self._handle(session, kind, frames[3:])
        except (WireError, ValueError) as error:
            self._lose(session, f"sent a malformed message: {error}")

    def _handle(self, session: EngineSession, kind: MessageKind | None, frames: Frames) -> None:
        """Handle a message of a session.

        Raises:
            WireError, ValueError: it is malformed.
        """
        match kind, len(frames):
            case MessageKind.DATA, count if (
                count and session.is_started and session.window.receive()
            ):
                session.output(frames)
                if session.window.is_acknowledgement_due():
                    self._send_beat(session)
            case MessageKind.BEAT, 2:
                if not session.window.acknowledge(decode(frames[0].bytes, int)):
                    raise WireError("it acknowledges more than was sent")
                if session.is_started and len(frames[1]):
                    session.host.record(frames[1].bytes)
            case MessageKind.PIECE, 2 if session.is_started:
                session.piece(frames[0].bytes, frames[1].bytes)
            case MessageKind.READY, count if count and session.is_started and not session.is_ready:
                session.ready(frames)
                self._admission.serves(session.hello)
            case (MessageKind.LEAVE, 0) | ((MessageKind.REPORT | MessageKind.ENDED), 1) if (
                session.is_started
            ):
                self._ends(session, kind, frames)
            case ((MessageKind.STARTED | MessageKind.DECLINED), 1) if not session.is_started:
                self._answered(session, kind, frames[0].bytes)
            case _:
                raise WireError("its kind is unknown, or does not belong there")

    def _ends(self, session: EngineSession, kind: MessageKind | None, frames: Frames) -> None:
        if kind is MessageKind.LEAVE:
            if not session.is_leaving:
                session.is_leaving = True
                self.leave(session.host.rank)
        elif kind is MessageKind.REPORT:
            if session.host.reported:
                raise WireError("a second report")
            session.host.failed(decode(frames[0].bytes, RemoteFailure))
        else:
            end = decode(frames[0].bytes, ProcessEnd)
            session.host.ends(end)
            session.end = end

    def _answered(self, session: EngineSession, kind: MessageKind, frame: bytes) -> None:
        if kind is MessageKind.DECLINED:
            reason = printable(decode(frame, str), MOST_TEXT)
            _log.warning("an engine on %s does not join: %s", session.where, reason)
            self._return(session)
            return
        pid = decode(frame, int)
        session.connect(self._context)
        session.host.started(pid, session.where)
        _log.info("engine %d joined: pid %d on %s", session.host.rank, pid, session.where)

    def _hello(self, routing: bytes, frame: zmq.Frame) -> None:
        key, name = b"", ""
        if self._door is not None:
            key = key_of(frame)
            if key not in (names := self._door.names()):  # it was, when the connection was made
                self._admission.refused("a key that was revoked")
                self._watch.cut(frame)
                return
            name = names[key]
        hello, refusal = self._admission.read(frame.bytes)
        if hello is not None and hello.former:
            for session in list(self._sessions.values()):
                if session.id == hello.former and session.key == key:
                    self._lose(session, "has lost its connection, and joins again")
            self._obey()
        host = None
        if hello is not None and refusal is None:
            host, refusal = self._admission.choose(hello, self._sessions.values())
        if hello is None or host is None:
            if refusal is not None:
                self._reply(routing, MessageKind.REFUSED, b"", encode(refusal))
            return
        session = self._sessions[routing] = EngineSession(host, routing, hello, key, name)
        launch = host.launch_message
        welcome = Welcome(
            rank=host.rank,
            heartbeat_seconds=self._limit_s,
            manifest=launch.manifest,
            config=launch.config,
            config_sources=launch.config_sources,
            log_level=launch.log_level,
            vocabulary=launch.vocabulary,
            reports_load=launch.reports_load,
            reports_cache=launch.reports_cache,
        )
        self._send(session, MessageKind.WELCOME, encode(welcome))

    # Messages to engines

    def _forward(self, session: EngineSession) -> None:
        """Pass on requests of the client, as far as the connection and the window allow."""
        is_current = self._sessions.get(session.routing) is session
        while is_current and session.to_engine is not None and not session.window.is_full:
            if session.held is None:
                try:
                    session.held = session.to_engine.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return
            header = [session.routing, MessageKind.DATA, session.id]
            try:
                self._router.send_multipart([*header, *session.held], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except zmq.ZMQError:
                session.is_cut = True
                return
            session.held = None
            session.window.sent += 1

    def _send(self, session: EngineSession, kind: MessageKind, *frames: bytes) -> None:
        if not self._reply(session.routing, kind, session.id, *frames):
            session.is_cut = True

    def _reply(self, routing: bytes, kind: MessageKind, *frames: bytes) -> bool:
        """Send a message; return whether the connection is there, which may be full."""
        try:
            self._router.send_multipart([routing, kind, *frames], zmq.NOBLOCK)
        except zmq.Again:
            pass
        except zmq.ZMQError:
            return False
        return True

    # Sessions

    def _beat(self, now: float) -> None:
        """Send each engine a heartbeat; end the sessions of engines that send none."""
        names = None if self._door is None else self._door.names()
        for session in list(self._sessions.values()):
            if names is not None and session.key not in names:
                self._lose(session, f"had the key {session.name}, which was revoked")
            elif now - session.received_at > self._limit_s:
                limit = f"{self._limit_s:g} s (parallel.heartbeat_seconds)"
                self._lose(session, f"sent nothing for {limit}")
            elif not session.is_started and now - session.began > _START_S:
                self._return(session)
            else:
                self._send_beat(session)
        self._admission.log_refused(now)

    def _send_beat(self, session: EngineSession) -> None:
        self._send(session, MessageKind.BEAT, msgspec.msgpack.encode(session.window.passed_on))

    def _lose(self, session: EngineSession, why: str) -> None:
        if self._sessions.get(session.routing) is not session:
            return
        self._reply(session.routing, MessageKind.GONE, session.id)
        if session.is_started:
            self._end(session, why)
        else:
            self._return(session)

    def _return(self, session: EngineSession) -> None:
        """End the session of an engine that was not started; another one may take its place."""
        if self._sessions.pop(session.routing, None) is not None:
            self._reply(session.routing, MessageKind.GONE, session.id)
            self._admission.offer(session.host)

    def _end(self, session: EngineSession, why: str = "") -> None:
        """End a session as its engine has reported, or because the head has lost or left it."""
        if self._sessions.get(session.routing) is not session:
            return
        del self._sessions[session.routing]
        end = session.end or ProcessEnd(description=why, was_killed=True)
        session.host.ended(end.description, was_killed=end.was_killed)
        session.close()


def _ignore(rank: int) -> None:
    """Let an engine go before the head is open."""
