"""KV transfer: blocks of the KV cache that a connector loads and saves."""

from .part import KVTransfer

__all__ = ["KVTransfer"]
