"""Draft positions are more rows: scripted drafts give the tokens that no drafts give."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.plugins.observing import Bytes, Follows
from support.searching import examples

from hardpoint import SamplingParams, plugins
from hardpoint.builtin_plugins.logits import (
    bias,
    masks,
    penalties,
    temperature,
    thinking_budget,
    truncation,
)
from hardpoint.builtin_plugins.sampler import DefaultSampler
from hardpoint.builtin_plugins.step_parts.speculation.verification import DraftVerification
from hardpoint.builtin_plugins.step_parts.structured.answers import ConstrainedAnswer
from hardpoint.core.worker.sampling.draft_rows import DraftRows
from hardpoint.core.worker.sampling.grammar_mask import GrammarMask
from hardpoint.core.worker.sampling.pipeline import LogitsPipeline
from hardpoint.core.worker.sampling.sampling_stage import SamplingStage
from hardpoint.errors import PluginContractError
from hardpoint.host.boundary.logits.processor_runner import ProcessorRunner
from hardpoint.host.boundary.parts.components import describe_fault
from hardpoint.plugins import (
    BatchLogitsProcessor,
    BatchUpdate,
    EngineCoreRequest,
    GrammarBitmask,
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    ModelRunnerOutput,
    Phase,
    ReasoningMarkers,
    SamplerContext,
    TensorSpec,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.sampling.rows import Added
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import history_hash, load_ops
from hardpoint.toolkit.bitmasks import allow_tokens
from hardpoint.typed import prepared_type

CPU = torch.device("cpu")
VOCAB = 24
OPS = load_ops(torch.float32)
ROWS = 4


class DeviceCounts(LogitsProcessor):
    """A token may come at most twice; counted on the device."""

    contract = 1
    phase = Phase.MASK

    def device_state(self):
        return {"counts": TensorSpec((VOCAB,), "int32")}

    def start_row(self, request, tensors):
        for token in request.output_token_ids:
            tensors["counts"][token] += 1

    def advance_rows(self, rows, tokens, tensors):
        tensors["counts"][range(len(tokens)), tokens] += 1

    def apply(self, logits, rows):
        return logits.masked_fill(rows.state_tensor("counts") >= 2, -100.0)


class WholeBatch(BatchLogitsProcessor):
    """Adds to one token of each row, by the row's books."""

    contract = 1
    phase = Phase.BIAS
    supports_drafts = True

    def __init__(self, context):
        super().__init__(context)
        self.books = plugins.RowMap(lambda added: added.params.seed % VOCAB)

    def update_state(self, update):
        self.books.apply(update)

    def apply(self, logits):
        assert len(logits) == ROWS
        for row in self.books:
            logits[row, self.books[row]] += 1.5
        return logits


PROCESSORS = {
    "min_tokens": masks.MinTokens,
    "bad_words": masks.BadWords,
    "device_counts": DeviceCounts,
    "logit_bias": bias.LogitBias,
    "whole_batch": WholeBatch,
    "penalties": penalties.Penalties,
    "temperature": temperature.Temperature,
    "top_k": truncation.TopK,
    "min_p": truncation.MinP,
    "thinking_budget": thinking_budget.ThinkingBudget,
}
ARGUMENTS = {
    "min_tokens": {"min_tokens": 4},
    "bad_words": {"bad_words": ["x"], "sequences": [[3], [5, 6]]},
    "device_counts": {},
    "logit_bias": {"logit_bias": {1: 2.0, 2: -1.0}},
    "whole_batch": {},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 12},
    "min_p": {"min_p": 0.02},
    "thinking_budget": {
        "thinking_token_budget": 3,
        "markers": ReasoningMarkers(((4,),), ((9, 10),)),
    },
}


def build_stage() -> SamplingStage:
    runners = []
    for name, cls in PROCESSORS.items():
        context = LogitsContext(
            name=name,
            options=cls.Options(),
            device=CPU,
            vocab_size=VOCAB,
            max_num_seqs=ROWS,
            ops=OPS,
        )
        source = Source(name, f"tests:{cls.__name__}", "tests", "1", "default")
        runners.append(ProcessorRunner(cls(context), source, CPU, ROWS))
    sampler = SamplerContext(name="default", options=None, device=CPU, vocab_size=VOCAB, ops=OPS)
    return SamplingStage(LogitsPipeline(runners, CPU), DefaultSampler(sampler), CPU)


