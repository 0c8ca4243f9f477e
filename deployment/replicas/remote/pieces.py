"""Large frames in pieces, so that the head's socket accepts small messages alone.

libzmq allocates the length that a peer announces, also before the peer has proved its key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from hardpoint.host.system.encoding import WireError

PIECE_BYTES = 1 << 20
"""Length of a piece; frames up to this length are sent whole."""
MOST_FRAME_BYTES = PIECE_BYTES + 4096
"""The longest frame that a head accepts."""
_MOST_WHOLE_BYTES, _SHORT_BYTES = 32 << 20, 1 << 16
"""Once a message has so many bytes in whole frames, only short frames are sent whole."""
MOST_MESSAGE_BYTES = 1 << 30
"""Bytes of an engine's messages that a head holds: pieces, and outputs that are not read yet."""
_INDEX_BYTES = 2


def split(
    frames: Sequence[zmq.Frame], send_piece: Callable[[bytes, memoryview], None]
) -> list[zmq.Frame | bytes]:
    """Send the large frames in pieces; return the frames, with empty ones instead of these.

    Args:
        frames: frames of one message.
        send_piece: sends the place of a frame, and a piece of it.
    """
    short: list[zmq.Frame | bytes] = []
    num_whole = 0
    for index, frame in enumerate(frames):
        data = memoryview(frame.buffer)
        if len(data) <= (PIECE_BYTES if num_whole < _MOST_WHOLE_BYTES else _SHORT_BYTES):
            short.append(frame)
            num_whole += len(data)
            continue
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            send_piece(index.to_bytes(_INDEX_BYTES, "little"), piece)
        short.append(b"")
    return short


class Pieces:
    """The pieces of the next message of an engine."""

    def __init__(self) -> None:
        self._frames: dict[int, list[bytes]] = {}
        self.num_bytes = 0

    def add(self, index: bytes, piece: bytes) -> None:
        """Add a piece.

        Raises:
            WireError: the place is malformed.
        """
        if len(index) != _INDEX_BYTES or not piece:
            raise WireError("a piece without a place, or without content")
        self._frames.setdefault(int.from_bytes(index, "little"), []).append(piece)
        self.num_bytes += len(piece)

    def join(self, frames: Sequence[zmq.Frame]) -> list[zmq.Frame]:
        """Return the frames of a message, the large ones whole.

        Raises:
            WireError: there are pieces of frames that the message does not have.
        """
        joined = list(frames)
        for index, pieces in self._frames.items():
            if index >= len(joined) or len(joined[index]):
                raise WireError("pieces of a frame that is not in the message")
            joined[index] = zmq.Frame(b"".join(pieces))
        self._frames, self.num_bytes = {}, 0
        return joined
