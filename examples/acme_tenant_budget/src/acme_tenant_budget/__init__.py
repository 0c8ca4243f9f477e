"""A budget of tokens per second for each tenant, as a step part of Hardpoint."""

from .part import TenantBudget

__all__ = ["TenantBudget"]
