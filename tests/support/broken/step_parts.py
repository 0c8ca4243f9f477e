"""Step parts with one mistake each, and the correct one from which they derive."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from hardpoint.plugins import (
    EngineHalf,
    FrontendHalf,
    GrammarBitmask,
    RequestError,
    RequestFault,
    StepPart,
    WorkerHalf,
)
from hardpoint.plugins.step_part.part import GivenPrompt
from hardpoint.plugins.text import OutputFormat, OutputReader
from support.samples import Sample, spend


class GoodHalf(EngineHalf):
    """Allows each user the tokens of one rest modulo 7, which grows with its output."""

    capacity = {"slots": 4}

    def __init__(self, context):
        self.vocab_size = context.vocab_size
        self.requests, self.asked = {}, set()

    def uses(self, request):
        return request.prompt_token_ids[0] % 5 != 0

    def check(self, request):
        if request.prompt_token_ids[0] % 11 == 1:
            raise RequestError("not this one")

    def gate(self, request):
        name = request.request_id
        if name not in self.asked:
            self.asked.add(name)
            return "its adapter is being read"
        if request.source.prompt_token_ids[0] % 13 == 1:
            raise RequestError("its adapter cannot be read")
        self.requests[name] = request
        return None

    def cost(self, request):
        return {"slots": 1 + request.num_prompt_tokens % 2}

    def planned(self, plan):
        return [name for name in plan.num_scheduled_tokens if name in self.requests]

    def begin(self, plan):
        names = self.planned(plan)
        return ",".join(names).encode() if names else None

    def needs_results(self, plan):
        return self.planned(plan)

    def rest(self, request, index):
        return (request.source.prompt_token_ids[0] + len(request.output_token_ids) + index) % 7

    def mask(self, plan):
        names, rows = [], []
        for name in self.planned(plan):
            for index in range(1 + len(plan.draft_token_ids.get(name, ()))):
                names.append(name)
                rows.append(self.row(self.requests[name], index))
        return GrammarBitmask(names, np.array(rows, dtype=np.int32)) if names else None

    def row(self, request, index):
        width = -(-self.vocab_size // 32) * 32
        tokens = np.arange(width)
        bits = (tokens % 7 == self.rest(request, index)) & (tokens < self.vocab_size)
        return np.packbits(bits, bitorder="little").view(np.int32)

    def result(self, plan, result):
        return {}

    def lost(self, plan):
        pass

    def preempted(self, request_id):
        pass

    def refused(self, request_id):
        self.forget(request_id)

    def ended(self, request_id):
        self.forget(request_id)

    def call(self, method, arguments):
        if method != "live":
            raise RequestError(f"method: expected 'live', got {method!r}")
        return sorted(self.requests)

    def forget(self, request_id):
        self.requests.pop(request_id, None)
        self.asked.discard(request_id)


class GoodRequests(FrontendHalf):
    """Labels requests, refuses some, and finds fault with answers that begin with a bracket."""

    def prepare(self, request, reasoning):
        if request.prompt_token_ids[0] % 17 == 1:
            raise RequestError("not this one")
        request.tags = {**request.tags, "reasons": str(reasoning is not None)}

    def reads_answer(self, request):
        return request.prompt_token_ids[0] % 2 == 0

    def validate(self, request, answer):
        return "it begins with a bracket" if answer.startswith("[") else None


class Good(Sample, StepPart, contract=1):
    half = GoodHalf
    Requests = GoodRequests

    def frontend_half(self, context):
        return self.Requests()

    def engine_half(self, context):
        return self.half(context)


def part_of(half, **attributes):
    """Return a part with a half, named as it is."""
    name = half.__name__.strip("_").removesuffix("Half")
    return type(name, (Good,), {"half": half, "__module__": __name__, **attributes})


class GoodWorkerHalf(WorkerHalf):
    """Adds to all values of each user a number of its own, which its name gives."""

    def __init__(self):
        self.numbers, self.sampled_tokens = {}, {}

    def begin(self, plan, data):
        self.numbers = {name: 1 + len(name) for name in data.decode().split(",")}

    def around_layers(self, attend):
        def call(layer, q, k, v, angles=None):
            return attend(layer, q, k, v, angles) + 1

        return call

    def shifted(self, values, names):
        numbers = [self.numbers[name] for name in names]
        return values + values.new_tensor(numbers)[:, None]

    def names_of(self, rows):
        spans = zip(rows.request_ids, rows.starts, rows.starts[1:], strict=False)
        return [name for name, start, end in spans for _ in range(start, end)]

    def embedded(self, embedded, rows):
        return self.shifted(embedded, self.names_of(rows))

    def linear(self, parts, x, y, rows):
        assert y.shape[1] == sum(size for _, size in parts)
        y += 1  # and is returned
        return y

    def added(self, layer, branch, residual, delta, rows):
        return residual, self.shifted(delta, self.names_of(rows))

    def skips(self, layer, rows):
        return torch.tensor([self.numbers[name] % 2 == layer for name in self.names_of(rows)])

    def after_layers(self):
        pass

    def hidden(self, hidden, rows):
        return self.shifted(hidden, self.names_of(rows)).bfloat16()

    def logits(self, logits, request_ids):
        changed = self.shifted(logits, request_ids)
        changed[:, 3] = float("-inf")
        return changed

    def sampled(self, token_ids):
        self.sampled_tokens = dict(token_ids)

    def report(self):
        return ",".join(self.sampled_tokens).encode()


class _ReportedHalf(GoodHalf):
    """Reads the report of each step that has data."""

    part = ""

    def result(self, plan, result):
        reports = result.part_reports.get(self.part, {0: b""})
        assert reports[0].decode() == ",".join(self.planned(plan))
        return {}


class GoodWorker(Good):
    half = _ReportedHalf
    worker = GoodWorkerHalf

    def engine_half(self, context):
        half = super().engine_half(context)
        half.part = self.name
        return half

    def worker_half(self, context):
        assert (context.hidden_size, context.vocab_size) == (16, 300)
        return self.worker()


def part_of_worker(half):
    """Return a part with a worker half, named as it is."""
    name = half.__name__.strip("_").removesuffix("Half")
    return type(name, (GoodWorker,), {"worker": half, "__module__": __name__})


class NoContract(StepPart):
    def engine_half(self, context):
        return GoodHalf(context)


class GivesNoHalf(Sample, StepPart, contract=1):
    def engine_half(self, context):
        return None


class _MasksOthersHalf(GoodHalf):
    def mask(self, plan):
        masks = super().mask(plan)
        others = [name for name in plan.num_scheduled_tokens if name not in self.requests]
        if masks is None or not others:
            return masks
        rows = np.concatenate([masks.bitmask, masks.bitmask[:1]])
        return GrammarBitmask([*masks.request_ids, others[0]], rows)


class _ChangingCostHalf(GoodHalf):
    calls = 0

    def cost(self, request):
        self.calls += 1
        return {"slots": 1 + self.calls % 2}


class _UnknownResourceHalf(GoodHalf):
    def cost(self, request):
        return {"slots": 1, "seats": 1}


class _NeverReadyHalf(GoodHalf):
    def gate(self, request):
        return "any moment now"


class _GateRaisesHalf(GoodHalf):
    def gate(self, request):
        if request.num_prompt_tokens > 1:
            raise ValueError("no")
        return super().gate(request)


class _GateGivesBoolHalf(GoodHalf):
    def gate(self, request):
        return super().gate(request) is None


class _UsesGivesPromptHalf(GoodHalf):
    def uses(self, request):
        return request.prompt_token_ids


class _UsesNoneHalf(GoodHalf):
    def uses(self, request):
        return False


class _AlwaysDataHalf(GoodHalf):
    def begin(self, plan):
        return super().begin(plan) or b""


class _TextAsDataHalf(GoodHalf):
    def begin(self, plan):
        return ",".join(self.planned(plan))


class _RaisesInLostHalf(GoodHalf):
    def lost(self, plan):
        raise KeyError(plan.step)


class _CountsPlansHalf(GoodHalf):
    """Advances by its plans, including lost ones."""

    def __init__(self, context):
        super().__init__(context)
        self.plans = {}

    def begin(self, plan):
        for name in self.planned(plan):
            self.plans[name] = self.plans.get(name, 0) + 1
        return super().begin(plan)

    def rest(self, request, index):
        return (self.plans[request.request_id] + index) % 7

    def forget(self, request_id):
        super().forget(request_id)
        self.plans.pop(request_id, None)


class _CountsResultsHalf(GoodHalf):
    """Advances by the tokens of results, and so misses the initial outputs of a fork."""

    def __init__(self, context):
        super().__init__(context)
        self.counts = {}

    def result(self, plan, result):
        for name in self.planned(plan):
            sampled = result.sampled_token_ids.get(name, ())
            self.counts[name] = self.counts.get(name, 0) + len(sampled)
        return {}

    def rest(self, request, index):
        first = request.source.prompt_token_ids[0]
        return (first + self.counts.get(request.request_id, 0) + index) % 7

    def forget(self, request_id):
        super().forget(request_id)
        self.counts.pop(request_id, None)


class _KnowsByUserHalf(GoodHalf):
    """Keeps a position by the user's id, which a request and its forks share."""

    def __init__(self, context):
        super().__init__(context)
        self.positions = {}

    def name_of(self, request):
        return request.source.external_req_id or request.request_id

    def updated(self, plan):
        for name in self.planned(plan):
            request = self.requests[name]
            self.positions[self.name_of(request)] = len(request.output_token_ids)

    def rest(self, request, index):
        first = request.source.prompt_token_ids[0]
        return (first + self.positions.get(self.name_of(request), 0) + index) % 7

    def forget(self, request_id):
        if (request := self.requests.get(request_id)) is not None:
            self.positions.pop(self.name_of(request), None)
        super().forget(request_id)


