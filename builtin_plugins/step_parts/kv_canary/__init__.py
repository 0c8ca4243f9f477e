"""The KV canary: for each cached token, an entry that states whose it is, checked in each step."""

from .part import KVCanary

__all__ = ["KVCanary"]
