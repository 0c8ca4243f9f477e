"""KV stores of a third party."""

from .sqlite import SqliteStore

__all__ = ["SqliteStore"]
