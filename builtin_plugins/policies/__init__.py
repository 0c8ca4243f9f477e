"""Scheduling policies."""

from .fair import Fair
from .static import FirstComeFirstServed, Priority, ShortestFirst

__all__ = ["Fair", "FirstComeFirstServed", "Priority", "ShortestFirst"]
