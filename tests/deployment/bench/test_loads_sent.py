"""How loads are sent: numbers of requests, arrivals, parts, texts, and which turn comes when."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from hardpoint.bench import RequestFields, Traffic
from hardpoint.bench.answers import RequestTimeline
from hardpoint.bench.client import RequestQueue
from hardpoint.bench.load import LoadPart
from hardpoint.bench.measuring import plan_of
from hardpoint.bench.prompts import VOCABULARY, Costs, PromptGenerator
from hardpoint.plugins import ConfigError
from hardpoint.simulation import Lengths, Segment, SimulatedLoad, SimulatedRequest, SyntheticLoad

FORM = RequestFields(model="x", endpoint="completions")


def synthetic(**fields) -> SimulatedLoad:
    return SimulatedLoad(synthetic=SyntheticLoad(**fields))


def request(number: int, session: str | None = None, prompt: tuple = (), **fields):
    prompt = prompt or (Segment(number, 5),)
    output = Segment(number + 1000, 5)
    return SimulatedRequest(at=0.0, prompt=prompt, output=output, session=session, **fields)


@pytest.mark.parametrize(
    ("traffic", "limit", "count"),
    [
        (Traffic(concurrency=1), None, 16),
        (Traffic(concurrency=8), None, 32),
        (Traffic(concurrency=8), 5, 5),
        (Traffic(rate=2.0), None, 60),
        (Traffic(rate=0.1), None, 16),
        (Traffic(), None, 1000),
        (Traffic(concurrency=8, seconds=5), None, None),
        (Traffic(concurrency=8, seconds=5), 7, 7),
    ],
    ids=range(8),
)
def test_numbers_of_requests(traffic, limit, count):
    assert traffic.num_requests(SimulatedLoad(limit=limit)) == count


def test_a_trace_is_sent_whole(tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 1.0, "input_length": 9, "output_length": 2}
    path.write_text("".join(json.dumps({**line, "timestamp": n}) + "\n" for n in range(5)))
    load = SimulatedLoad(trace=str(path))
    assert Traffic(concurrency=1, seconds=9).num_requests(load) == 5
    timed = Traffic(seconds=2.5).timed(load.requests()[1])
    assert [at for at, _ in timed] == [0, 1, 2]


@pytest.mark.parametrize("burstiness", [0.0, 0.25, 1.0, 4.0])
def test_arrivals_have_the_stated_rate_and_variation(burstiness):
    traffic = Traffic(rate=50.0, burstiness=burstiness, seed=3)
    times = list(itertools.islice(traffic.arrivals(), 20_000))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    variation = (statistics.stdev(gaps) / statistics.fmean(gaps)) ** 2
    assert variation == pytest.approx(burstiness, rel=0.1, abs=1e-9)
    again = itertools.islice(Traffic(rate=50.0, burstiness=burstiness, seed=3).arrivals(), 20_000)
    assert times == list(again)
    if burstiness:
        other = Traffic(rate=50.0, burstiness=burstiness, seed=4)
        assert times[:9] != list(itertools.islice(other.arrivals(), 9))


def test_parts_have_whole_conversations_and_together_everything():
    load = synthetic(requests=200, turns=3.0, think_seconds=0.1)
    for found in (load, synthetic(requests=200)):
        requests = list(found.requests()[1])
        parts = [
            [one for _, one in LoadPart(index, 3).chosen((one.at, one) for one in requests)]
            for index in range(3)
        ]
        assert sorted(itertools.chain(*parts), key=lambda one: one.output.id) == sorted(
            requests, key=lambda one: one.output.id
        )
        assert min(map(len, parts)) > 40
        sessions = [{one.session for one in part} - {None} for part in parts]
        assert not (sessions[0] & sessions[1] | sessions[1] & sessions[2])
    assert [LoadPart(index, 3).streams(7) for index in range(3)] == [3, 2, 2]


def test_the_same_segment_has_the_same_text():
    prompts = PromptGenerator(FORM, Costs(), "0")

    def text(*segments):
        return json.loads(prompts.body(request(1, prompt=segments), {}))["prompt"].split()

    shared = Segment(7, 50)
    one, other = text(shared, Segment(8, 10)), text(shared, Segment(9, 10))
    assert (len(one), len(other)) == (60, 60)
    assert one[:50] == other[:50]
    assert one[50:] != other[50:]
    assert set(one) <= set(VOCABULARY)
    assert text(shared) == text(shared)
    assert PromptGenerator(FORM, Costs(), "1").body(request(1), {}) != prompts.body(request(1), {})


def test_texts_have_the_tokens_of_their_costs():
    cost = {entry: 1 + len(entry) // 4 for entry in VOCABULARY}
    prompts = PromptGenerator(FORM, Costs(cost, overhead=12, measured=True), "0")
    for length in (13, 40, 333):
        body = json.loads(prompts.body(request(length, prompt=(Segment(3, length),)), {}))
        assert 12 + sum(cost[entry] for entry in body["prompt"].split()) == length
    short = json.loads(prompts.body(request(1, prompt=(Segment(3, 2),)), {}))
    assert len(short["prompt"].split()) == 1


def test_turns_wait_for_the_turn_before():
    queue = RequestQueue()
    first, second, third = (request(number, "s") for number in range(3))
    other, alone = request(5, "t"), request(6)
    assert queue.offer(first)
    assert not queue.offer(second)
    assert queue.offer(other)
    assert not queue.offer(third)
    assert queue.offer(alone)
    assert queue.end(alone, RequestTimeline(text="x")) is None
    assert queue.end(first, RequestTimeline(text="one")) is second
    assert queue.answers(second) == {1000: "one"}
    assert queue.answers(other) == queue.answers(alone) == {}
    assert queue.end(second, RequestTimeline(error="500")) is third
    assert queue.has_failed(third)
    assert not queue.has_failed(other)
    assert queue.end(third, RequestTimeline(error="not sent")) is None
    assert queue.offer(request(9, "s"))


@pytest.mark.parametrize("error", ["", "500"])
def test_what_no_later_turn_goes_on_from_is_not_kept(error):
    queue = RequestQueue()
    for turn in (request(0, "s"), request(1, "s"), request(2, "s", is_last=True)):
        assert queue.offer(turn)
        assert queue.has_failed(turn) == bool(error and turn.output.id > 1001)
        queue.end(turn, RequestTimeline(text="text", error=error if turn.output.id == 1001 else ""))
        assert bool(queue.answers(turn)) == (turn.output.id == 1000 or not (error or turn.is_last))
    assert not queue.answers(turn)
    assert not queue.has_failed(turn)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"traffic": []}, "traffic: expected at least one, got none"),
        (
            {"traffic": [{"rate": 1.0, "concurrency": 2}]},
            "traffic: expected concurrency or rate, got concurrency 2 and rate 1",
        ),
        (
            {"traffic": [{"burstiness": 2.0}]},
            "traffic.burstiness: expected a rate as well, got 2 without one",
        ),
        (
            {"traffic": [{"rate": 1.0}, {"rate": 1.0}]},
            "traffic: '1 requests/s' is given twice",
        ),
        ({"traffic": [{"rate": 0}]}, r"traffic\[0\].rate: expected a number > 0.*, got 0"),
        ({"traffic": [{"streams": 1}]}, r"traffic\[0\].streams: unknown field"),
        (
            {"traffic": [{}], "fields": {"endpoint": "embeddings"}},
            "fields.endpoint: expected .*chat.*, got 'embeddings'",
        ),
        ({"traffic": [{}], "load": {"trace": "no"}}, "no: the trace cannot be read"),
    ],
    ids=range(8),
)
def test_plans_that_are_wrong(fields, message):
    with pytest.raises((ConfigError, ValueError), match=f"^{message}"):
        plan_of(fields)


def test_lengths_are_those_of_simulations():
    load = synthetic(requests=400, prompt=Lengths(median=100, sigma=0.5))
    lengths = sorted(one.prompt_length for one in load.requests()[1])
    assert 85 < lengths[200] < 115
