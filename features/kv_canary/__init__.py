"""The KV canary: entries beside keys and values that say whose they are, checked in each step."""

from .part import KVCanary

__all__ = ["KVCanary"]
