"""Scheduling policies for Hardpoint."""

from .ageing import AgeingShortestFirst
from .cap import TenantCap
from .deadline import EarliestDeadline

__all__ = ["AgeingShortestFirst", "EarliestDeadline", "TenantCap"]