class _GateTakesNewHalf(GoodHalf):
    """Expects that no request has outputs when it comes."""

    def gate(self, request):
        if request.request_id not in self.requests and request.output_token_ids:
            raise ValueError("it has outputs")
        return super().gate(request)


class _EndsOthersHalf(GoodHalf):
    def result(self, plan, result):
        names = result.sampled_token_ids.keys() - self.requests.keys()
        return {name: RequestFault("it is over") for name in names}


class _UpdatedRaisesHalf(GoodHalf):
    def updated(self, plan):
        raise KeyError(plan.step)


class _FaultAsTextHalf(GoodHalf):
    def result(self, plan, result):
        return dict.fromkeys(self.planned(plan), "it is over")


class _RemembersHalf(GoodHalf):
    """Keeps the first value of an aborted or finished request."""

    def __init__(self, context):
        super().__init__(context)
        self.first = {}

    def gate(self, request):
        self.first.setdefault(request.request_id, request.source.prompt_token_ids[0])
        return super().gate(request)

    def rest(self, request, index):
        return (self.first[request.request_id] + index) % 7


class _ForgetsLateHalf(GoodHalf):
    """Ends with an error where an id is used again."""

    def ended(self, request_id):
        pass

    def gate(self, request):
        if self.requests.get(request.request_id, request) is not request:
            raise AssertionError("it runs already")
        return super().gate(request)


