"""State that depends on logits: kept through preemption and pauses, one version per token."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from support.driving import FINAL, alone, drafting, run, summary
from support.fault_cases import run_all
from support.internals import core_of, worker_of
from support.plugins.observing import Follows, TwoBatches

from hardpoint import PluginError, SamplingParams
from hardpoint.core.worker.sampling.pipeline import NUM_VERSIONS, ObservedStates
from hardpoint.errors import PluginContractError
from hardpoint.plugins import BatchLogitsProcessor, LogitsContext, LogitsProcessor, Phase, State
from hardpoint.testing import scripted_engine
from hardpoint.testing.engine_access import check_plugin_class

HERE = "support.plugins.observing"
ENABLE = {"plugins": {"enable": [f"{HERE}:Follows", f"{HERE}:Bytes"]}}


def params(**fields):
    used = {"follows": {}} | fields.pop("plugin_args", {})
    defaults = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True}
    return SamplingParams(**defaults | fields, plugin_args=used, **FINAL)


JOBS = [
    ("greedy", [1, 2, 3], params(temperature=0.0)),
    ("seeded", [4] * 30, params(n=2)),
    ("both", [5] * 9, params(plugin_args={"bytes": {}}, top_p=0.9)),
    ("logprobs", [6], params(logprobs=2, temperature=0.7)),
    ("plain", [7, 8], SamplingParams(temperature=1.0, seed=9, max_tokens=20, **FINAL)),
]


@pytest.fixture(scope="module")
def expected(scripted):
    results = {}
    for job in JOBS:
        engine = scripted_engine(scripted, ENABLE)
        results |= run(engine, [job])
        engine.close()
    return results


def test_it_has_the_threads_that_its_environment_names():
    """Also where nothing set them before: states depend on the last bits of logits."""
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


def test_the_state_changes_the_text(open_engine, expected):
    engine = open_engine(ENABLE)
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **FINAL)
    assert run(engine, [("greedy", [1, 2, 3], plain)])["greedy"] != expected["greedy"]


SMALL_POOL = {"kv_cache": {"block_size": 8, "num_blocks": 12}, "max_model_len": 64}


@pytest.mark.parametrize(
    "extra",
    [{}, {"executor": {"use": f"{HERE}:TwoBatches"}}],
    ids=["one batch", "two batches"],
)
@pytest.mark.parametrize("pool", [{}, SMALL_POOL], ids=["room", "small pool"])
def test_a_batch_equals_requests_alone(open_engine, expected, extra, pool):
    engine = open_engine(ENABLE | extra | pool)
    assert run(engine, JOBS, 1) == expected
    assert num_kept(engine) == 0


@pytest.mark.parametrize("pool", [{}, SMALL_POOL], ids=["room", "small pool"])
def test_drafts_change_nothing(open_engine, pool):
    follows = [f"{HERE}:Follows"]  # the other one supports no drafts
    jobs = [job for job in JOBS if job[0] != "both"]
    engine = open_engine({"plugins": {"enable": follows}})
    expected = alone(engine, jobs)
    engine.close()
    engine = open_engine(pool | drafting(jobs, expected, follows))
    assert run(engine, jobs, 1) == expected
    assert engine.call_utility("scheduler_stats").num_accepted_drafts > 20


@pytest.mark.parametrize(
    ("extra", "period"),
    # A preemption drops the tokens of a step under way; there has to be one that is not dropped.
    [({}, 1), ({"executor": {"use": f"{HERE}:TwoBatches"}}, 3)],
    ids=["one batch", "two batches"],
)
def test_preemption_at_every_token_changes_nothing(open_engine, expected, extra, period):
    engine = open_engine(ENABLE | extra)
    finals = {}
    for request_id, prompt, settings in JOBS:
        engine.add_request(request_id, prompt, settings)
    steps = itertools.count()
    while engine.has_unfinished_requests():
        finals |= {output.request_id: output for output in engine.step() if output.finished}
        if next(steps) % period == 0:
            engine.call_utility("reset_prefix_cache", True)
    assert {name: [summary(final)] for name, final in finals.items()} == expected


def test_a_fault_of_another_plugin_is_isolated_and_tokens_are_observed_once(open_engine, expected):
    enable = [*ENABLE["plugins"]["enable"], "support.plugins.faulty:Dense"]
    engine = open_engine({"plugins": {"enable": enable}})
    faulty = params(plugin_args={"dense": {"how": "raise"}})
    finals = run_all(engine, [("guilty", [9], faulty), *JOBS])
    assert finals.pop("guilty").outputs[0].finish_reason == "error"
    assert {name: [summary(final)] for name, final in finals.items()} == expected


def test_in_a_process_of_its_own(open_engine, expected):
    engine = open_engine(ENABLE | SMALL_POOL | {"engine": {"in_process": False}})
    assert run(engine, JOBS) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_during_a_pause_changes_nothing(open_engine, expected, level):
    engine = open_engine(ENABLE)
    engine.add_request(*JOBS[0])
    for _ in range(7):
        engine.step()
    engine.call_utility("sleep", level, "keep")
    engine.call_utility("wake_up")
    assert [summary(run_all(engine, [])["greedy"])] == expected["greedy"]


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        ("raise", "its observe failed: ZeroDivisionError: broken observe"),
        ("large", "its observe failed: ValueError: expected a state of at most max_state_bytes"),
        ("type", "its observe failed: TypeError: expected a state of type State, got dict"),
    ],
)
def test_a_fault_ends_the_request_alone(open_engine, expected, fail, words):
    engine = open_engine(ENABLE)
    bad = ("bad", [9, 9], params(plugin_args={"follows": {"fail": fail, "after": 4}}))
    finals = run_all(engine, [*JOBS[:2], bad])
    (output,) = finals["bad"].outputs
    assert output.finish_reason == "error"
    assert output.error.startswith(f"plugin 'follows' ({HERE}:Follows)")
    assert words in output.error
    assert [summary(finals["seeded"])] == expected["seeded"]


def test_aborted_requests_leave_nothing(open_engine):
    engine = open_engine(ENABLE)
    for request_id, prompt, settings in JOBS:
        engine.add_request(request_id, prompt, settings)
    for _ in range(3):
        engine.step()
    assert num_kept(engine) == 5
    engine.abort_requests([job[0] for job in JOBS])
    engine.add_request("last", [1], SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    assert num_kept(engine) == 0


class Request:
    request_id = "r"

    def __init__(self, outputs):
        self.output_token_ids = outputs
        self.arguments = {"follows": Follows.Arguments()}


def build(cls, name):
    context = LogitsContext(
        name=name, options=None, device=torch.device("cpu"), vocab_size=9, max_num_seqs=1, ops=None
    )
    return cls(context)


def test_a_request_goes_on_from_the_state_of_its_tokens():
    processor, states = build(Follows, "follows"), ObservedStates()
    request = Request([])
    state = states.start(processor, request)
    for token in range(12):
        request.output_token_ids.append(token)
        state = processor.observe(state, token, -1.0)
        states.record(processor, request, state)
    again = states.start(processor, Request(list(range(9))))
    assert (again.total, again.tokens) == (-9.0, 9)
    with pytest.raises(LookupError, match="no state after 10 output tokens is kept"):
        states.start(processor, Request(list(range(10))))  # those tokens were dropped
    with pytest.raises(LookupError, match="no state after 3 output tokens is kept"):
        states.start(processor, Request(list(range(12 - NUM_VERSIONS))[:3]))


class Plain(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    def start(self, request):
        return b""

    def apply(self, logits, rows):
        return logits


def observe(self, state, token, logprob):
    return state


class Fields(State):
    value: float


class WholeBatch(BatchLogitsProcessor):
    contract = 1
    phase = Phase.BIAS
    observe = observe

    def update_state(self, update):
        pass

    def apply(self, logits):
        return logits


def derived(**members):
    return type("Derived", (Plain,), {"contract": 1, **members})


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (derived(State=bytes), "declares State or max_state_bytes but has no observe"),
        (WholeBatch, "it has observe, which the batch form does not have"),
        (derived(observe=observe, start=LogitsProcessor.start), "it needs start for the first"),
        (derived(observe=observe, advance=lambda self, state, token: state), "and no advance"),
        (derived(observe=observe, max_state_bytes=8), "its State must be declared"),
        (derived(observe=observe, State=dict, max_state_bytes=8), "its State must be declared"),
        (derived(observe=observe, State=Fields), "max_state_bytes must be an int >= 1, got 0"),
    ],
)
def test_what_an_observing_class_must_declare(cls, words):
    with pytest.raises(PluginContractError, match=words):
        check_plugin_class(cls, "logits_processors", "x")


class Deep(TwoBatches):
    contract = 1
    max_concurrent_batches = 8

    def start(self):
        raise AssertionError("refused before weights are read")


def test_a_pipeline_that_is_too_deep_is_refused(scripted):
    with pytest.raises(
        PluginError, match=r"'deep'.*max_concurrent_batches: expected 1 to 7, got 8"
    ):
        scripted_engine(scripted, {"executor": {"use": f"{__name__}:Deep"}})


def test_a_request_whose_id_has_just_ended_has_a_state_of_its_own(open_engine, expected):
    engine = open_engine({**ENABLE, "engine": {"random_request_ids": False}})
    (_, prompt, used) = JOBS[0]
    engine.add_request("greedy", prompt, used)
    engine.step()
    engine.abort_requests("greedy")  # the next plan reports the end, and has the other one
    assert run(engine, [("greedy", prompt, used)])["greedy"] == expected["greedy"]
    assert num_kept(engine) == 0


def num_kept(engine):
    """Return for how many requests states are kept, once the worker knows which have ended."""
    if not engine.has_unfinished_requests():
        while core_of(engine).has_requests():
            engine.step()
    return len(worker_of(engine).observed_states)
