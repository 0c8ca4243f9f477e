"""Messages between processes: their types, and what is checked of them."""

from .handshake import (
    PROTOCOL_VERSION,
    EngineAddresses,
    EngineCoreReadyResponse,
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

__all__ = [
    "ENGINE_CORE_DEAD",
    "PROTOCOL_VERSION",
    "EngineAddresses",
    "EngineCoreReadyResponse",
    "PauseMode",
    "RequestType",
    "ShutdownState",
    "UtilityCall",
    "UtilityOutput",
    "UtilityResult",
    "decode_handshake",
]
