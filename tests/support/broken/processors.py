"""Logits processors with one typical mistake each."""

from __future__ import annotations

import math

import torch

from hardpoint import plugins
from hardpoint.plugins import (
    BatchLogitsProcessor,
    Edits,
    Finish,
    LogitsProcessor,
    Move,
    Op,
    Phase,
    Reads,
    SparseLogitsProcessor,
    TensorSpec,
)
from support.samples import Sample, spend


class Bias(Sample, LogitsProcessor, contract=1):
    """Correct: adds a number to token 0."""

    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        by: float = 1.0

    def apply(self, logits, rows):
        logits[:, :1] += rows.tensor("by")
        return logits


class NoContract(Bias, contract=None):
    """States no contract of its own."""


class FailsToBuild(Bias):
    def __init__(self, context):
        raise KeyError("weights")


class PreparesNothing(Bias):
    @classmethod
    def prepare(cls, arguments, context):
        if arguments.by < 0:
            raise ValueError("by: must not be negative")


class PrepareCrashes(Bias):
    @classmethod
    def prepare(cls, arguments, context):
        return arguments.by / 0


class RejectsAll(Bias):
    @classmethod
    def prepare(cls, arguments, context):
        raise ValueError("by: not today")


def _hidden():
    class Arguments(plugins.Arguments):
        by: float = 1.0

    return Arguments


class NoPickle(Bias):
    Arguments = _hidden()


class CachesByCount(Bias):
    """Rebuilds its column only when the number of rows changes."""

    column = None

    def apply(self, logits, rows):
        if self.column is None or len(self.column) != len(rows):
            self.column = rows.tensor("by")
        logits[:, :1] += self.column
        return logits


class MixesRows(Bias):
    def apply(self, logits, rows):
        logits[:, :1] += rows.tensor("by").mean()
        return logits


class Rounds(Bias):
    """Rounds differently for other numbers of rows."""

    def apply(self, logits, rows):
        return logits * (2 * len(rows) + 1) / (2 * len(rows) + 1)


class BatchBias(Sample, BatchLogitsProcessor, contract=1):
    """Correct: the same in the batch form."""

    phase = Phase.BIAS
    Arguments = Bias.Arguments

    @classmethod
    def uses(cls, params):
        return False

    def __init__(self, context):
        super().__init__(context)
        self.by_row = {}

    def update_state(self, update):
        if update is None:
            return
        for row in update.removed:
            self.removed(row)
        for added in update.added:
            self.by_row.pop(added.row, None)
            arguments = added.params.plugin_args.get(self.name)
            if arguments is not None:
                self.by_row[added.row] = arguments.by
        for move in update.moved:
            self.moved(move)

    def removed(self, row):
        self.by_row.pop(row, None)

    def moved(self, move):
        source = self.by_row.pop(move.source, None)
        destination = self.by_row.pop(move.destination, None)
        if source is not None:
            self.by_row[move.destination] = source
        if move.direction is Move.SWAP and destination is not None:
            self.by_row[move.source] = destination

    def apply(self, logits):
        for row, by in self.by_row.items():
            if row < len(logits):
                logits[row, 0] += by
        return logits


class IgnoresMoves(BatchBias):
    def moved(self, move):
        if move.direction is Move.SWAP:
            super().moved(move)


class SwapsOneWay(BatchBias):
    def moved(self, move):
        source = self.by_row.pop(move.source, None)
        self.by_row.pop(move.destination, None)
        if source is not None:
            self.by_row[move.destination] = source


class BiasesAllRows(BatchBias):
    def apply(self, logits):
        logits[:, 1] += 1
        return super().apply(logits)


class CrashesOnUpdate(BatchBias):
    def removed(self, row):
        del self.by_row[row]


class DropsTheBest(Sample, LogitsProcessor, contract=1):
    phase = Phase.TRUNCATE
    argmax_invariant = True

    def apply(self, logits, rows):
        limit = logits.topk(2).values[:, 1:]
        return logits.masked_fill(logits > limit, -math.inf)


class DropsTies(Sample, LogitsProcessor, contract=1):
    """Keeps only one of the tied best tokens, the one with the highest id."""

    phase = Phase.TRUNCATE
    argmax_invariant = True

    def apply(self, logits, rows):
        last = logits.shape[1] - 1 - logits.flip(-1).argmax(-1, keepdim=True)
        masked = torch.full_like(logits, -math.inf)
        return masked.scatter(1, last, logits.gather(1, last))


class Counter(Sample, SparseLogitsProcessor, contract=1):
    """Correct: adds the number of output tokens, kept as a list, to token 0."""

    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        scale: float = 1.0

    def start(self, request):
        return list(request.output_token_ids)

    def advance(self, state, token):
        state.append(token)
        return state

    def edits(self, rows):
        values = [
            len(state) * arguments.scale
            for state, arguments in zip(rows.states(), rows.arguments(), strict=True)
        ]
        return Edits(range(len(rows)), [0] * len(rows), values, Op.ADD)


