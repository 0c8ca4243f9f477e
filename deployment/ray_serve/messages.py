"""Messages between ingress and engines, in Serve's calls.

Requests, outputs, reports and answers are frames of the engine's own protocol, as an engine process
has them; the rest are the dataclasses here, which Ray pickles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from hardpoint.host.boundary.activity import PluginCall
from hardpoint.host.boundary.errors import error_of
from hardpoint.host.system.encoding import Decoder, Encoder
from hardpoint.plugins import HardpointError
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.process.protocol import EngineCoreReadyResponse

T = TypeVar("T")

Frames = list[bytes]


@dataclass(frozen=True)
class EngineLaunch:
    """Parameters of an engine.

    Attributes:
        version: version of Hardpoint, which is the same at both ends.
        config: an EngineConfig as plain data.
        config_sources: by dotted path, where its values came from.
        rank: number of the engine.
        manifest, log_level, vocabulary, reports_cache: as of EngineStart.
    """

    version: str
    config: dict[str, Any]
    config_sources: dict[str, str]
    manifest: Manifest
    log_level: str
    rank: int
    vocabulary: Vocabulary | None
    reports_cache: bool


@dataclass(frozen=True)
class EngineOpened:
    """An engine that is ready.

    Attributes:
        ready: its ready response.
        pid: its process id, on its node.
    """

    ready: EngineCoreReadyResponse
    pid: int


@dataclass(frozen=True)
class Failed:
    """An error of Hardpoint's tree instead of an answer."""

    kind: str
    message: str

    def error(self) -> HardpointError:
        """Return the error."""
        return error_of(self.kind, self.message)


@dataclass(frozen=True)
class EngineDeath:
    """The end of an engine, after its last outputs.

    Attributes:
        reason: the error.
        in_step: ids of the requests of the step in which it died; None is all.
        call: the plugin method that ran.
        was_killed: whether something outside ended it.
    """

    reason: Failed
    in_step: frozenset[str] | None
    call: PluginCall | None
    was_killed: bool


def encoded(message: Any) -> Frames:
    """Return a message as frames that own their memory.

    Raises:
        WireError: it cannot be encoded.
    """
    return [bytes(frame) for frame in Encoder().encode(message)]


def decoded(frames: Frames, type_: type[T]) -> T:
    """Return the message of frames.

    Raises:
        WireError: it is none of the type.
    """
    message: T = Decoder(type_).decode(frames)
    return message
