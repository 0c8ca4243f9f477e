"""Tools for tests of plugins and of the engine: the scripted model and its clock."""

from .scripted import (
    EOS,
    HistoryAttention,
    ScriptedClock,
    ScriptedModel,
    history_hash,
    scripted_config,
    scripted_engine,
    write_scripted_model,
)

__all__ = [
    "EOS",
    "HistoryAttention",
    "ScriptedClock",
    "ScriptedModel",
    "history_hash",
    "scripted_config",
    "scripted_engine",
    "write_scripted_model",
]
