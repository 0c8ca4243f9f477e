"""The phases of logits processors, and the stages of logits in a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from hardpoint.plugins.component.base import Source

__all__ = ["LogitsStage"]


class Phase(IntEnum):
    """When a processor runs; phases run in this order."""

    MASK = 0
    """Forbid tokens (grammars first)."""
    BIAS = 1
    """Add to logits."""
    PENALTY = 2
    """Penalise or reward tokens by their occurrence in prompt and output."""
    TEMPERATURE = 3
    """Rescale. Greedy requests skip this phase."""
    TRUNCATE = 4
    """Drop unlikely tokens (top_k, then top_p, then min_p)."""
    FORCE = 5
    """Allow only the token that must come next."""


@dataclass(frozen=True)
class LogitsStage:
    """A stage of the logits of a step: the model, the masks, or a logits processor.

    Attributes:
        source: identity of the logits processor; None of `MODEL` and `MASK`.
        phase: phase of the processor; None of `MODEL`.
    """

    source: Source | None
    phase: Phase | None


MODEL = LogitsStage(None, None)
"""The model, as step parts change its logits: a pass begins with it, again where one failed."""

MASK = LogitsStage(None, Phase.MASK)
"""The masks of step parts, such as grammar masks."""