def begin(stage: SamplingStage, outputs: list[list[int]]) -> list[LogitsRequest]:
    requests = []
    for row, known in enumerate(outputs):
        params = SamplingParams(temperature=0.0 if row == 1 else 0.8, seed=row + 3)
        arguments = {n: prepared_type(PROCESSORS[n])(**given) for n, given in ARGUMENTS.items()}
        requests.append(
            LogitsRequest(f"r{row}", [row, 7], known, params, [0], arguments=arguments, row=row)
        )
    added = tuple(Added(r.row, r.params, r.prompt_token_ids, r.output_token_ids) for r in requests)
    for request in requests:
        assert stage.pipeline.start(request) is None
    stage.pipeline.update(BatchUpdate(len(requests), added=added))
    return requests


def logits_of(histories: list[list[int]]) -> torch.Tensor:
    """Logits that are a pure function of the history."""
    result = []
    for history in histories:
        seed = history_hash(history)
        result.append(torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2)
    return torch.stack(result)


class Watched(DraftRows):
    """Rows that keep the views of the last pass."""

    def sample(self, rows):
        tokens = super().sample(rows)
        self.views = [self._views[row] for row in rows if row in self._views]
        return tokens


def rows_of(stage, requests, drafts, answers=()) -> Watched:
    """The rows of a step whose logits are a pure function of the history."""
    histories = [
        [*request.prompt_token_ids, *request.output_token_ids, *tokens[:count]]
        for request, tokens in zip(requests, drafts, strict=True)
        for count in range(len(tokens) + 1)
    ]
    mask = None
    if answers:
        owners = [r for r, own in zip(requests, drafts, strict=True) for _ in range(len(own) + 1)]
        mask = GrammarMask(bitmask_of(answers, requests, drafts), owners, OPS)
    return Watched(requests, drafts, stage, lambda: logits_of(histories), mask)


def step(stage, requests, drafts, answers=(), verifier=None) -> list[list[int]]:
    """Verify, keep what is accepted, and carry the states on; return what each got."""
    stage.pipeline.update(None)
    rows = rows_of(stage, requests, drafts, answers)
    accepted = (verifier or DraftVerification()).verify_drafts(rows)
    assert rows.defect(accepted) is None
    by_id, output = {request.request_id: request for request in requests}, ModelRunnerOutput()
    rows.keep(accepted, lambda name, token: by_id[name].output_token_ids.append(token), output)
    assert output.faults == {}
    return [output.sampled_token_ids[request.request_id] for request in requests]


class Thirds:
    """A grammar: the n-th token is n modulo 3."""

    def __init__(self, count=0):
        self.count = count

    def fill_bitmask(self, row):
        allow_tokens(row, [t for t in range(1, VOCAB) if t % 3 == self.count % 3])
        return False

    def advance(self, token_id):
        fits = token_id > 0 and token_id % 3 == self.count % 3
        self.count += fits
        return fits

    def rollback(self, count):
        self.count -= count

    def fork(self):
        return Thirds(self.count)


def answers_of(requests: list[LogitsRequest]) -> dict[str, ConstrainedAnswer]:
    """Return the answers of the requests of even rows."""
    return {
        request.request_id: ConstrainedAnswer(
            SimpleNamespace(
                source=EngineCoreRequest(
                    request_id=request.request_id,
                    prompt_token_ids=[1],
                    params=SamplingParams(structured=StructuredOutputs(regex="x")),
                    eos_token_ids=(0,),
                ),
                output_token_ids=request.output_token_ids,
            ),
            Thirds(),
            VOCAB,
            describe_fault,
        )
        for request in requests[::2]
    }


def bitmask_of(answers, requests, drafts) -> GrammarBitmask:
    names, rows = [], []
    for request, tokens in zip(requests, drafts, strict=True):
        if (answer := answers.get(request.request_id)) is not None:
            own = np.zeros((len(tokens) + 1, 1), np.int32)
            answer.fill(own, tokens)
            names += [request.request_id] * len(own)
            rows.append(own)
    return GrammarBitmask(names, np.concatenate(rows))


def without_drafts(count: int) -> list[list[int]]:
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    for _ in range(count):
        step(stage, requests, [[]] * ROWS)
    return [list(r.output_token_ids) for r in requests]


EXPECTED = without_drafts(30)


