"""Messages between engines that exchange blocks.

A question is the frames `[serial, body]`, an answer `[serial, status, payload]`, where the payload
is a block or, for `Has`, a byte for each key.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

KEYS_PER_MESSAGE = 1024
MOST_QUESTION_BYTES = 64 << 10
"""Of a question; a peer that sends more is disconnected."""

YES, NO, OTHER = b"\x01", b"\x00", b"\x02"
"""Status of an answer: here it is, it is not there, it is of another model or layout."""

_Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Keys = Annotated[list[_Key], Meta(max_length=KEYS_PER_MESSAGE)]
_Seconds = Annotated[float, Meta(ge=0, le=3600)]


class _Question(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of the questions."""


class Has(_Question, frozen=True):
    """Which of these blocks are there?"""

    keys: _Keys


class Get(_Question, frozen=True):
    """Give me a block that is kept for anybody."""

    key: _Key


class Take(_Question, frozen=True):
    """Give me a block that is offered once.

    Attributes:
        seconds: to wait for it.
        identity: identity of the blocks that the client can use, see `KVStoreContext.identity`.
    """

    key: _Key
    seconds: _Seconds
    identity: Annotated[str, Meta(max_length=128)]


class Renew(_Question, frozen=True):
    """Keep an offer for longer; this message has no answer."""

    keys: _Keys


Question = Has | Get | Take | Renew

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Question).decode
