"""KV canary: an entry per cached token that names its owner, checked in each step."""

from .part import KVCanary

__all__ = ["KVCanary"]
