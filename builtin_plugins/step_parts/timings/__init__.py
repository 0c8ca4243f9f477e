"""Timings: how long a request waited, was prefilled and decoded, for those that ask."""

from .part import Timings

__all__ = ["Timings"]
