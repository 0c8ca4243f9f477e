"""Messages between processes: their types, their encoding, and sending without copies."""

from .codec import MOST_BYTES, Decoder, Encoder
from .errors import WireError
from .handshake import (
    PROTOCOL_VERSION,
    EngineAddresses,
    EngineCoreReadyResponse,
    HandshakeMetadata,
    Hello,
    Ready,
    decode_handshake,
)
from .messages import (
    ENGINE_CORE_DEAD,
    PauseMode,
    RequestType,
    ShutdownState,
    UtilityCall,
    UtilityOutput,
    UtilityResult,
)
from .send_buffers import SendTracker, to_frames
from .tensors import Buffer, TensorConsumer, TensorProvider

__all__ = [
    "ENGINE_CORE_DEAD",
    "MOST_BYTES",
    "PROTOCOL_VERSION",
    "Buffer",
    "Decoder",
    "Encoder",
    "EngineAddresses",
    "EngineCoreReadyResponse",
    "HandshakeMetadata",
    "Hello",
    "PauseMode",
    "Ready",
    "RequestType",
    "SendTracker",
    "ShutdownState",
    "TensorConsumer",
    "TensorProvider",
    "UtilityCall",
    "UtilityOutput",
    "UtilityResult",
    "WireError",
    "decode_handshake",
    "to_frames",
]
