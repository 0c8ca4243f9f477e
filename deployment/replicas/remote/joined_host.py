"""An engine that has joined, or is to join, as its client sees it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.host.boundary.activity import FILE_NAME, Activity
from hardpoint.host.boundary.errors import error_of
from hardpoint.plugins import HardpointError
from hardpoint.process.child_processes.launch import ChildLaunch
from hardpoint.process.launch import Launch

from .messages import MOST_TEXT, ProcessEnd, RemoteFailure, printable

_GRACE_S = 5.0
_MOST_NOTES, _MOST_NOTE = 10, 20_000  # notes of a failure, and characters of one
_NETWORK_S = 1.0  # for messages there and back, besides

Order = Literal["offer", "stop", "kill", "drop"]
"""What the listener is to do for a host: offer its rank to engines, end the engine in order or at
once, or forget it."""


class JoinedHost:
    """The place of one engine that joins; an `EngineHost`.

    Clients call it from any thread. The listener calls the methods of its second half, in its own.

    Attributes:
        rank: number of the engine.
        activity: what the engine does, as of its last report.
    """

    activity: Activity | None = None
    is_remote = True

    def __init__(
        self,
        order: Callable[[Order, JoinedHost], None],
        rank: int,
        address: str,
        limit_s: float,
    ) -> None:
        """Wait for no engine yet.

        Args:
            order: gives the listener an order.
            address: where engines join, for messages.
            limit_s: how long `launch` waits for one.
        """
        self.rank = rank
        self._order, self._address, self._limit_s = order, address, limit_s
        self._launch: Launch | None = None
        self._changed = threading.Condition()
        self._joined = self._is_closed = False
        self._pid, self._label = 0, f"engine {rank}, which has not joined"
        self._refusal: HardpointError | None = None
        self._end: EngineDeadError | None = None
        self._report: HardpointError | None = None
        self._killed = self._is_orderly = False
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)

    @property
    def pid(self) -> int:
        """Its process id, on its machine."""
        return self._pid

    @property
    def label(self) -> str:
        """Its name, for messages."""
        return self._label

    @property
    def sentinels(self) -> list[int]:
        """A descriptor that becomes readable when `failure` may return an error."""
        return [self._ours.fileno()]

    @property
    def has_ended(self) -> bool:
        """Whether nothing comes of the engine any more."""
        return self._end is not None

    @property
    def reported(self) -> bool:
        """Whether it has reported its failure."""
        return self._report is not None

    @property
    def sends_end_marker(self) -> bool:
        """Whether an end marker follows its outputs: it reported a failure, or ended in order."""
        return self.reported or self._is_orderly

    @property
    def was_killed(self) -> bool:
        """Whether something outside ended it: a signal, or the connection."""
        return self._killed

    @property
    def launch_message(self) -> Launch:
        """The launch, for the listener."""
        assert self._launch is not None
        return self._launch

    def launch(self, launch: ChildLaunch) -> None:
        """Wait for an engine, and let it start.

        Raises:
            EngineDeadError: none has joined within the limit.
            EngineClosedError: `close` was called.
            HardpointError: the one of `refuse`.
        """
        assert isinstance(launch, Launch)
        self._launch = launch
        self._order("offer", self)
        with self._changed:
            self._changed.wait_for(
                lambda: self._joined or self._is_closed or self._refusal, self._limit_s
            )
            if self._is_closed:
                raise EngineClosedError("the engine was closed while it was waited for")
            if self._refusal is not None:
                raise self._refusal
            if not self._joined:
                raise EngineDeadError(
                    f"no engine has joined at {self._address} within {self._limit_s:g} s "
                    "(parallel.join_seconds)"
                )

    def failure(self) -> HardpointError | None:
        """Return the failure that it reported, or how it ended; None while it serves."""
        return self._report or self._end

    def refuse(self, error: HardpointError) -> None:
        """Let `launch` raise an error, unless the engine has joined."""
        with self._changed:
            if not self._joined:
                self._refusal = error
                self._changed.notify_all()

    def kill(self) -> None:
        """End the engine at once."""
        self._order("kill", self)

    def close(self, grace_s: float = _GRACE_S) -> None:
        """End the engine, and wait for that; or wait for none any more."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            if self._joined and self._end is None:
                self._order("stop", self)
                self._changed.wait_for(lambda: self._end is not None, grace_s + _NETWORK_S)
        self._order("drop", self)

    def release(self) -> None:
        """Close the descriptors, after the listener has dropped it."""
        self._ours.close()
        self._theirs.close()

    # Reports of the listener

    def started(self, pid: int, where: str) -> None:
        """Note that an engine has joined, and its process is started."""
        with self._changed:
            self._pid, self._label = pid, f"joined engine process (pid {pid} on {where})"
            self._joined = True
            self._changed.notify_all()

    def record(self, packed: bytes) -> None:
        """Keep the engine's activity for its client to read.

        Raises:
            ValueError: it is malformed.
        """
        path = Path(self.launch_message.folder) / FILE_NAME
        try:
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                unpacked = zlib.decompressobj().decompress(packed, size)
                if len(unpacked) != size:
                    raise ValueError(f"activity: expected {size} bytes, got {len(unpacked)}")
                file.write(unpacked)
        except zlib.error as cause:
            raise ValueError(f"activity: {cause}") from None
        except FileNotFoundError:  # its client was closed
            pass

    def failed(self, report: RemoteFailure) -> None:
        """Note the failure that it has reported."""
        error = error_of(report.kind, printable(report.message, MOST_TEXT))
        for note in report.notes[:_MOST_NOTES]:
            lines = note[:_MOST_NOTE].splitlines()
            error.add_note("\n".join(printable(line, MOST_TEXT) for line in lines))
        self._report = error
        self._notify()

    def ends(self, end: ProcessEnd) -> None:
        """Keep what is known of its end, before its last outputs are passed on.

        Raises:
            ValueError: as `record`.
        """
        self._is_orderly = end.is_orderly
        self.record(end.activity)

    def ended(self, description: str, *, was_killed: bool) -> None:
        """Note how it ended; only the first end counts."""
        with self._changed:
            if self._end is not None:
                return
            self._killed = was_killed
            self._end = EngineDeadError(f"the {self._label} {printable(description, MOST_TEXT)}")
            self._changed.notify_all()
        self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of bytes that were not read
            self._theirs.send(b"!")