class _WrongShapeHalf(GoodHalf):
    def row(self, request, index):
        return super().row(request, index)[:-1]


class _WrongTypeHalf(GoodHalf):
    def mask(self, plan):
        masks = super().mask(plan)
        return masks and GrammarBitmask(masks.request_ids, masks.bitmask.astype(np.int64))


class _OneRowEachHalf(GoodHalf):
    """Has no rows for drafts."""

    def mask(self, plan):
        names = self.planned(plan)
        rows = [self.row(self.requests[name], 0) for name in names]
        return GrammarBitmask(names, np.array(rows, dtype=np.int32)) if names else None


class _AllowsNothingHalf(GoodHalf):
    def rest(self, request, index):
        return 7 if len(request.output_token_ids) > 1 else super().rest(request, index)


class _SharedPositionHalf(GoodHalf):
    """Masks by the number of requests."""

    def rest(self, request, index):
        return (super().rest(request, index) + len(self.requests)) % 7


class _DraftsHalf(GoodHalf):
    """Drafts two tokens of each live request that uses it."""

    num_draft_tokens = 2

    def drafts(self):
        return {name: [1, 2] for name in self.requests}


class _DraftsForOthersHalf(_DraftsHalf):
    def drafts(self):
        return super().drafts() | {"other": [1]}


