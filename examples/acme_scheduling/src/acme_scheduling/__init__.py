"""Scheduling policies for Hardpoint."""

from .cap import TenantCap
from .deadline import EarliestDeadline

__all__ = ["EarliestDeadline", "TenantCap"]
