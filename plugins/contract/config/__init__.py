"""The configuration tree of an engine."""

from .engine import (
    ConfigSources,
    EngineConfig,
)
from .engine import ConversationsConfig as ConversationsConfig
from .engine import DebugConfig as DebugConfig
from .model_files import ModelConfig, ModelFiles

__all__ = ["ConfigSources", "EngineConfig", "ModelConfig", "ModelFiles"]
