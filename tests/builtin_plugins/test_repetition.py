"""Loop detection: the function, and the scheduler that asks it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.driving import run

from hardpoint import SamplingParams
from hardpoint.builtin_plugins.scheduling.live_request import has_repetition
from hardpoint.plugins import RepetitionDetection, RequestError
from hardpoint.testing import scripted_engine, write_scripted_model


def detection(longest, shortest=1, count=3):
    return RepetitionDetection(max_pattern=longest, min_pattern=shortest, min_count=count)


@pytest.mark.parametrize(
    ("tokens", "wanted", "answer"),
    [
        ([], detection(4), False),
        ([7, 7], detection(4), False),
        ([7, 7, 7], detection(4), True),
        ([7, 7, 7, 8], detection(4), False),
        ([9, 1, 2, 1, 2, 1, 2], detection(2), True),
        ([9, 1, 2, 1, 2, 1, 2], detection(1), False),
        ([9, 1, 2, 1, 2, 1, 2, 1], detection(2), True),  # 2 1, three times
        ([9, 1, 2, 1, 2], detection(2), False),
        ([9, 1, 2, 1, 2], detection(2, count=2), True),
        ([1, 2, 3, 1, 9, 3, 1, 2, 3], detection(3), False),
        ([1, 9, 3, 1, 2, 3, 1, 2, 3], detection(3), False),
        ([7] * 5, detection(4, shortest=2), False),
        ([7] * 6, detection(4, shortest=2), True),
        ([7] * 8, detection(4, shortest=3), False),
    ],
)
def test_the_newest_tokens_are_copies_of_a_pattern(tokens, wanted, answer):
    assert has_repetition(tokens, wanted) is answer


@given(
    st.lists(st.integers(0, 1), max_size=40),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(2, 5),
)
def test_agrees_with_comparing_whole_copies(tokens, first, other, count):
    shortest, longest = sorted((first, other))
    naive = any(
        len(tokens) >= length * count
        and tokens[len(tokens) - length * count :] == tokens[len(tokens) - length :] * count
        for length in range(shortest, longest + 1)
    )
    assert has_repetition(tokens, detection(longest, shortest, count)) is naive


def test_the_worst_output_costs_little_per_token():
    """Comparing again for every length would take hundreds of millions of comparisons."""
    tokens = [1] * 80_000 + [2] + [1] * 40_000
    assert has_repetition(tokens, detection(10_000, shortest=10_000, count=4))
    began = time.thread_time()
    assert not has_repetition(tokens, detection(20_000, shortest=10_001, count=4))  # each is likely
    assert time.thread_time() - began < 3


@pytest.fixture
def engine(tmp_path):
    replies = {"loop": "so, " + "la la " * 20, "once": "la la land."}
    engine = scripted_engine(write_scripted_model(tmp_path / "model", replies))
    yield engine
    engine.close()


def only(engine, prompt, **fields):
    params = SamplingParams(temperature=0.0, **({"max_tokens": 100} | fields))
    ((_, token_ids, text, reason, stop_reason, _),) = run(engine, [("r", prompt, params)])["r"][0]
    assert stop_reason is None
    return text, reason, len(token_ids)


class TestInTheEngine:
    def test_a_loop_ends_with_the_copy_that_completes_it(self, engine):
        wanted = RepetitionDetection(max_pattern=3, min_count=4)
        assert only(engine, "loop", repetition_detection=wanted) == (
            "so, la la la la",
            "repetition",
            15,
        )

    def test_without_detection_it_goes_on(self, engine):
        text, reason, _ = only(engine, "loop", max_tokens=130)
        assert (text, reason) == ("so, " + "la la " * 20, "stop")

    def test_min_tokens_holds_it_back(self, engine):
        wanted = RepetitionDetection(max_pattern=3, min_count=4)
        fields = {"repetition_detection": wanted, "min_tokens": 20}
        assert only(engine, "loop", **fields)[1:] == ("repetition", 20)
        assert only(engine, "loop", **fields, max_tokens=20)[1:] == ("repetition", 20)

    def test_what_does_not_loop_is_left_alone(self, engine):
        wanted = RepetitionDetection(max_pattern=3, min_count=3)
        assert only(engine, "once", repetition_detection=wanted)[:2] == ("la la land.", "stop")

    def test_repetition_is_reported_rather_than_length(self, engine):
        wanted = RepetitionDetection(max_pattern=3, min_count=4)
        assert only(engine, "loop", repetition_detection=wanted, max_tokens=15)[1] == "repetition"
        assert only(engine, "loop", repetition_detection=wanted, max_tokens=14)[1] == "length"

    def test_a_stop_token_is_reported_rather_than_repetition(self, engine):
        tokenizer = engine.parts.tokenizer
        (space,) = tokenizer.encode(" ", add_special_tokens=False)
        wanted = RepetitionDetection(max_pattern=3, min_count=2)
        params = SamplingParams(
            temperature=0.0, max_tokens=50, stop_token_ids=[space], repetition_detection=wanted
        )
        ((_, _, _, reason, stop_reason, _),) = run(engine, [("r", "loop", params)])["r"][0]
        assert (reason, stop_reason) == ("stop", space)

    def test_the_prompt_is_no_part_of_the_loop(self, engine):
        wanted = RepetitionDetection(max_pattern=3, min_count=4)
        engine.add_request(
            "long",
            "loop" + "so, " + "la " * 3,
            SamplingParams(temperature=0.0, max_tokens=100, repetition_detection=wanted),
        )
        finished = []
        while engine.has_unfinished_requests():
            finished += [output for output in engine.step() if output.finished]
        assert finished[0].outputs[0].text == "la " * 4
        assert finished[0].outputs[0].finish_reason == "repetition"

    def test_others_go_on(self, engine):
        loops = SamplingParams(
            temperature=0.0,
            max_tokens=100,
            repetition_detection=RepetitionDetection(max_pattern=3, min_count=4),
        )
        free = SamplingParams(temperature=0.0, max_tokens=30)
        done = run(engine, [("loops", "loop", loops), ("free", "loop", free)])
        assert done["loops"][0][0][3] == "repetition"
        assert done["free"][0][0][3] == "length"
        assert len(done["free"][0][0][1]) == 30

    def test_limits_that_contradict_are_refused(self, engine):
        wanted = RepetitionDetection(max_pattern=2, min_pattern=3)
        with pytest.raises(RequestError, match=r"repetition_detection.min_pattern: .* got 3"):
            engine.add_request("r", "loop", SamplingParams(repetition_detection=wanted))
        with pytest.raises(RequestError, match=r"repetition_detection.min_count: .*>= 2.* got 1"):
            engine.add_request(
                "r",
                "loop",
                SamplingParams(
                    repetition_detection=RepetitionDetection(max_pattern=2, min_count=1)
                ),
            )
