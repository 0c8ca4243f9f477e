"""Output parsing: reasoning and calls of tools in the outputs of requests."""

from .part import OutputParsing

__all__ = ["OutputParsing"]
