"""Messages as frames: msgpack, large tensors in frames of their own; sending without copies."""

from .codec import MOST_BYTES, Decoder, Encoder
from .errors import WireError
from .send_buffers import SendTracker, to_frames
from .tensors import Buffer, TensorConsumer, TensorProvider

__all__ = [
    "MOST_BYTES",
    "Buffer",
    "Decoder",
    "Encoder",
    "SendTracker",
    "TensorConsumer",
    "TensorProvider",
    "WireError",
    "to_frames",
]
