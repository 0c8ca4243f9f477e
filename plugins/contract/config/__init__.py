"""The configuration tree of an engine."""

from .engine import (
    ConfigSources,
    EngineConfig,
)
from .engine import ConversationsConfig as ConversationsConfig
from .engine import DebugConfig as DebugConfig

__all__ = ["ConfigSources", "EngineConfig"]
