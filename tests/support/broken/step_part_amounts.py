"""Step parts that count tokens, most of them with one mistake each."""

from __future__ import annotations

import msgspec
import numpy as np

from hardpoint import plugins
from hardpoint.plugins import EngineHalf, StepPart, WorkerHalf
from hardpoint.plugins.requests import PartArray
from support.samples import Sample, leave_file, leave_thread

from .step_parts import Good, GoodHalf, GoodWorker, GoodWorkerHalf


class BudgetHalf(EngineHalf):
    """Takes a request's maximum tokens from a budget, and returns unused ones."""

    def __init__(self, context, size):
        self.clock, self.size = context.clock, size
        self.left, self.since = float(size), context.clock()
        self.requests, self.taken, self.used = {}, {}, {}
        self.total = 0

    def level(self):
        now = self.clock()
        self.left = min(self.left + 100.0 * (now - self.since), self.size)
        self.since = now
        return self.left

    def price(self, request):
        return request.num_prompt_tokens + 12

    def gate(self, request):
        name, price = request.request_id, self.price(request)
        if self.level() < price:
            return "it has no tokens left"
        self.left -= price
        self.requests[name], self.taken[name], self.used[name] = request, price, 0
        return None

    def planned(self, plan):
        return [name for name in plan.num_scheduled_tokens if name in self.requests]

    def result(self, plan, result):
        for name in self.planned(plan):
            self.spend(name, len(result.sampled_token_ids.get(name, ())))
        return {}

    def spend(self, name, count):
        self.used[name] += count
        self.total += count

    def figures(self, request_id):
        return {"used": self.used[request_id], "of": self.taken[request_id]}

    def add_stats(self, stats):
        stats.num_retained_blocks += self.total

    def call(self, method, arguments):
        if method != "total":
            raise plugins.RequestError(f"method: expected 'total', got {method!r}")
        return {"tokens": [self.total], "live": len(self.requests)}

    def preempted(self, request_id):
        pass

    def ended(self, request_id):
        request = self.requests.pop(request_id, None)
        if request is not None:
            unused = self.taken.pop(request_id) - request.num_tokens
            self.left = min(self.level() + unused, self.size)
        self.used.pop(request_id, None)


class Budget(Sample, StepPart, contract=1):
    half = BudgetHalf
    size = 2000

    def engine_half(self, context):
        return self.half(context, self.size)


def part_of(half, base=Budget, attribute="half"):
    name = half.__name__.strip("_").removesuffix("Half")
    return type(name, (base,), {attribute: half, "__module__": __name__})


class _ReturnsOnPreemptionHalf(BudgetHalf):
    """Returns the price of a preempted request; its gate is not called again."""

    def preempted(self, request_id):
        self.left = min(self.level() + self.taken[request_id], self.size)


class _ForgetsOnPreemptionHalf(BudgetHalf):
    """Counts the tokens of a request from 0 after a preemption."""

    def preempted(self, request_id):
        self.used[request_id] = 0


class _SubtractsOnPreemptionHalf(BudgetHalf):
    """Takes the tokens of a preempted request off the total, which has them no more."""

    def preempted(self, request_id):
        self.total -= self.used[request_id]


class _CountsPlansHalf(BudgetHalf):
    """Counts the tokens of plans, including lost ones."""

    def begin(self, plan):
        for name in self.planned(plan):
            self.spend(name, 1)

    def result(self, plan, result):
        return {}


class _ChargesPlansHalf(BudgetHalf):
    """Takes a token off the budget with each plan of a request."""

    def begin(self, plan):
        self.left -= len(self.planned(plan))


class _CountsLostTwiceHalf(BudgetHalf):
    def lost(self, plan):
        self.total += len(self.planned(plan))


class _ResumedMaskHalf(GoodHalf):
    """Counts the results since a request was preempted."""

    def __init__(self, context):
        super().__init__(context)
        self.counts = {}

    def gate(self, request):
        self.counts.setdefault(request.request_id, len(request.output_token_ids))
        return super().gate(request)

    def result(self, plan, result):
        for name in self.planned(plan):
            self.counts[name] += len(result.sampled_token_ids.get(name, ()))
        return {}

    def preempted(self, request_id):
        self.counts[request_id] = 0

    def rest(self, request, index):
        return (self.counts[request.request_id] + index) % 7

    def forget(self, request_id):
        super().forget(request_id)
        self.counts.pop(request_id, None)


class _SendsPlansHalf(GoodHalf):
    """Sends the number of plans that it has made for each request."""

    def __init__(self, context):
        super().__init__(context)
        self.plans = {}

    def begin(self, plan):
        for name in self.planned(plan):
            self.plans[name] = self.plans.get(name, 0) + 1
        sent = {name: self.plans[name] for name in self.planned(plan)}
        return msgspec.msgpack.encode(sent) if sent else None

    def forget(self, request_id):
        super().forget(request_id)
        self.plans.pop(request_id, None)


class _AddsPlansWorkerHalf(WorkerHalf):
    """Adds the number that the engine's half sent to the logits."""

    def begin(self, plan, data):
        self.numbers = msgspec.msgpack.decode(data, type=dict[str, int])

    def logits(self, logits, request_ids):
        numbers = [self.numbers[name] for name in request_ids]
        return logits + logits.new_tensor(numbers)[:, None]


class AddsPlans(Good):
    half = _SendsPlansHalf

    def worker_half(self, context):
        return _AddsPlansWorkerHalf()