@examples(40)
@given(st.integers(0, 10**6))
def test_any_drafts_give_the_tokens_of_no_drafts(seed):
    """Accepted, rejected, partly accepted, none: the outputs are the same."""
    rng = random.Random(seed)
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    while min(len(r.output_token_ids) for r in requests) < 18:
        drafts = []
        for row, request in enumerate(requests):
            done = len(request.output_token_ids)
            right = EXPECTED[row][done : done + rng.randint(0, 4)]
            drafts.append([t if rng.random() < 0.8 else rng.randrange(VOCAB) for t in right])
        got = step(stage, requests, drafts)
        for tokens, draft in zip(got, drafts, strict=True):
            assert 1 <= len(tokens) <= len(draft) + 1
    for row, request in enumerate(requests):
        known = list(request.output_token_ids)[:30]
        assert known == EXPECTED[row][: len(known)]


@pytest.mark.parametrize(
    ("wrong_at", "taken"), [(None, 4), (0, 1), (1, 2), (2, 3)], ids=["all", "none", "one", "two"]
)
def test_how_many_drafts_are_confirmed(wrong_at, taken):
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    drafts = [list(EXPECTED[row][:3]) for row in range(ROWS)]
    if wrong_at is not None:
        drafts[2][wrong_at] = (drafts[2][wrong_at] + 1) % VOCAB
    got = step(stage, requests, drafts)
    assert [len(tokens) for tokens in got] == [4, 4, taken, 4]
    assert got[2] == EXPECTED[2][:taken]


def test_rejected_drafts_leave_no_trace_in_any_state():
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    wrong = [[(EXPECTED[row][0] + 1) % VOCAB] * 3 for row in range(ROWS)]
    for _ in range(10):
        step(stage, requests, wrong if _ % 2 else [[]] * ROWS)
        wrong = [
            [(EXPECTED[row][len(r.output_token_ids)] + 1) % VOCAB] * 3
            for row, r in enumerate(requests)
        ]
    assert [list(r.output_token_ids) for r in requests] == [e[:10] for e in EXPECTED]


