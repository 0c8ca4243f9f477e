"""Messages as frames: msgpack, large tensors in frames of their own."""

from .codec import MOST_BYTES, Decoder, Encoder
from .errors import WireError
from .tensors import Buffer

__all__ = [
    "MOST_BYTES",
    "Buffer",
    "Decoder",
    "Encoder",
    "WireError",
]
