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
    COORDINATOR_CLIENT,
    ENGINE_CORE_DEAD,
    KEEP_RANK,
    NOTIFICATION_CALL,
    SHUTDOWN_RANK,
    EngineNotification,
    PauseMode,
    ReconfigureRequest,
    RequestType,
    ShutdownState,
    StartWave,
    UtilityCall,
    UtilityOutput,
    UtilityResult,
)
from .send_buffers import SendTracker, to_frames
from .tensors import Buffer, TensorConsumer, TensorProvider

__all__ = [
    "COORDINATOR_CLIENT",
    "ENGINE_CORE_DEAD",
    "KEEP_RANK",
    "MOST_BYTES",
    "NOTIFICATION_CALL",
    "PROTOCOL_VERSION",
    "SHUTDOWN_RANK",
    "Buffer",
    "Decoder",
    "Encoder",
    "EngineAddresses",
    "EngineCoreReadyResponse",
    "EngineNotification",
    "HandshakeMetadata",
    "Hello",
    "PauseMode",
    "Ready",
    "ReconfigureRequest",
    "RequestType",
    "SendTracker",
    "ShutdownState",
    "StartWave",
    "TensorConsumer",
    "TensorProvider",
    "UtilityCall",
    "UtilityOutput",
    "UtilityResult",
    "WireError",
    "decode_handshake",
    "to_frames",
]