class _TooManyDraftsHalf(_DraftsHalf):
    def drafts(self):
        return {name: [1, 2, 3] for name in self.requests}


class _NoSuchTokenHalf(_DraftsHalf):
    def drafts(self):
        return {name: [1, self.vocab_size] for name in self.requests}


class _LimitsOthersHalf(GoodHalf):
    def limit_drafts(self, drafts):
        return dict.fromkeys(drafts, 0) | {"other": 0}


class _AddsDraftsHalf(GoodHalf):
    def limit_drafts(self, drafts):
        return {name: len(tokens) + 1 for name, tokens in drafts.items()}


class _FiguresAsBytesHalf(GoodHalf):
    def figures(self, request_id):
        return {"state": request_id.encode()}


class _NoNumberOfDraftsHalf(_DraftsHalf):
    num_draft_tokens = None


class _WritesPlanHalf(GoodHalf):
    def begin(self, plan):
        data = super().begin(plan)
        plan.num_scheduled_tokens.pop("other", None)
        return data


class _WritesResultHalf(GoodHalf):
    def result(self, plan, result):
        result.sampled_token_ids.pop("other", None)
        return {}


class _GrowsHalf(GoodHalf):
    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def ended(self, request_id):
        super().ended(request_id)
        self.seen.append(request_id)


class _ClosesOnceHalf(GoodHalf):
    files = True

    def close(self):
        del self.files

    def __init__(self, context):
        super().__init__(context)
        self.files = []


class _SlowHalf(GoodHalf):
    def mask(self, plan):
        spend(1.0)
        return super().mask(plan)


class _LacksRowsHalf(GoodWorkerHalf):
    def hidden(self, hidden, rows):
        return hidden[:-1]


class _WritesInputHalf(GoodWorkerHalf):
    def linear(self, parts, x, y, rows):
        x += 1


class _WritesTokensHalf(GoodWorkerHalf):
    def sampled(self, token_ids):
        super().sampled(token_ids)
        for tokens in token_ids.values():
            tokens.append(0)


class _TextAsReportHalf(GoodWorkerHalf):
    def report(self):
        return super().report().decode()


class _ByPositionHalf(GoodWorkerHalf):
    """Adds to the rows of each request its place among others."""

    def logits(self, logits, request_ids):
        places = list(dict.fromkeys(request_ids))
        return logits + logits.new_tensor([places.index(name) for name in request_ids])[:, None]


class _BeginRaisesHalf(GoodWorkerHalf):
    def begin(self, plan, data):
        raise KeyError(plan.step)


class _NotFiniteHalf(GoodWorkerHalf):
    def embedded(self, embedded, rows):
        return embedded / 0


class _SkipsByPlaceHalf(GoodWorkerHalf):
    """Lets the first token of a step skip a layer, whosever it is."""

    def skips(self, layer, rows):
        return torch.arange(rows.starts[-1]) == 0


class _SkipsByNumberHalf(GoodWorkerHalf):
    def skips(self, layer, rows):
        return super().skips(layer, rows).float()


class _AddsOneHalf(GoodWorkerHalf):
    def added(self, layer, branch, residual, delta, rows):
        return super().added(layer, branch, residual, delta, rows)[1]


class _AddsInPlaceHalf(GoodWorkerHalf):
    def added(self, layer, branch, residual, delta, rows):
        return residual, delta.add_(1)


class _WrongLayerHalf(GoodWorkerHalf):
    def around_layers(self, attend):
        return lambda layer, *args: attend(0, *args)


