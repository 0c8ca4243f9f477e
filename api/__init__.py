"""Hardpoint: a plugin-oriented LLM inference engine.

`LLM` loads a model into this process. Plugin authors import from `hardpoint.plugins`.
"""

from typing import TYPE_CHECKING, Any

from hardpoint.plugins import (
    CompletionOutput,
    ConfigError,
    EngineClosedError,
    EngineConfig,
    HardpointError,
    Logprob,
    ModelError,
    OverloadedError,
    PluginError,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.plugins.discovery import installed_version

if TYPE_CHECKING:
    from .llm import LLM

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineClosedError",
    "EngineConfig",
    "HardpointError",
    "Logprob",
    "ModelError",
    "OverloadedError",
    "PluginError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Importing torch takes a second; who only wants parameters or errors does not pay it.
    if name == "LLM":
        from .llm import LLM  # noqa: PLC0415

        return LLM
    if name == "__version__":
        return installed_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
