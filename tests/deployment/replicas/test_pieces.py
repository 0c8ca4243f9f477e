"""Large frames travel in pieces, and arrive whole; malformed pieces are an error."""

from __future__ import annotations

import pytest
import zmq

from hardpoint.host.system.encoding import WireError
from hardpoint.replicas.remote import pieces as pieces_module
from hardpoint.replicas.remote.pieces import PIECE_BYTES, Pieces, split


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_frames_arrive_as_they_were_sent(size):
    sent = [b"head", bytes(size), b"tail", b"x" * (2 * PIECE_BYTES)]
    pieces = Pieces()
    frames = split([zmq.Frame(data) for data in sent], lambda at, part: pieces.add(at, bytes(part)))
    received = pieces.join([zmq.Frame(bytes(frame)) for frame in frames])
    assert [frame.bytes for frame in received] == sent
    assert pieces.num_bytes == 0


def test_no_frame_is_longer_than_a_head_accepts():
    longest = []
    split([zmq.Frame(bytes(5 * PIECE_BYTES))], lambda _, part: longest.append(len(part)))
    assert max(longest) <= PIECE_BYTES


def test_what_a_message_of_many_frames_has_in_whole_frames_is_bounded(monkeypatch):
    """A head cuts a connection that sends too much before a message is whole."""
    monkeypatch.setattr(pieces_module, "_MOST_WHOLE_BYTES", 4 << 16)
    sent = [bytes(2 << 16)] * 10
    pieces = Pieces()
    frames = split([zmq.Frame(data) for data in sent], lambda at, part: pieces.add(at, bytes(part)))
    assert sum(map(len, map(bytes, frames))) == 4 << 16
    received = pieces.join([zmq.Frame(bytes(frame)) for frame in frames])
    assert [frame.bytes for frame in received] == sent


@pytest.mark.parametrize(("index", "piece"), [(b"", b"x"), (b"\0\0\0", b"x"), (b"\0\0", b"")])
def test_a_malformed_piece_is_an_error(index, piece):
    with pytest.raises(WireError, match="a piece without a place, or without content"):
        Pieces().add(index, piece)


@pytest.mark.parametrize("frames", [[], [zmq.Frame(b"full")]])
def test_pieces_of_no_frame_are_an_error(frames):
    pieces = Pieces()
    pieces.add(b"\0\0", b"x")
    with pytest.raises(WireError, match="pieces of a frame that is not in the message"):
        pieces.join(frames)
