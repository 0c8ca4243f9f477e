"""Activation taps for Hardpoint: hidden states as they are, linear probes, steering vectors."""

from .directions import Directions
from .probe import Probe, Residuals
from .steer import Steer

__all__ = ["Directions", "Probe", "Residuals", "Steer"]
