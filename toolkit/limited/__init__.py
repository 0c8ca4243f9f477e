"""Programs in processes with limits of time and memory, for what may take any amount of both."""

from .process import LimitedProcess

__all__ = ["LimitedProcess"]
