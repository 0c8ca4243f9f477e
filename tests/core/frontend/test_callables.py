"""Functions inside SamplingParams, in the caller's process."""

from __future__ import annotations

import pytest
from support.driving import run

from hardpoint import RequestError, RequestOutputKind, SamplingParams
from hardpoint.testing import scripted_engine

FINAL = {"output_kind": RequestOutputKind.FINAL_ONLY, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(scripted):
    engine = scripted_engine(scripted)
    yield engine
    engine.close()


def only(token: int):
    def keep(output_ids, logits):
        logits[:token] = -float("inf")
        logits[token + 1 :] = -float("inf")
        return logits

    return keep


def tokens(engine, *calls, prompt="x", **fields):
    params = SamplingParams(**{"max_tokens": 4, **fields, **FINAL}, logits_processors=list(calls))
    return run(engine, [("r", prompt, params)])["r"][0][0][1]


def test_two_parameters_are_outputs_and_logits(engine):
    assert tokens(engine, only(70)) == [70] * 4


def test_three_parameters_get_the_prompt_first(engine):
    def copies_the_prompt(prompt_ids, output_ids, logits):
        return only(prompt_ids[len(output_ids)])([], logits)

    assert tokens(engine, copies_the_prompt, prompt=[9, 8, 7, 6]) == [9, 8, 7, 6]


def test_several_run_in_order_and_others_are_not_touched(engine):
    def two_down(output_ids, logits):
        return logits.roll(-2)

    plain = tokens(engine, temperature=0.0)
    assert tokens(engine, only(70), two_down, temperature=0.0) == [68] * 4
    jobs = [
        (
            f"r{i}",
            [i],
            SamplingParams(
                seed=i, max_tokens=6, logits_processors=[only(70)] if i % 2 else [], **FINAL
            ),
        )
        for i in range(8)
    ]
    together = run(engine, jobs, per_step=2)
    for index, job in enumerate(jobs):
        assert together[f"r{index}"] == run(engine, [job])[f"r{index}"]
        assert (together[f"r{index}"][0][0][1] == [70] * 6) == (index % 2 == 1)
    assert tokens(engine, temperature=0.0) == plain


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("no callable", "logits_processors[0]: expected a callable with exactly two positional"),
        (lambda logits: logits, "or three (prompt_ids, output_ids, logits), got <lambda>(logits)"),
        (lambda *ids: ids[-1], "'ids' is variadic"),
        (lambda ids, logits, scale=1.0: logits, "'scale' has a default"),
    ],
)
def test_other_forms_are_refused_by_name(engine, call, words):
    with pytest.raises(RequestError) as error:
        engine.add_request("bad", "x", SamplingParams(logits_processors=[call]))
    assert words in str(error.value)
    with pytest.raises(RequestError, match="logits_processors: expected a list, got function"):
        engine.add_request("bad", "x", SamplingParams(logits_processors=only(3)))


def test_one_that_raises_ends_its_own_request(engine):
    def broken(output_ids, logits):
        raise ZeroDivisionError("by zero")

    good = SamplingParams(temperature=0.0, max_tokens=3, **FINAL)
    expected = run(engine, [("good", "x", good)])
    bad = SamplingParams(max_tokens=3, logits_processors=[broken], **FINAL)
    results = run(engine, [("good", "x", good), ("bad", "x", bad)])
    assert results["good"] == expected["good"]
    assert results["bad"][0][0][3] == "error"
    assert engine.health().ok  # the plugin is ours, and the fault is the caller's


class Counting:
    """Chooses the token of its first call, then the next one, and so on."""

    def __init__(self, first: int) -> None:
        self.next = first

    def __call__(self, output_ids, logits):
        token, self.next = self.next, self.next + 1
        return only(token)(output_ids, logits)


def test_one_that_counts_its_calls_does_so_with_drafts_and_for_each_completion(engine, open_engine):
    calls = [Counting(65)]
    params = SamplingParams(n=2, max_tokens=12, logits_processors=calls, **FINAL)
    expected = run(engine, [("r", [9, 8], params)])
    assert [completion[1] for completion in expected["r"][0]] == [list(range(65, 77))] * 2
    assert calls[0].next == 65  # the caller's own is not called
    speculating = {
        "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False},
        "plugin": {
            "scripted_speculator": {"right": 0.7, "replies": [[[9, 8], list(range(65, 77))]]}
        },
    }
    drafting = open_engine(speculating)
    assert run(drafting, [("r", [9, 8], params)]) == expected
    stats = drafting.call_utility("scheduler_stats")
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
