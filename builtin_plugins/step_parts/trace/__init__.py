"""Traces: how each token of a request was chosen, and what each step did with the request."""

from .part import Tracing

__all__ = ["Tracing"]
