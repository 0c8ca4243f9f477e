"""A step part that gives a number for each position that was computed, or for others."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hardpoint import plugins
from hardpoint.plugins import EngineHalf, StepPart
from hardpoint.plugins.requests import PartArray


class Numbering(StepPart):
    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            counts: "computed" numbers the computed positions; "sampled" numbers the sampled tokens
                from the end of the prompt, which is wrong by one; "before" begins before 0.
        """

        counts: Literal["computed", "sampled", "before"] = "computed"

    options: Options

    def engine_half(self, context):
        return _Numbers(self.options.counts)


class _Numbers(EngineHalf):
    def __init__(self, counts):
        self.counts, self.lengths, self.new, self.given = counts, {}, {}, {}

    def gate(self, request):
        self.lengths[request.request_id] = request.num_prompt_tokens

    def result(self, plan, result):
        before, drafts = plan.num_computed_tokens(), plan.draft_token_ids
        for name, count in plan.num_scheduled_tokens.items():
            sampled = len(result.sampled_token_ids.get(name, ()))
            first, num_given = before[name], self.given.get(name, 0)
            end = first + count - len(drafts.get(name, ())) + max(sampled - 1, 0)
            if self.counts == "sampled":
                first, end = num_given, num_given + sampled
                self.given[name] = end
            elif self.counts == "before":
                first -= 1
            self.new.setdefault(name, []).extend(range(first, end))
        return {}

    def arrays(self, request_id):
        start = self.lengths[request_id] if self.counts == "sampled" else 0
        positions = np.unique(np.array(self.new.pop(request_id, ()), dtype=np.int64)) + start
        return {"number": PartArray(positions, positions * 10)}

    def ended(self, request_id):
        for by_request in (self.lengths, self.new, self.given):
            by_request.pop(request_id, None)