class CountsCalls(Counter):
    def edits(self, rows):
        for state in rows.states():
            state.append(0)
        return super().edits(rows)


class AppendsOutputs(Counter):
    def edits(self, rows):
        for request in rows.requests:
            request.output_token_ids.append(1)
        return super().edits(rows)


class Sticky(Bias):
    """Adds a little more with every call."""

    calls = 0

    def apply(self, logits, rows):
        self.calls += 1
        logits[:, :1] += self.calls
        return logits


class ForgetsOutputs(Counter):
    def start(self, request):
        return []


class EndsLate(Sample, SparseLogitsProcessor, contract=1):
    """Correct: ends a request after some tokens."""

    phase = Phase.BIAS

    def start(self, request):
        return len(request.output_token_ids)

    def advance(self, state, token):
        return state + 1 if state + 1 < 12 else Finish("late", stop_reason=token)

    def edits(self, rows):
        return None


class EndsAt(EndsLate):
    """Correct: ends requests that give it a number of tokens."""

    class Arguments(plugins.Arguments):
        tokens: int

    def start(self, request):
        return request.arguments[self.name].tokens - len(request.output_token_ids)

    def advance(self, state, token):
        return state - 1 if state > 1 else Finish("tokens")


class EndsByBatch(EndsLate):
    """Ends requests the earlier, the more it has started."""

    started = 0

    def start(self, request):
        self.started += 1
        return super().start(request)

    def advance(self, state, token):
        return state + 1 if state + self.started < 12 else Finish("late")


class DraftsGoOn(EndsLate):
    """Forgets how many tokens there are in each fork."""

    def fork(self, state):
        return 0


class SharesForks(Counter):
    def fork(self, state):
        return state


class LooksPastDrafts(Bias):
    def apply(self, logits, rows):
        for row, request in enumerate(rows.requests):
            logits[row, 0] += len((request.draft_of or request).output_token_ids)
        return logits


class DeviceCounter(Sample, LogitsProcessor, contract=1):
    """Correct: counts tokens on the device."""

    phase = Phase.PENALTY
    reads = Reads.DEVICE_IDS

    def device_state(self):
        return {"seen": TensorSpec((self.context.vocab_size,), "int32")}

    def start_row(self, request, tensors):
        for token in request.output_token_ids:
            tensors["seen"][token] += 1

    def advance_rows(self, rows, tokens, tensors):
        tensors["seen"].scatter_add_(
            1, tokens.unsqueeze(1), torch.ones_like(tokens, dtype=torch.int32).unsqueeze(1)
        )

    def apply(self, logits, rows):
        return logits - rows.state_tensor("seen")


class DeviceForgets(DeviceCounter):
    def start_row(self, request, tensors):
        pass


class Noisy(Bias):
    def apply(self, logits, rows):
        return logits + torch.rand(1, 1)


class Divides(Bias):
    """by = 0 makes 0 / 0."""

    def apply(self, logits, rows):
        return logits * 0 / rows.tensor("by")


class DropsAll(Bias):
    def apply(self, logits, rows):
        return logits.masked_fill(rows.tensor("by") > 10, -math.inf)


class ReturnsNothing(Bias):
    def apply(self, logits, rows):
        logits[:, :1] += rows.tensor("by")


class Double(Bias):
    def apply(self, logits, rows):
        return logits.double()


class EditsOutOfRange(Counter):
    def edits(self, rows):
        return Edits([0], [self.context.vocab_size], [1.0])


class ReadsSecretly(Bias):
    reads = Reads.LOGITS

    def apply(self, logits, rows):
        return logits + max(len(request.output_token_ids) for request in rows.requests)


class AdvancesSecretly(Counter):
    reads = Reads.LOGITS


class ReadsDeviceValues(Bias):
    reads = Reads.LOGITS

    def apply(self, logits, rows):
        for row, by in zip(logits, rows.tensor("by"), strict=True):
            if row.amax() > 0:
                row[0] += by[0]
        return logits


class Hoards(Bias):
    """Keeps every request that it has seen."""

    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def apply(self, logits, rows):
        self.seen += [request for request in rows.requests if request not in self.seen]
        return super().apply(logits, rows)


class Grows(Bias):
    def __init__(self, context):
        super().__init__(context)
        self.names = set()

    def apply(self, logits, rows):
        self.names |= {request.request_id for request in rows.requests}
        return super().apply(logits, rows)


class Sleeps(Bias):
    def apply(self, logits, rows):
        spend(0.004 * len(rows))
        return super().apply(logits, rows)


class Unmasks(Counter):
    def edits(self, rows):
        return Edits(range(len(rows)), [0] * len(rows), [5.0] * len(rows), Op.SET)


