"""A step part that releases blocks of requests: first tokens and a window stay."""

from hardpoint import plugins
from hardpoint.plugins import StepPart
from hardpoint.plugins.step_part import AdmissionGate, PlanData, RequestLifecycle

STRIDE = 8


class Window(StepPart):
    contract = 1
    named_only = releases_blocks = True

    class Arguments(plugins.Arguments):
        window: int

    def engine_half(self, context):
        return Windows(context, f"step_parts/{self.name}")


class Windows(AdmissionGate, PlanData, RequestLifecycle):
    def __init__(self, context, key):
        self.context, self.key = context, key
        self.live, self.last = {}, {}

    def gate(self, request):
        self.live[request.request_id] = request
        self.last[request.request_id] = request.source.plugin_args[self.key]["window"]
        self._release(request)

    def begin(self, plan):
        for name in plan.num_scheduled_tokens:
            request = self.live.get(name)
            while request and self.last[name] <= request.num_computed_tokens:
                self._release(request)

    def _release(self, request):
        window = request.source.plugin_args[self.key]["window"]
        at = self.last[request.request_id] = self.last[request.request_id] + STRIDE
        self.context.release_blocks(request, range(5, at - window), at)

    def ended(self, request_id):
        self.live.pop(request_id, None)
        self.last.pop(request_id, None)


class Undeclared(StepPart):
    contract = 1

    def engine_half(self, context):
        return AtOnce(context, range(4), 20)


class TooLate(StepPart):
    contract = 1
    releases_blocks = True

    def engine_half(self, context):
        return AtOnce(context, range(0), 1)


class Beyond(StepPart):
    contract = 1
    releases_blocks = True

    def engine_half(self, context):
        return AtOnce(context, range(31), 30)


class AtOnce(PlanData):
    """Releases a span of the first request of each plan."""

    def __init__(self, context, span, at):
        self.context, self.span, self.at = context, span, at
        self.live = {}

    def gate(self, request):
        self.live[request.request_id] = request

    def begin(self, plan):
        for name in plan.num_scheduled_tokens:
            self.context.release_blocks(self.live[name], self.span, self.at)

    def ended(self, request_id):
        self.live.pop(request_id, None)
