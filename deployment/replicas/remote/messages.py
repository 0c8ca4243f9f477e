"""The messages between a head and an engine that joins it.

A message is a list of frames: its kind, the session, and the rest. A session is the stay of one
engine under one rank: 16 random bytes that the head makes, so that what a former session sends
later is recognised.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import msgspec

from hardpoint.host.system.encoding.errors import MALFORMED, WireError, explain
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.grammars import Vocabulary

LINK_PROTOCOL = 3
"""Raised with every change of these messages."""

NO_SESSION = b""
WINDOW = 64
"""Data messages that may be under way in each direction."""
ACKNOWLEDGE_AFTER = 16
"""Data messages after which the receiver reports how many it has passed on."""
MOST_HELLO_BYTES = 1 << 16
MOST_NAME, MOST_TEXT = 255, 2000
"""Characters of a text of an engine that are shown."""


class MessageKind(bytes, Enum):
    """The first frame."""

    HELLO = b"H"
    """From an engine: a Hello."""
    WELCOME = b"W"
    """To an engine: a Welcome."""
    REFUSED = b"R"
    """To an engine: a JoinRefusal."""
    STARTED = b"S"
    """From an engine: its process id, once its process is started. The next is its READY."""
    DECLINED = b"N"
    """From an engine: why it does not start, as text."""
    DATA = b"D"
    """To an engine: a request or a call; from it: an output."""
    PIECE = b"P"
    """From an engine: the place of a frame in the next DATA, and a piece of that frame."""
    READY = b"I"
    """From an engine: its first message, which goes the way of requests."""
    BEAT = b"B"
    """Both ways: number of data messages that were passed on; from an engine, its activity too."""
    REPORT = b"F"
    """From an engine: a RemoteFailure."""
    ENDED = b"E"
    """From an engine: a ProcessEnd, the last message of a session."""
    LEAVE = b"L"
    """From an engine: its machine wants to end it; the head drains it, and then sends STOP."""
    STOP = b"X"
    """To an engine: end, in order."""
    KILL = b"K"
    """To an engine: end at once."""
    GONE = b"G"
    """To an engine: the session of its last message is over; nothing of it is used."""


class HelloVersion(msgspec.Struct, array_like=True, frozen=True):
    """The first field of the Hello of all versions."""

    protocol: int


class Hello(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Versions and model of an engine, which it sends before anything runs.

    Attributes:
        protocol: LINK_PROTOCOL.
        hardpoint, torch: versions.
        wire: version of the protocol of engine processes.
        contracts: version of each kind's contract.
        host: name of its machine.
        model: its model, as configured there.
        fingerprint: a digest of the model's files.
        processor: what computes there, as far as bits of results depend on it.
        rank: the rank that it asks for; None is any.
        former: the session that it had before, which is over.
    """

    protocol: int = LINK_PROTOCOL
    hardpoint: str
    torch: str
    wire: int
    contracts: dict[str, int]
    host: str
    model: str
    fingerprint: str
    processor: str = ""
    rank: int | None = None
    former: bytes = NO_SESSION


class Welcome(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The start parameters of an engine: data alone, no code.

    Attributes:
        rank: the engine's number.
        heartbeat_seconds: as `parallel.heartbeat_seconds`.
        manifest: the plugins; the engine compares each with its own.
        config: an EngineConfig as plain data.
        config_sources, log_level, vocabulary, reports_load, reports_cache: as in Launch.
    """

    rank: int
    heartbeat_seconds: float
    manifest: Manifest
    config: dict[str, Any]
    config_sources: dict[str, str]
    log_level: str
    vocabulary: Vocabulary | None
    reports_load: bool
    reports_cache: bool


class JoinRefusal(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Why an engine may not join.

    Attributes:
        reason: names both sides, where they differ.
        retry_seconds: for how long another attempt may succeed; 0 if none does.
    """

    reason: str
    retry_seconds: float = 0.0


class RemoteFailure(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The failure that the process of an engine has reported.

    Attributes:
        kind: name of the error's class.
        message: its text.
        notes: those of `add_note`.
    """

    kind: str
    message: str
    notes: list[str]


class ProcessEnd(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How the process of an engine ended.

    Attributes:
        description: as text.
        was_killed: whether something outside ended it.
        activity: what it did, as in a beat.
        is_orderly: whether it ended in order, so that an end marker follows its outputs.
    """

    description: str
    was_killed: bool
    activity: bytes = b""
    is_orderly: bool = False


T = TypeVar("T")


def printable(text: str, limit: int) -> str:
    """Return a text of another machine as one line of the log; the rest of a long one is cut."""
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(frame: bytes, type_: type[T]) -> T:
    """Return the message in a frame.

    Raises:
        WireError: it is malformed.
    """
    try:
        return msgspec.msgpack.decode(frame, type=type_)
    except MALFORMED as cause:
        raise WireError(explain(cause, type_)) from None


_KINDS = {bytes(kind): kind for kind in MessageKind}


def kind_of(frame: bytes) -> MessageKind | None:
    """Return the kind that a first frame names, None if there is none such."""
    return _KINDS.get(frame)


class Window:
    """Flow control of the data messages of one direction: a limited number is in flight.

    So neither side keeps more than that for the other one, and what is full at one end is full at
    the other.
    """

    def __init__(self) -> None:
        self.sent = self.acknowledged = 0
        self.received = self.passed_on = self._reported = 0

    @property
    def is_full(self) -> bool:
        """Whether no message may be sent now."""
        return self.sent - self.acknowledged >= WINDOW

    def acknowledge(self, passed_on: int) -> bool:
        """Note how many messages the other side has passed on; return whether that can be."""
        if not self.acknowledged <= passed_on <= self.sent:
            return False
        self.acknowledged = passed_on
        return True

    def receive(self) -> bool:
        """Count a message as received; return whether the other side might send it."""
        self.received += 1
        return self.received - self.passed_on <= 2 * WINDOW

    def is_acknowledgement_due(self) -> bool:
        """Return whether to report the passed messages now, and note that."""
        if self.passed_on - self._reported < ACKNOWLEDGE_AFTER:
            return False
        self._reported = self.passed_on
        return True
