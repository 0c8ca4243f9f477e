"""Token traces: the choice of each token of a request, and the work of each step."""

from .part import Tracing

__all__ = ["Tracing"]
