"""A step part that releases blocks, and checks that no step goes over a release."""

from __future__ import annotations

from hardpoint.plugins import StepPart
from hardpoint.plugins.step_part import AdmissionGate, PlanData, RequestLifecycle


class Borders(StepPart):
    """Lets a step end before the last token of each prompt, and before its sixth output."""

    contract = 1
    releases_blocks = True
    num_ends = 0

    def engine_half(self, context):
        return EndedSteps(context)


class EndedSteps(AdmissionGate, PlanData, RequestLifecycle):
    def __init__(self, context):
        self.context, self.ends = context, {}

    def gate(self, request):
        ends = [request.num_prompt_tokens - 1, request.num_prompt_tokens + 5]
        self.ends[request.request_id] = [at for at in ends if at]
        for at in self.ends[request.request_id]:
            self.context.release_blocks(request, range(0), at)

    def begin(self, plan):
        for name, first in plan.num_computed_tokens().items():
            end = first + plan.num_scheduled_tokens[name]
            for at in self.ends.get(name, ()):
                assert not first < at < end, f"step {first} to {end} goes over {at}"
                Borders.num_ends += end == at
        return b"."

    def ended(self, request_id):
        self.ends.pop(request_id, None)
