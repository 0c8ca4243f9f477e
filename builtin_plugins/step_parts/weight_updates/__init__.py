"""Online weight updates: weights that change while the engine serves requests."""

from .part import WeightUpdates

__all__ = ["WeightUpdates"]
