"""The engine's side of a session: its process, and the messages between it and the head."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from hardpoint.host.boundary.activity import FILE_NAME, Activity
from hardpoint.host.boundary.errors import kind_of as error_kind_of
from hardpoint.host.system.encoding import MOST_BYTES, Decoder, Encoder
from hardpoint.plugins import EngineConfig, HardpointError
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.process.child_processes.launch import Interpreter
from hardpoint.process.engine_process import EngineProcess
from hardpoint.process.launch import Launch
from hardpoint.process.protocol import (
    END_MARKERS,
    EngineAddresses,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from hardpoint.process.zmq_resources import SOCKET_NAMES, make_socket_folder

from .comparison import check_manifest
from .connection import HeadConnection
from .messages import (
    MessageKind,
    ProcessEnd,
    RemoteFailure,
    Welcome,
    Window,
    decode,
    encode,
    kind_of,
)
from .pieces import split
from .polling import Source, readable
from .session import Frames

_RETRY_MS = 20  # also how often it is checked whether a process has ended that is about to
_MOST_ACTIVITY_BYTES = 1 << 20
_LEAVE_S = 5.0  # for the head to end an engine, besides the time for its requests
_REPORTED_S = 10.0  # for a process that has reported its failure to end
_LINGER_MS = 1000
_DRAIN_S = 1.0  # for the rest of its outputs
_SEND_HWM = 256


def launch_of(
    welcome: Welcome, local_config: EngineConfig, address: str, folder: Path, num_sharing: int = 1
) -> Launch:
    """Return the launch of the engine that a head asks for.

    What belongs to the machine is from its own configuration, the rest is the head's.

    Raises:
        msgspec.ValidationError: the configuration is malformed.
    """
    theirs = msgspec.convert(welcome.config, EngineConfig)
    replace = msgspec.structs.replace
    config = replace(
        theirs,
        model=local_config.model,
        device=local_config.device,
        executor=replace(theirs.executor, threads=local_config.executor.threads),
        engine=replace(theirs.engine, profile_dir=local_config.engine.profile_dir),
        tokenizer=local_config.tokenizer,
        weight_cache=local_config.weight_cache,
        parallel=replace(
            theirs.parallel,
            data=1,
            local=None,
            join_address=None,
            join_address_file=None,
            keys=None,
            ray=None,
        ),
    )
    return Launch(
        address=address,
        manifest=welcome.manifest,
        config=msgspec.to_builtins(config),
        config_sources=welcome.config_sources,
        log_level=welcome.log_level,
        engine_index=welcome.rank,
        num_sharing=num_sharing,
        vocabulary=welcome.vocabulary,
        reports_load=welcome.reports_load,
        reports_cache=welcome.reports_cache,
        folder=str(folder),
    )


class EngineLink:
    """Runs an engine process for a head, as long as both are there. For one thread.

    To the process it is its client.

    Attributes:
        why_over: why it has ended.
        was_stopped: whether a signal has ended it.
        has_sent_end: whether its last message was sent, so that the head ends the session.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connection: HeadConnection,
        session: bytes,
        welcome: Welcome,
        num_sharing: int = 1,
    ) -> None:
        """`num_sharing`: engines among which the memory of this machine is divided."""
        self._context, self._connection = context, connection
        self._session, self._welcome, self._num_sharing = session, welcome, num_sharing
        self._identity = welcome.rank.to_bytes(2, "little")
        self._window = Window()
        self._requests: deque[Frames] = deque()
        self._received_at = time.monotonic()
        self._is_over = False
        self._ending_since: float | None = None
        self._leave_until: float | None = None
        self._is_ready = False
        self._reported = self._has_all_outputs = False
        self._encoder = Encoder()
        self._calls: Decoder[UtilityCall] = Decoder(UtilityCall)
        self.why_over = ""
        self.was_stopped = self.has_sent_end = False

    def run(self, config: EngineConfig, manifest: Manifest | None, head: str, stop: int) -> None:
        """Start the engine and serve until it, or the head, is gone, or `stop` is readable.

        Args:
            config: the configuration of this machine.
            manifest: the plugins that are enabled here; others are refused. None refuses none.
            head: names the head in messages.
            stop: a descriptor; then the head is asked to let the engine go, which ends once the
                head has done so or its time is up, the second time at once.

        Raises:
            HardpointError: the engine process cannot be started.
        """
        self._manifest, self._head = manifest, head
        with contextlib.ExitStack() as undo:
            folder = make_socket_folder()
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            self._input, input_address = self._bind(zmq.ROUTER, folder, SOCKET_NAMES[0])
            undo.callback(self._input.close, 0)
            self._output, output_address = self._bind(zmq.PULL, folder, SOCKET_NAMES[1])
            undo.callback(self._output.close, 0)
            addresses = EngineAddresses(inputs=[input_address], outputs=[output_address])
            address = msgspec.json.encode(addresses).decode()
            launch = launch_of(self._welcome, config, address, folder, self._num_sharing)
            theirs = msgspec.convert(self._welcome.config, EngineConfig)
            self._drain_seconds = theirs.engine.drain_seconds
            activity = Activity.create(folder)
            undo.callback(activity.close)
            # A process that ends removes the folder.
            self._activity_file = undo.enter_context((folder / FILE_NAME).open("rb"))
            self._process = EngineProcess.spawn(Interpreter.current())
            undo.callback(self._process.close)
            self._process.activity = activity
            self._process.launch(launch)
            self._send(MessageKind.STARTED, msgspec.msgpack.encode(self._process.pid))
            self._serve(stop)

    def _bind(self, kind: int, folder: Path, name: str) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        address = f"ipc://{folder / name}"
        socket.bind(address)
        return socket, address

    def _serve(self, stop: int) -> None:
        limit_s = self._welcome.heartbeat_seconds
        interval_s = min(limit_s / 5, 1.0)
        next_beat = time.monotonic() + interval_s
        while not self._is_over:
            self._turn(stop, max(next_beat - time.monotonic(), 0.0))
            now = time.monotonic()
            if now - self._received_at > limit_s:
                self._over(f"the head sent nothing for {limit_s:g} s (parallel.heartbeat_seconds)")
            elif now >= next_beat:
                next_beat = now + interval_s
                self._send_beat()
                if self._leave_until is not None:
                    self._leave(now > self._leave_until)

    def _turn(self, stop: int, wait_s: float) -> None:
        link, events = self._connection.socket, self._connection.events
        sources: list[Source] = [link, events, self._input, stop]
        if self._requests:
            wait_s = min(wait_s, _RETRY_MS / 1000)
        if not self._window.is_full:
            sources.append(self._output)
        if self._ending_since is None:
            sources += self._process.sentinels
        else:
            wait_s = min(wait_s, _RETRY_MS / 1000)
        ready = readable(sources, wait_s)
        if link in ready:
            self._read_link()
        if self._input in ready:
            _identity, *frames = self._input.recv_multipart(copy=False)
            self._is_ready = True
            self._send(MessageKind.READY, *[frame.bytes for frame in frames])
        self._pass_requests()
        if self._output in ready:
            self._pass_outputs()
        if events in ready and self._connection.is_cut():
            self._over("the connection was cut")
        if stop in ready:
            self._stop(stop)
        if self._ending_since is not None or any(
            sentinel in ready for sentinel in self._process.sentinels
        ):
            self._end_process()

    # From the head

    def _read_link(self) -> None:
        with contextlib.suppress(zmq.Again):
            while not self._is_over:
                frames = self._connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                self._received_at = time.monotonic()
                if len(frames) < 2 or frames[1].bytes != self._session:
                    continue  # of a session before
                self._handle(kind_of(frames[0].bytes), frames[2:])

    def _handle(self, kind: MessageKind | None, frames: Frames) -> None:
        match kind, len(frames):
            case MessageKind.DATA, count if count and self._window.receive():
                if self._is_allowed(frames):
                    self._requests.append(frames)
                else:
                    self._window.passed_on += 1
            case MessageKind.BEAT, 1:
                self._window.acknowledge(decode(frames[0].bytes, int))
            case MessageKind.STOP, 0:
                self._process.close()
                self._finish()
            case MessageKind.KILL, 0:
                self._process.kill()
            case MessageKind.GONE, 0:
                self._over("the head has given the engine up")

    def _is_allowed(self, frames: Frames) -> bool:
        """Return whether the process may have a message; else answer it.

        A call with plugins is the one way to load code: they must be enabled here.
        """
        if self._manifest is None or frames[0].bytes != RequestType.UTILITY:
            return True
        call = self._calls.decode([frame.buffer for frame in frames[1:]])
        if call.method != "live_change" or call.args[1:] in ([], [None]):
            return True
        try:
            manifest = msgspec.convert(call.args[1]["manifest"], Manifest)
            check_manifest(manifest, self._manifest, self._head)
        except (HardpointError, msgspec.ValidationError, LookupError, TypeError) as error:
            refused = UtilityOutput.failed(call.call_id, str(error), error_kind_of(error))
            self._send_data([zmq.Frame(bytes(frame)) for frame in self._encoder.encode(refused)])
            self._window.sent += 1
            return False
        return True

    def _pass_requests(self) -> None:
        while self._requests:
            try:
                self._input.send_multipart(
                    [self._identity, *self._requests[0]], zmq.NOBLOCK, copy=False
                )
            except zmq.Again:
                return
            except zmq.ZMQError:  # the process has ended, or has not connected yet
                if self._ending_since is None and not self._process.has_ended:
                    return
            self._requests.popleft()
            self._window.passed_on += 1
            if self._window.is_acknowledgement_due():
                self._send_beat(with_activity=False)

    # To the head

    def _pass_outputs(self) -> int:
        """Pass on outputs, as far as the window allows; return how many."""
        count = 0
        while not self._window.is_full and not self._is_over:
            try:
                frames = self._output.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._has_all_outputs = frames[0].bytes in END_MARKERS
            self._send_data(frames)
            self._window.sent += 1
            count += 1
        return count

    def _send_data(self, frames: Sequence[zmq.Frame]) -> None:
        send = self._connection.socket.send_multipart

        def send_piece(index: bytes, piece: memoryview) -> None:
            send([MessageKind.PIECE, self._session, index, piece])

        send([MessageKind.DATA, self._session, *split(frames, send_piece)], copy=False)

    def _send_beat(self, *, with_activity: bool = True) -> None:
        packed = self._packed_activity() if with_activity else b""
        self._send(MessageKind.BEAT, msgspec.msgpack.encode(self._window.passed_on), packed)

    def _packed_activity(self) -> bytes:
        return zlib.compress(os.pread(self._activity_file.fileno(), _MOST_ACTIVITY_BYTES, 0), 1)

    def _send(self, kind: MessageKind, *frames: bytes) -> bool:
        """Send a message; return False if the connection is full or cut."""
        try:
            self._connection.socket.send_multipart([kind, self._session, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # Ends

    def _stop(self, stop: int) -> None:
        self.was_stopped = True
        for _ in os.read(stop, 64):
            if self._leave_until is None and self._ending_since is None:
                self._leave_until = time.monotonic() + self._drain_seconds + _LEAVE_S
                self._leave(is_late=not self._is_ready)
            else:
                self._ending_since = self._ending_since or time.monotonic()
                self._process.close(0)

    def _leave(self, is_late: bool) -> None:
        """Ask the head to let the engine go, again if that was lost; end it here if it is late."""
        if not is_late:
            self._send(MessageKind.LEAVE)
        elif self._ending_since is None:
            self._ending_since = time.monotonic()
            self._process.terminate()

    def _end_process(self) -> None:
        self._ending_since = self._ending_since or time.monotonic()
        if not self._reported:
            failure = self._process.failure()
            if self._process.reported and failure is not None:
                self._reported = True
                notes = list(getattr(failure, "__notes__", ()))
                report = RemoteFailure(
                    kind=error_kind_of(failure), message=str(failure), notes=notes
                )
                self._send(MessageKind.REPORT, encode(report))
        if self._process.has_ended:
            self._finish()
        elif self._reported and time.monotonic() - self._ending_since > _REPORTED_S:
            self._process.close(0)

    def _finish(self) -> None:
        process, deadline = self._process, time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline and not self._is_over:
            if self._window.is_full:
                if self._connection.socket.poll(_RETRY_MS):
                    self._read_link()
            elif self._pass_outputs() or self._output.poll(_RETRY_MS):
                continue
            elif self._has_all_outputs or not process.sends_end_marker:
                break
        ended = ProcessEnd(
            description=process.description.removeprefix(f"the {process.label} "),
            was_killed=process.was_killed or process.returncode == 0,
            activity=self._packed_activity(),
            is_orderly=process.returncode == 0,
        )
        self._connection.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.has_sent_end = self._send(MessageKind.ENDED, encode(ended))
        self._over(f"the {process.label} {ended.description}")

    def _over(self, why: str) -> None:
        self._is_over, self.why_over = True, self.why_over or why
