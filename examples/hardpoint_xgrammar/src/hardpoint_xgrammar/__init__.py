"""Structured output by the library xgrammar: a grammar backend for Hardpoint."""

from .backend import XGrammar

__all__ = ["XGrammar"]