class _KeepsEndedHalf(GoodWorkerHalf):
    """Keeps the ids of requests that have ended."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def finished(self, request_ids):
        self.seen += request_ids


LacksRows = part_of_worker(_LacksRowsHalf)
WritesInput = part_of_worker(_WritesInputHalf)
WritesTokens = part_of_worker(_WritesTokensHalf)
TextAsReport = part_of_worker(_TextAsReportHalf)
ByPosition = part_of_worker(_ByPositionHalf)
BeginRaises = part_of_worker(_BeginRaisesHalf)
NotFinite = part_of_worker(_NotFiniteHalf)
SkipsByPlace = part_of_worker(_SkipsByPlaceHalf)
SkipsByNumber = part_of_worker(_SkipsByNumberHalf)
AddsOne = part_of_worker(_AddsOneHalf)
AddsInPlace = part_of_worker(_AddsInPlaceHalf)
WrongLayer = part_of_worker(_WrongLayerHalf)
KeepsEnded = part_of_worker(_KeepsEndedHalf)
MasksOthers = part_of(_MasksOthersHalf)
ChangingCost = part_of(_ChangingCostHalf)
UnknownResource = part_of(_UnknownResourceHalf)
NeverReady = part_of(_NeverReadyHalf)
GateRaises = part_of(_GateRaisesHalf)
GateGivesBool = part_of(_GateGivesBoolHalf)
UsesGivesPrompt = part_of(_UsesGivesPromptHalf)
UsesNone = part_of(_UsesNoneHalf)
AlwaysData = part_of(_AlwaysDataHalf)
TextAsData = part_of(_TextAsDataHalf)
RaisesInLost = part_of(_RaisesInLostHalf)
CountsPlans = part_of(_CountsPlansHalf)
CountsResults = part_of(_CountsResultsHalf)
KnowsByUser = part_of(_KnowsByUserHalf)
GateTakesNew = part_of(_GateTakesNewHalf)
EndsOthers = part_of(_EndsOthersHalf)
UpdatedRaises = part_of(_UpdatedRaisesHalf)
FaultAsText = part_of(_FaultAsTextHalf)
Remembers = part_of(_RemembersHalf)
ForgetsLate = part_of(_ForgetsLateHalf)
WrongShape = part_of(_WrongShapeHalf)
WrongType = part_of(_WrongTypeHalf)
OneRowEach = part_of(_OneRowEachHalf)
AllowsNothing = part_of(_AllowsNothingHalf)
SharedPosition = part_of(_SharedPositionHalf)
Drafts = part_of(_DraftsHalf)
DraftsForOthers = part_of(_DraftsForOthersHalf)
TooManyDrafts = part_of(_TooManyDraftsHalf)
NoSuchToken = part_of(_NoSuchTokenHalf)
LimitsOthers = part_of(_LimitsOthersHalf)
AddsDrafts = part_of(_AddsDraftsHalf)
FiguresAsBytes = part_of(_FiguresAsBytesHalf)
NoNumberOfDrafts = part_of(_NoNumberOfDraftsHalf)
WritesPlan = part_of(_WritesPlanHalf)
WritesResult = part_of(_WritesResultHalf)
Grows = part_of(_GrowsHalf)
ClosesOnce = part_of(_ClosesOnceHalf)
Slow = part_of(_SlowHalf)


class PrepareRaises(Good):
    class Requests(GoodRequests):
        def prepare(self, request, reasoning):
            raise KeyError("reasons")


class Renames(Good):
    class Requests(GoodRequests):
        def prepare(self, request, reasoning):
            request.request_id += "-mine"


class CompletesTwice(Good):
    class Requests(GoodRequests):
        def prepare(self, request, reasoning):
            request.priority += 1


class ReadsLetters(Good):
    class Requests(GoodRequests):
        prompt_keys = ("letters",)

        def read_prompt(self, prompt, reader):
            return GivenPrompt(token_ids=[97] * prompt["letters"])


class ReadsIntoList(Good):
    class Requests(ReadsLetters.Requests):
        def read_prompt(self, prompt, reader):
            return [97] * prompt["letters"]


class CutsNothing(Good):
    class Requests(ReadsLetters.Requests):
        def read_prompt(self, prompt, reader):
            read = GivenPrompt(token_ids=[97] * prompt["letters"])
            return dataclasses.replace(read, cut=lambda limit: read)


class ReadsNoToken(Good):
    class Requests(ReadsLetters.Requests):
        def read_prompt(self, prompt, reader):
            return GivenPrompt(token_ids=[-1])


class ReadsFieldsOfOthers(Good):
    class Requests(ReadsLetters.Requests):
        def read_prompt(self, prompt, reader):
            return GivenPrompt(token_ids=[97], fields={"resumable": True})


class RefusesWhatItReads(Good):
    class Requests(ReadsLetters.Requests):
        def prepare(self, request, reasoning):
            raise RequestError("not this one")


class ReadPromptRaises(Good):
    class Requests(ReadsLetters.Requests):
        def read_prompt(self, prompt, reader):
            raise KeyError("letter")


class ReadsByText(Good):
    class Requests(GoodRequests):
        def reads_answer(self, request):
            return "yes"


class FlawAsList(Good):
    class Requests(GoodRequests):
        def reads_answer(self, request):
            return True

        def validate(self, request, answer):
            return ["wrong"]


class ValidateRaises(Good):
    class Requests(GoodRequests):
        def reads_answer(self, request):
            return True

        def validate(self, request, answer):
            raise ValueError("no JSON")


class _ReaderFormat(OutputFormat):
    def open(self, request):
        return self.reader()


def format_of(reader):
    """Return a part with a reader in its format."""
    format_class = type("Format", (_ReaderFormat,), {"reader": reader})
    half = type("Half", (GoodRequests,), {"output_format": lambda *_: format_class()})
    name = reader.__name__.strip("_")
    return type(name, (Good,), {"Requests": half, "__module__": __name__})


class _ReadsBytes(OutputReader):
    def complete(self, completion, *, finished):
        completion.content = completion.text.encode()


class _ReadsStop(OutputReader):
    def complete(self, completion, *, finished):
        completion.content = completion.stop_reason.upper()


class _ShowsNothing(OutputReader):
    def result(self, output):
        return None


class _ShowsText(OutputReader):
    def result(self, output):
        return output.outputs[0].text


class _OpensDict(dict):
    pass


ReadsBytes, ReadsStop = format_of(_ReadsBytes), format_of(_ReadsStop)
ShowsNothing, ShowsText = format_of(_ShowsNothing), format_of(_ShowsText)
OpensDict = format_of(_OpensDict)


class FormatAsText(Good):
    class Requests(GoodRequests):
        def output_format(self, request, calls):
            return "json"


class FormatRaises(Good):
    class Requests(GoodRequests):
        def output_format(self, request, calls):
            raise KeyError("format")


class NoFrontendHalf(Good):
    Requests = dict


class _AnswersAllHalf(GoodHalf):
    def call(self, method, arguments):
        return []


class _AnswersObjectsHalf(GoodHalf):
    def call(self, method, arguments):
        super().call(method, arguments)
        return self


AnswersAll = part_of(_AnswersAllHalf)
AnswersObjects = part_of(_AnswersObjectsHalf)


class UsesOtherFields(Good):
    @classmethod
    def request_fields(cls, config):
        return ["priority"]


class _OpensMember(GoodRequests):
    def members(self, request, arguments):
        return [GivenPrompt(text="no")]


class _CombinesRowsHalf(GoodWorkerHalf):
    def combine(self, logits, arguments):
        return logits


class _CombinesByChanceHalf(GoodWorkerHalf):
    def combine(self, logits, arguments):
        return logits.mean(0) + logits.new_empty(1).normal_()


class NeverCombines(Good):
    Requests = _OpensMember


CombinesRows, CombinesByChance = map(part_of_worker, (_CombinesRowsHalf, _CombinesByChanceHalf))
CombinesRows.Requests = CombinesByChance.Requests = _OpensMember
