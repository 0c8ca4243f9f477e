"""Workers as threads of the engine's process."""

from .threads import ThreadExecutor

__all__ = ["ThreadExecutor"]
