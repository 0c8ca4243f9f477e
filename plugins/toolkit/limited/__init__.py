"""Programs in processes with limits of time and memory: for code that can take any amount."""

from .process import LimitedProcess

__all__ = ["LimitedProcess"]
