"""The Ray actor that runs an engine, and its start parameters."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

import msgspec

from hardpoint.host.boundary.errors import kind_of
from hardpoint.plugins import EngineConfig, HardpointError
from hardpoint.replicas.remote.comparison import hello_of
from hardpoint.replicas.remote.joining import Joining
from hardpoint.replicas.remote.messages import RemoteFailure, encode
from hardpoint.toolkit.curve_keys import KeyPair


class ActorLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of an actor.

    Attributes:
        address: where the program listens that has started it.
        keys: its own pair, and the public key of that program.
        rank: number of the engine.
        node: the actor's node, for messages.
        config: an EngineConfig as plain data.
        num_sharing: engines of this node among which its memory is divided.
    """

    address: str
    keys: KeyPair
    rank: int
    node: str
    config: dict[str, Any]
    num_sharing: int


class EngineActor:
    """Runs one engine, in a process that it starts."""

    def __init__(self) -> None:
        # Ray repeats what an actor writes to stdout on the program's own, where answers may be.
        sys.stdout = sys.stderr
        with contextlib.suppress(OSError):
            os.dup2(2, 1)

    def run(self, launch: bytes) -> bytes:
        """Run the engine of an encoded ActorLaunch until it ends, or its program is gone.

        Returns:
            Nothing, or the RemoteFailure of an error for which it has not joined.
        """
        actor_launch = msgspec.msgpack.decode(launch, type=ActorLaunch)
        # Nothing is sent: the program lets the engine end, or kills the actor.
        stop, other = socket.socketpair()
        try:
            config = msgspec.convert(actor_launch.config, EngineConfig)
            hello = msgspec.structs.replace(
                hello_of(config), rank=actor_launch.rank, host=actor_launch.node
            )
            # The program runs its own code here anyway, so that its plugins are not compared with
            # a list of this node; the engine compares versions when it loads them.
            joining = Joining(
                config,
                None,
                actor_launch.address,
                actor_launch.keys,
                hello,
                stop.fileno(),
                actor_launch.num_sharing,
            )
            with contextlib.closing(joining):
                joining.run()
        except HardpointError as error:
            notes = list(getattr(error, "__notes__", ()))
            message = str(error).removeprefix("--join: ")  # no such option was given here
            return encode(RemoteFailure(kind=kind_of(error), message=message, notes=notes))
        finally:
            stop.close()
            other.close()
        return b""
