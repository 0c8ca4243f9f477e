"""Step parts that evict the KV cache of a request: StreamingLLM and SnapKV."""

from .snap import SnapKV
from .streaming import StreamingLLM

__all__ = ["SnapKV", "StreamingLLM"]
