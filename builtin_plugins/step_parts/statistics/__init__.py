"""Statistics of requests, for sinks and for the last outputs of requests."""

from .part import RequestStatistics

__all__ = ["RequestStatistics"]
