"""Steps that overlap on a stand-in for an asynchronous device give the tokens of single steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.builtins.state_models import HybridModel, StateModel, state_config
from support.driving import FINAL, alone, run, summary, varied_jobs
from support.internals import engine_of
from support.plugins.late_ops import KnownOps
from support.samples import Sample
from support.searching import searches_long

from hardpoint import LLM, SamplingParams, plugins
from hardpoint.plugins import EngineHalf, Finish, LogitsProcessor, Phase, StepPart, WorkerHalf
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import scripted_engine
from hardpoint.testing.timing.stream_ops import StreamOps

COUNT = 40 if searches_long() else 12
NUM_SCHEDULES = 1000 if searches_long() else 20
PER_ENGINE = 5
POLICIES = ("fcfs", "priority", "fair", "shortest_first")
AHEAD = {"ops": {"use": "support.plugins.late_ops:KnownOps"}}
STACKS = {
    "defaults": {},
    "chunks-of-16": {"scheduler": {"max_num_batched_tokens": 16}},
    "three-at-once": {"scheduler": {"max_num_seqs": 3}},
    "no-prefix-cache": {"kv_cache": {"prefix_caching": False}},
    "preempting": {
        "max_model_len": 128,
        "kv_cache": {"block_size": 8, "num_blocks": 20},
        "scheduler": {"max_num_batched_tokens": 48},
    },
}


class WritingOps(KnownOps):
    """Writes `num_overlaps` to a file, for a test in another process."""

    contract = 1

    class Options(KnownOps.Options):
        path: str = ""

    def __init__(self, context):
        super().__init__(context)
        self._path = Path(context.options.path)

    def launch_forward(self):
        super().launch_forward()
        self._path.write_text(str(self.num_overlaps))


def overlapping(extra):
    scheduler = {"asynchronous": True, **extra.get("scheduler", {})}
    return {**AHEAD, **extra, "scheduler": scheduler}


@pytest.fixture(scope="module")
def expected(scripted):
    engine = scripted_engine(scripted)
    yield alone(engine, varied_jobs(COUNT))
    engine.close()


@pytest.mark.parametrize("extra", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("per_step", [None, 2])
def test_overlapped_equals_alone(open_engine, expected, extra, per_step):
    engine = open_engine(overlapping(extra))
    assert run(engine, varied_jobs(COUNT), per_step) == expected
    stats = engine.call_utility("scheduler_stats")
    assert not stats.num_waits_for_results
    assert stats.kv_cache_usage == 0
    assert KnownOps.opened[-1].num_overlaps > 5


@pytest.mark.nightly
def test_overlapped_in_another_process(open_engine, expected, tmp_path):
    path = tmp_path / "overlaps"
    tables = {
        "ops": {"use": f"{__name__}:WritingOps"},
        "plugin": {"writing_ops": {"path": str(path)}},
        "executor": {"use": "multiproc"},
    }
    engine = open_engine({**overlapping(tables), "ops": tables["ops"]})
    assert run(engine, varied_jobs(COUNT)) == expected
    assert not engine.call_utility("scheduler_stats").num_waits_for_results
    assert int(path.read_text()) > 5


def test_grammars_delay_sampling_alone(scripted, open_engine):
    params = SamplingParams(
        temperature=0.0, max_tokens=16, structured=StructuredOutputs(regex="[a-f]{4,12}"), **FINAL
    )
    jobs = [(f"r{index}", [index + 65] * 5, params) for index in range(6)]
    plain = scripted_engine(scripted)
    expected = alone(plain, jobs)
    plain.close()
    engine = open_engine(overlapping({}))
    assert run(engine, jobs) == expected
    assert engine.call_utility("scheduler_stats").num_waits_for_results["structured_output"] > 3
    assert KnownOps.opened[-1].num_overlaps > 3


class QuickOps(StreamOps):
    contract = 1

    class Options(StreamOps.Options):
        step_seconds: float = 0.0015


def drawn_job(draw, name, shared):
    prompt = [draw.randrange(256) for _ in range(draw.randint(1, 60))]
    prompt = shared + prompt[:30] if draw.random() < 0.4 else prompt
    fields = {"max_tokens": draw.randint(2, 24), "temperature": draw.choice([0.0, 0.8, 1.2])}
    fields["seed"] = draw.randrange(100)
    if draw.random() < 0.3:
        fields |= {"repetition_penalty": 1.2, "top_k": 30}
    if draw.random() < 0.3:
        fields["logprobs"] = 2
    if draw.random() < 0.3:
        fields["stop_token_ids"] = list(range(draw.randrange(9), 256, 9))
    if draw.random() < 0.2:
        fields["structured"] = StructuredOutputs(regex="(yes|no|maybe)+")
    if draw.random() < 0.2:
        fields["n"] = 2
    if draw.random() < 0.2:
        fields["min_tokens"] = 2
    return name, prompt, SamplingParams(**fields, **FINAL)


def run_schedule(engine, jobs, draw):
    """Run jobs that join at random between aborts and live changes; return those that ended."""
    waiting, live, results = list(jobs), [], {}
    while waiting or engine.has_unfinished_requests():
        choice = draw.random()
        outputs = []
        if choice > 0.7 and waiting:
            live.append(engine.add_request(*waiting.pop(0)))
        elif choice < 0.02 and live:
            engine.abort_requests(live.pop(draw.randrange(len(live))))
        elif choice < 0.04:
            engine.set_policy(draw.choice(POLICIES))
        elif choice < 0.06:
            engine.call_utility("reset_prefix_cache", draw.random() < 0.5)
        elif choice < 0.08:
            engine.call_utility("pause", "keep", draw.random() < 0.5)
            outputs = engine.step()
            engine.call_utility("resume")
        else:
            outputs = engine.step()
        for output in outputs:
            if output.finished and all(c.finish_reason != "abort" for c in output.outputs):
                results[output.request_id] = [summary(output)]
    return results


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, PER_ENGINE))
def test_random_schedules(scripted, open_engine, first):
    draw = random.Random(first)
    tables = {
        "ops": {"use": f"{__name__}:QuickOps"},
        "max_model_len": 128,
        "kv_cache": {"block_size": 8, "num_blocks": draw.choice([20, 24, 40])},
        "scheduler": {
            "max_num_batched_tokens": draw.choice([24, 48, 96]),
            "policy": draw.choice(POLICIES),
        },
    }
    plain = scripted_engine(scripted, {"max_model_len": 128})
    engine = open_engine({**overlapping(tables), "ops": tables["ops"]})
    num_ended = 0
    for seed in range(first, first + PER_ENGINE):
        draw = random.Random(seed)
        shared = [draw.randrange(256) for _ in range(20)]
        jobs = [drawn_job(draw, f"{seed}-{index}", shared) for index in range(12)]
        expected = run(plain, jobs)
        results = run_schedule(engine, jobs, draw)
        assert results == {name: expected[name] for name in results}, f"seed {seed}"
        num_ended += len(results)
    plain.close()
    assert num_ended > 6 * PER_ENGINE
    assert engine.call_utility("scheduler_stats").kv_cache_usage == 0


class Breaks(Sample, LogitsProcessor, contract=1):
    """Makes rows NaN from a number of tokens of its request on: its own, or all of them."""

    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        after: int
        others: bool = False

    def apply(self, logits, rows):
        for index, (request, own) in enumerate(zip(rows.requests, rows.arguments(), strict=True)):
            if len(request.output_token_ids) >= own.after:
                logits[slice(None) if own.others else index] = float("nan")
        return logits


def test_rows_that_break_end_alone_and_the_next_step_runs_again(scripted, open_engine):
    processors = {"plugins": {"enable": [f"{__name__}:Breaks"]}}
    settings = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **FINAL}

    def job(name, **more):
        return name, [len(name), 9, 7], SamplingParams(**settings, **more)

    jobs = [
        job("plain"),
        job("breaks", plugin_args={"breaks": {"after": 6, "others": True}}),
        job("uses it, too", plugin_args={"breaks": {"after": 99}}),
    ]
    engine = scripted_engine(scripted, processors)
    expected = run(engine, jobs)
    engine.close()
    engine = open_engine(overlapping(processors))
    assert run(engine, jobs) == expected
    reasons = {name: completions[0][0][3] for name, completions in expected.items()}
    assert reasons == {"plain": "length", "breaks": "error", "uses it, too": "length"}
    assert KnownOps.opened[-1].num_overlaps > 3


class Spent(Sample, LogitsProcessor, contract=1):
    """Has a state that is empty from the end of a request on."""

    phase = Phase.BIAS
    num_empty = 0

    class Arguments(plugins.Arguments):
        count: int

    def start(self, request):
        return [request.params.stop_token_ids] * request.arguments["spent"].count

    def advance(self, state, token):
        stops = state.pop()
        if token in stops:
            state.clear()
        elif not state:
            return Finish("spent")
        return state

    def apply(self, logits, rows):
        Spent.num_empty += sum(not state for state in rows.states())
        return logits


class Counts(Sample, StepPart, contract=1):
    """Counts the calls of its worker half in each step."""

    calls = []

    def engine_half(self, context):
        class Engine(EngineHalf):
            def uses(self, request):
                return True

            def begin(self, plan):
                return b""

        return Engine()

    def worker_half(self, context):
        class Worker(WorkerHalf):
            def begin(self, plan, data):
                Counts.calls.append([])

            def hidden(self, hidden, rows):
                Counts.calls[-1].append("hidden")

            def after_layers(self):
                Counts.calls[-1].append("after_layers")

        return Worker()


def jobs_with(arguments, **more):
    settings = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **FINAL}
    uses = [{}, {}, {"plugin_args": arguments, **more}]
    return [
        (f"r{index}", [index, 9, 7] * 4, SamplingParams(**settings, **use))
        for index, use in enumerate(uses)
    ]


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("model", [HybridModel, StateModel])
def test_states_advance_once(model, others, tmp_path):
    jobs = jobs_with({"breaks": {"after": 6, "others": others}})

    def results(name, extra):
        extra = {**extra, "plugins": {"enable": [f"{__name__}:Breaks"]}}
        with LLM(config=state_config(tmp_path / name, model, extra)) as llm:
            outputs = run(engine_of(llm), jobs)
            return outputs, engine_of(llm).call_utility("scheduler_stats").num_waits_for_results

    expected, _ = results("plain", {})
    # No step is launched before the end of the one before it, so each takes its whole time.
    short = {"plugin": {"known_ops": {"step_seconds": 0.01}}}
    found, waits = results("overlapping", overlapping(short))
    assert found == expected
    assert list(waits) == [model.__name__]


@pytest.mark.parametrize("others", [False, True])
def test_parts_are_called_once_in_a_step_that_runs_again(open_engine, others):
    Counts.calls.clear()
    enable = [f"{__name__}:Breaks", f"{__name__}:Counts"]
    engine = open_engine(overlapping({"plugins": {"enable": enable}}))
    run(engine, jobs_with({"breaks": {"after": 6, "others": others}}))
    assert KnownOps.opened[-1].num_overlaps > 3
    assert [calls for calls in Counts.calls if calls] == [["hidden", "after_layers"]] * 20


@pytest.mark.parametrize("stops", [[], [*range(0, 256, 3)]], ids=["finish", "stop token"])
def test_no_plugin_runs_after_the_end_of_a_request(scripted, stops):
    jobs = jobs_with({"spent": {"count": 6}}, stop_token_ids=stops)
    enable = {"plugins": {"enable": [f"{__name__}:Spent"]}}
    found, Spent.num_empty = [], 0
    for extra in ({}, overlapping({})):
        engine = scripted_engine(scripted, {**enable, **extra})
        found.append(run(engine, jobs))
        engine.close()
    assert found[0] == found[1]
    assert Spent.num_empty == 0
    assert KnownOps.opened[-1].num_overlaps > 3
