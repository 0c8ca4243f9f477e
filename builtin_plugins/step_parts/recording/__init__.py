"""Recorded steps: operations of the model that are repeated without running Python."""

from .part import RecordedSteps

__all__ = ["RecordedSteps"]
