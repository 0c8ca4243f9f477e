"""Speculation as a step part: drives the speculators that the configuration names."""

from __future__ import annotations

from typing import cast

from hardpoint.plugins import FrontendHalf, Speculator, StepPart
from hardpoint.plugins.step_part import EngineHalfContext, FrontendHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext

from .draft_planner import DraftPlanner
from .drafting import Drafting, DraftingFromHidden
from .head_drafting import DraftingByHeads, DraftingByLayers
from .requests import KIND, DraftedRequests
from .verification import DraftVerification


class Speculation(StepPart):
    """Drafts of tokens, which the next step verifies; drives the `speculators` kind.

    It verifies the drafts of other step parts, too.

    A fault of a speculator costs the drafts of its requests.
    """

    contract = 1
    fault_scope = "step"

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf:
        """Return the half that checks which speculator a request names."""
        return DraftedRequests(self.name, context.components)

    def engine_half(self, context: EngineHalfContext) -> DraftPlanner | None:
        """Return the half that plans drafts; None without a speculator."""
        if not context.components.enabled(KIND):
            return None
        return DraftPlanner(self.name, self.context.config, context)

    def worker_half(self, context: WorkerHalfContext) -> DraftVerification | None:
        """Return the half that drafts and verifies drafts, in the rank that samples."""
        config, names = self.context.config, context.components.enabled(KIND)
        if context.rank != config.parallel.output_rank:
            return None
        if not names:
            return DraftVerification() if context.num_draft_tokens else None
        classes = [cast(type[Speculator], context.components.find(KIND, name)) for name in names]
        half: type[Drafting] = Drafting
        if any(cls.has_kv_cache for cls in classes):
            reads_layers = any(cls.needs_layers for cls in classes)
            half = DraftingByLayers if reads_layers else DraftingByHeads
        elif any(cls.needs_hidden for cls in classes):
            half = DraftingFromHidden
        return half(config, context)
