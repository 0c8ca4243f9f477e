"""Timings: seconds of queueing, prefill and decode of a request, on demand."""

from .part import Timings

__all__ = ["Timings"]
