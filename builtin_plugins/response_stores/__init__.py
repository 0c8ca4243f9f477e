"""Stores of responses for `/v1/responses`, as a plugin of kind `hooks`: in memory, or in SQLite."""

from .plugin import ResponseStores

__all__ = ["ResponseStores"]
