"""Early exit for Hardpoint: by confidence, and as drafts that the whole model verifies."""

from .confidence import ConfidenceExit
from .drafts import SelfSpeculation

__all__ = ["ConfidenceExit", "SelfSpeculation"]