class Observer(Sample, LogitsProcessor, contract=1):
    """Correct: lowers token 0 by the surprise of the tokens so far."""

    phase = Phase.BIAS
    max_state_bytes = 64

    class State(plugins.State):
        total: float = 0.0
        seen: list[int] = []

    class Arguments(plugins.Arguments):
        by: float = 1.0

    def start(self, request):
        return self.State()

    def apply(self, logits, rows):
        for row, (state, arguments) in enumerate(zip(rows.states(), rows.arguments(), strict=True)):
            logits[row, 0] += arguments.by * state.total
        return logits

    def observe(self, state, token, logprob):
        return self.State(total=state.total + logprob, seen=[*state.seen, token][-3:])


class KeepsOnSelf(Observer):
    """Keeps the state outside the engine's, by the number of calls."""

    def __init__(self, context):
        super().__init__(context)
        self.total = 0.0

    def apply(self, logits, rows):
        logits[:, 0] += self.total
        return logits

    def observe(self, state, token, logprob):
        self.total += logprob
        return state


class OutgrowsItsBound(Observer):
    def observe(self, state, token, logprob):
        return self.State(total=state.total, seen=[*state.seen, *range(40)])


class ObservesInPlace(Observer):
    """Changes the state that it gets, and copies none for drafts."""

    def fork(self, state):
        return state

    def observe(self, state, token, logprob):
        state.seen.append(token)
        del state.seen[:-3]
        return state


class ObservesNothing(Observer):
    def observe(self, state, token, logprob):
        return None


class RemembersLogits(Observer):
    """Stores inputs of `apply` in the state, which another engine never ran."""

    supports_drafts = False

    class State(plugins.State):
        key: str = ""
        total: float = 0.0

    def __init__(self, context):
        super().__init__(context)
        self.peaks = {}

    def start(self, request):
        return self.State(key=request.request_id)

    def apply(self, logits, rows):
        self.peaks = {r.request_id: float(logits[i].max()) for i, r in enumerate(rows.requests)}
        return super().apply(logits, rows)

    def observe(self, state, token, logprob):
        total = state.total + logprob + self.peaks.get(state.key, 0.0)
        return self.State(key=state.key, total=total)


class ChangesNothing(Bias):
    def apply(self, logits, rows):
        return logits + 0


class NeverUsed(Sample, BatchLogitsProcessor, contract=1):
    """A batch-level processor that no request uses."""

    phase = Phase.BIAS

    @classmethod
    def uses(cls, params):
        return False

    def update_state(self, update):
        pass

    def apply(self, logits):
        return logits + 1


class NeverSparse(Sample, SparseLogitsProcessor, contract=1):
    """A processor of another form that no request uses."""

    phase = Phase.BIAS

    @classmethod
    def uses(cls, params):
        return False

    def edits(self, rows):
        return Edits(range(len(rows)), [0] * len(rows), [5.0] * len(rows))


class UsedWithoutArguments(Bias):
    """Is used by requests without the arguments that it needs."""

    class Arguments(plugins.Arguments):
        by: float

    @classmethod
    def uses(cls, params):
        return True


class UsedWhenGreedy(UsedWithoutArguments):
    """Is used so by some requests."""

    @classmethod
    def uses(cls, params):
        return params.greedy


class UsesCrashes(Bias):
    @classmethod
    def uses(cls, params):
        return params.plugin_args["bias"]["by"] > 0


class UsedByAll(Bias):
    """Correct: requests without arguments use it, too."""

    @classmethod
    def uses(cls, params):
        return True


class IgnoresItsState(Bias):
    def start(self, request):
        return len(request.output_token_ids)

    def advance(self, state, token):
        return state + 1


class Repeated(Sample, LogitsProcessor, contract=1):
    """Halves the logits of repeated tokens; counts one twice that prompt and output have."""

    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        by: float = 2.0

    def start(self, request):
        prompt = set(request.prompt_token_ids)
        return prompt, {*prompt, *request.output_token_ids}

    def advance(self, state, token):
        prompt, seen = state
        return prompt, seen - {token} if token in prompt else seen | {token}

    def apply(self, logits, rows):
        for row, (_, seen) in enumerate(rows.states()):
            logits[row, sorted(seen)] /= rows.arguments()[row].by
        return logits


class PromptAndOutput(Sample, LogitsProcessor, contract=1):
    """Raises a logit after a token; misses a token in the prompt when it starts."""

    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        token: int

    def start(self, request):
        token = request.arguments[self.name].token
        has_come = token in request.output_token_ids and token not in request.prompt_token_ids
        return [token, has_come]

    def advance(self, state, token):
        return [state[0], state[1] or token == state[0]]

    def apply(self, logits, rows):
        for row, (_, has_come) in enumerate(rows.states()):
            logits[row, 0] += 1.0 + has_come
        return logits


class ForksLate(PromptAndOutput):
    """Shares the state of a draft that is the token of its arguments."""

    def start(self, request):
        token = request.arguments[self.name].token
        return [token, token in request.output_token_ids]

    def fork(self, state):
        return state

    def advance(self, state, token):
        state[1] = state[1] or token == state[0]
        return state
