"""Traces: what became of each token of a request, and what each step did with the request."""

from .part import Tracing

__all__ = ["Tracing"]
