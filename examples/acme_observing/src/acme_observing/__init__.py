"""A stat sink and a KV event publisher for Hardpoint, which write files."""

from .json_lines import JsonLines
from .publisher import EventLines
from .sink import RequestTable

__all__ = ["EventLines", "JsonLines", "RequestTable"]
