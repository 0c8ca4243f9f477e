"""Step parts of requests with the tag `part`: one changes logits and reports, others fail."""

from __future__ import annotations

from hardpoint.plugins import EngineHalf, StepPart, WorkerHalf
from support.samples import Sample

CHOSEN = 7
"""The token that `Shift` makes likeliest."""


class Engine(EngineHalf):
    def __init__(self):
        self.reports = []

    def uses(self, request):
        return "part" in request.tags

    def begin(self, plan):
        return b"%d" % len(plan.num_scheduled_tokens)

    def result(self, plan, result):
        self.reports.append(result.part_reports.get("shift", {}).get(0))
        return {}


class Worker(WorkerHalf):
    closed = 0

    def begin(self, plan, data):
        assert int(data) == len(plan.num_scheduled_tokens)
        self.layers, self.rows = [], []

    def around_layers(self, attend):
        def call(layer, q, k, v, angles=None):
            self.layers.append(layer)
            return attend(layer, q, k, v, angles)

        return call

    def hidden(self, hidden, rows):
        assert rows.starts[-1] == len(hidden)
        self.rows = list(rows.request_ids)

    def logits(self, logits, request_ids):
        assert set(request_ids) <= set(self.rows)
        changed = logits.clone()
        changed[:, CHOSEN] += 1e4
        return changed

    def report(self):
        return f"{self.rows} {self.layers}".encode()

    def close(self):
        Worker.closed += 1


class Shift(Sample, StepPart, contract=1):
    engine = None

    def engine_half(self, context):
        Shift.engine = Engine()
        return Shift.engine

    def worker_half(self, context):
        assert context.vocab_size > CHOSEN
        return Worker()


class BadWorker(Worker):
    def logits(self, logits, request_ids):
        raise ValueError("broken logits")


class BadLogits(Shift):
    def worker_half(self, context):
        return BadWorker()


class ShortLogits(Shift):
    def worker_half(self, context):
        class Short(Worker):
            def logits(self, logits, request_ids):
                return logits[:, :3]

        return Short()


class SkippedLogits(BadLogits):
    fault_scope = "step"


class EndingLogits(BadLogits):
    fault_scope = "engine"


class NoHalf(Shift):
    def worker_half(self, context):
        return "a half"


class Misnamed(Shift):
    def worker_half(self, context):
        return NearHooks()


class NearHooks:
    """Has nearly the name of a hook."""

    def begin(self, plan, data):
        pass

    def logit(self, logits, request_ids):
        return logits


class OldMisnamed(Shift):
    def worker_half(self, context):
        return OldNearHooks()


class OldNearHooks(Worker):
    def report_(self):
        return None

    def sample(self, token_ids):
        pass


class Around(StepPart):
    """Has a half in the worker alone, which notes its calls."""

    contract = 1
    calls = []

    def worker_half(self, context):
        assert context.loaded.max_model_len > 0
        return Noting()


class Noting(WorkerHalf):
    def memory(self):
        Around.calls.append("memory")
        return {"notes": 3 << 20}

    def around_model(self, forward):
        def run(step):
            Around.calls.append("forward")
            assert not step.needs_model
            return forward(step)

        return run

    def cache_allocated(self, cache):
        Around.calls.append(f"{cache.num_groups} groups")

    def cache_released(self):
        Around.calls.append("released")

    def finished(self, request_ids):
        Around.calls.append("finished")