def test_a_draft_row_sees_the_drafts_before_it():
    stage = build_stage()
    requests = begin(stage, [[9], [], [], []])
    step_rows = rows_of(stage, requests, [[1, 2], [], [3], []])
    tokens = step_rows.sample([(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (3, 0)])
    assert None not in tokens
    rows = step_rows.views
    assert [list(r.output_token_ids) for r in rows] == [[9], [9, 1], [9, 1, 2], [], [], [3], []]
    assert [r.draft_of is None for r in rows] == [True, False, False, True, True, False, True]
    assert list(requests[0].output_token_ids) == [9]


@pytest.mark.parametrize("in_turn", [False, True])
def test_drafts_change_no_token_of_requests_with_grammars(in_turn, monkeypatch):
    monkeypatch.delitem(ARGUMENTS, "thinking_budget")  # it forces what the grammar forbids
    monkeypatch.delitem(ARGUMENTS, "bad_words")
    if in_turn:
        monkeypatch.setitem(PROCESSORS, "follows", Follows)
        monkeypatch.setitem(ARGUMENTS, "follows", {})
    alone = build_stage()
    requests = begin(alone, [[] for _ in range(ROWS)])
    answers = answers_of(requests)
    for _ in range(24):
        step(alone, requests, [[]] * ROWS, answers)
    expected = [list(request.output_token_ids) for request in requests]
    for row in (0, 2):
        assert all(token % 3 == index % 3 for index, token in enumerate(expected[row]))
    rng = random.Random(5)
    lengths = set()
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    answers = answers_of(requests)
    while min(len(request.output_token_ids) for request in requests) < 18:
        drafts = []
        for row, request in enumerate(requests):
            done = len(request.output_token_ids)
            right = expected[row][done : done + rng.randint(0, 4)]
            drafts.append([t if rng.random() < 0.8 else rng.randrange(VOCAB) for t in right])
        lengths |= {len(tokens) for tokens in step(stage, requests, drafts, answers)}
    assert lengths == {1, 2, 3, 4, 5}
    for row, request in enumerate(requests):
        assert list(request.output_token_ids)[:24] == expected[row][: len(request.output_token_ids)]


def test_a_batch_level_processor_without_drafts_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(WholeBatch, "supports_drafts", False)
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    with pytest.raises(PluginContractError) as error:
        rows_of(stage, requests, [[1]] * ROWS)
    assert "plugin 'whole_batch'" in str(error.value)
    assert "cannot be on together with speculation" in str(error.value)


@pytest.fixture
def observing(monkeypatch):
    """Let every request use a processor whose state depends on logits."""
    monkeypatch.setitem(PROCESSORS, "follows", Follows)
    monkeypatch.setitem(ARGUMENTS, "follows", {})


def test_drafts_change_no_token_of_requests_that_observe(observing):
    alone = build_stage()
    requests = begin(alone, [[] for _ in range(ROWS)])
    while len(requests[0].output_token_ids) < 24:
        step(alone, requests, [[]] * ROWS)
    expected = [list(request.output_token_ids) for request in requests]
    assert expected != [tokens[:24] for tokens in EXPECTED]
    rng = random.Random(5)
    lengths = set()
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    while min(len(request.output_token_ids) for request in requests) < 18:
        drafts = []
        for row, request in enumerate(requests):
            done = len(request.output_token_ids)
            right = expected[row][done : done + rng.randint(0, 4)]
            drafts.append([t if rng.random() < 0.8 else rng.randrange(VOCAB) for t in right])
        lengths |= {len(tokens) for tokens in step(stage, requests, drafts)}
    assert lengths == {1, 2, 3, 4, 5}
    for row, request in enumerate(requests):
        assert list(request.output_token_ids)[:24] == expected[row][: len(request.output_token_ids)]


def test_an_observing_class_may_refuse_drafts(observing, monkeypatch):
    monkeypatch.setitem(PROCESSORS, "bytes", Bytes)
    stage = build_stage()
    with pytest.raises(PluginContractError, match=r"'bytes'.*cannot be on together with spec"):
        rows_of(stage, [], [])


class Cautious:
    """Samples the first two rows of each request, then all others; accepts three drafts at most."""

    def verify_drafts(self, step):
        first = [(i, n) for i, own in enumerate(step.drafts) for n in range(min(2, 1 + len(own)))]
        rest = [(i, n) for i, own in enumerate(step.drafts) for n in range(2, min(4, 1 + len(own)))]
        sampled = dict(zip(first, step.sample(first), strict=True))
        sampled |= dict(zip(rest, step.sample(rest), strict=True))
        accepted = []
        for index, drafts in enumerate(step.drafts):
            count = 0
            while count < min(3, len(drafts)) and sampled[index, count] == drafts[count]:
                count += 1
            accepted.append(count)
        return accepted


def test_a_verifier_of_several_passes_changes_no_token():
    stage, lengths = build_stage(), set()
    requests = begin(stage, [[] for _ in range(ROWS)])
    while min(len(r.output_token_ids) for r in requests) < 18:
        known = [len(r.output_token_ids) for r in requests]
        drafts = [EXPECTED[row][done : done + row] for row, done in enumerate(known)]
        lengths |= {len(tokens) for tokens in step(stage, requests, drafts, verifier=Cautious())}
    assert lengths == {1, 2, 3, 4}
    for row, request in enumerate(requests):
        known = list(request.output_token_ids)[:30]
        assert known == EXPECTED[row][: len(known)]


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ([0, 0], "a number for each of 4 requests"),
        ([4, 0, 0, 0], "numbers up to the number of drafts, 3"),
        ([True, 0, 0, 0], "numbers up to the number of drafts"),
        ([1, 1, 2, 1], "drafts that equal the tokens sampled for the rows before them"),
        ([0, 0, 1, 0], None),
        (None, "a number for each of 4 requests"),
    ],
)
def test_only_right_drafts_can_be_accepted(accepted, expected):
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    drafts = [list(EXPECTED[row][:3]) for row in range(ROWS)]
    drafts[2][1] = (drafts[2][1] + 1) % VOCAB
    rows = rows_of(stage, requests, drafts)
    assert DraftVerification().verify_drafts(rows) == [3, 3, 1, 3]
    if expected is None:
        assert rows.defect(accepted) is None
    else:
        assert expected in rows.defect(accepted)


def test_the_first_row_of_each_request_has_to_be_sampled():
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    rows = rows_of(stage, requests, [[1], [], [], []])
    rows.sample([(0, 0), (1, 0), (3, 0)])
    assert "the first row of each request" in rows.defect([0, 0, 0, 0])


def test_a_row_without_the_row_before_it_is_not_sampled(observing):
    stage = build_stage()
    requests = begin(stage, [[] for _ in range(ROWS)])
    rows = rows_of(stage, requests, [list(EXPECTED[0][:2]), [], [], []])
    assert rows.in_turn
    assert rows.sample([(0, 1), (0, 2)]) == [None, None]
    (token,) = rows.sample([(0, 0)])
    assert token is not None
