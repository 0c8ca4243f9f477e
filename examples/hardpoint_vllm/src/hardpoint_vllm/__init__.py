"""vLLM's logits processors in Hardpoint: a component adapter."""

from .adapter import VLLM

__all__ = ["VLLM"]