ReturnsOnPreemption = part_of(_ReturnsOnPreemptionHalf)
ForgetsOnPreemption = part_of(_ForgetsOnPreemptionHalf)
SubtractsOnPreemption = part_of(_SubtractsOnPreemptionHalf)
CountsPlans = part_of(_CountsPlansHalf)
ChargesPlans = part_of(_ChargesPlansHalf)
CountsLostTwice = part_of(_CountsLostTwiceHalf)
ResumedMask = part_of(_ResumedMaskHalf, Good)


class _LeavesFilesHalf(BudgetHalf):
    def ended(self, request_id):
        super().ended(request_id)
        leave_file()


class _LeavesThreadHalf(GoodWorkerHalf):
    """Starts a thread that close() does not end."""

    def sampled(self, token_ids):
        super().sampled(token_ids)
        if not self.started:
            leave_thread("watcher")
        self.started = True

    started = False


LeavesFiles = part_of(_LeavesFilesHalf)
LeavesThread = part_of(_LeavesThreadHalf, GoodWorker, "worker")


# Drafts


class _FirstRowAloneHalf(GoodWorkerHalf):
    """Changes the first of the rows of each request, and skips draft rows."""

    def logits(self, logits, request_ids):
        changed = logits.clone()
        for name in dict.fromkeys(request_ids):
            changed[list(request_ids).index(name)] += self.numbers[name]
        return changed


class _LastRowAloneHalf(GoodWorkerHalf):
    def logits(self, logits, request_ids):
        changed = logits.clone()
        last = {name: row for row, name in enumerate(request_ids)}
        for name, row in last.items():
            changed[row] += self.numbers[name]
        return changed


class _RowByRequestHalf(GoodWorkerHalf):
    """Takes the row of the second request for the second row."""

    def logits(self, logits, request_ids):
        changed = logits.clone()
        for row, name in enumerate(dict.fromkeys(request_ids)):
            changed[row] += self.numbers[name]
        return changed


class _SkipsDraftTokensHalf(GoodWorkerHalf):
    """Changes the hidden state of one token of each request that generates."""

    def hidden(self, hidden, rows):
        changed = hidden.clone()
        for name, start in zip(rows.request_ids, rows.starts, strict=False):
            changed[start] += self.numbers[name]
        return changed


class _CountsRowsHalf(GoodWorkerHalf):
    """Adds the number of rows of a request, including rejected drafts."""

    def __init__(self):
        super().__init__()
        self.rows = {}

    def logits(self, logits, request_ids):
        numbers = []
        for name in request_ids:
            self.rows[name] = self.rows.get(name, 0) + 1
            numbers.append(self.rows[name])
        return logits + logits.new_tensor(numbers)[:, None]

    def finished(self, request_ids):
        for name in request_ids:
            self.rows.pop(name, None)


class _MasksDraftsAlikeHalf(GoodHalf):
    """Repeats the row of the last token for each draft."""

    def row(self, request, index):
        return super().row(request, 0)


FirstRowAlone = part_of(_FirstRowAloneHalf, GoodWorker, "worker")
LastRowAlone = part_of(_LastRowAloneHalf, GoodWorker, "worker")
RowByRequest = part_of(_RowByRequestHalf, GoodWorker, "worker")
SkipsDraftTokens = part_of(_SkipsDraftTokensHalf, GoodWorker, "worker")
CountsRows = part_of(_CountsRowsHalf, GoodWorker, "worker")
MasksDraftsAlike = part_of(_MasksDraftsAlikeHalf, Good)


# Effects and arrays


class DoesNothing(Sample, StepPart, contract=1):
    def engine_half(self, context):
        return EngineHalf()

    def worker_half(self, context):
        return WorkerHalf()


class _LogsHalf(EngineHalf):
    lines = 0

    def updated(self, plan):
        self.lines += 1


class Logs(Sample, StepPart, contract=1):
    """Right: its effect is not in the engine."""

    def engine_half(self, context):
        return _LogsHalf()


class _NumbersHalf(EngineHalf):
    """Right: a row for each position that a step has computed."""

    shift = 0

    def __init__(self):
        self.new = {}

    def result(self, plan, result):
        for name, first in plan.num_computed_tokens().items():
            count = plan.num_scheduled_tokens[name] - len(plan.draft_token_ids.get(name, ()))
            count += len(result.sampled_token_ids.get(name, ())) - 1
            self.new[name] = range(first + self.shift, first + count + self.shift)
        return {}

    def arrays(self, request_id):
        positions = np.array(self.new.pop(request_id), dtype=np.int64)
        return {"x": PartArray(positions, self.values(positions))}

    def values(self, positions):
        return positions * 2.0

    def ended(self, request_id):
        self.new.pop(request_id, None)


class Numbers(Sample, StepPart, contract=1):
    half = _NumbersHalf

    def engine_half(self, context):
        return self.half()


class _NumbersSampledHalf(_NumbersHalf):
    shift = 1


class _GrowingRowsHalf(_NumbersHalf):
    width = 0

    def values(self, positions):
        self.width += 1
        return np.zeros((len(positions), self.width))


class _FewerRowsHalf(_NumbersHalf):
    def values(self, positions):
        return positions[1:]


NumbersSampled = part_of(_NumbersSampledHalf, Numbers)
GrowingRows = part_of(_GrowingRowsHalf, Numbers)
FewerRows = part_of(_FewerRowsHalf, Numbers)
