"""Prompts that come in parts: the state that the frontend keeps of them, with scripted outputs."""

from __future__ import annotations

import pytest
from support.core.output_desk import (
    ABORT,
    CUMULATIVE,
    DELTA,
    ERROR,
    FINAL_ONLY,
    LENGTH,
    STOP,
    TIMEOUT,
    Desk,
    completion,
)

from hardpoint import RequestError
from hardpoint.plugins import EngineCoreOutput

MORE, LAST = {"resumable": True}, {"resumable": False}


@pytest.fixture
def desk(byte_tokenizer):
    return Desk(byte_tokenizer)


def begun(desk, **params):
    desk.add("r", "one", fields=MORE, **params)
    return desk


def test_a_part_that_ends_is_not_the_end(desk):
    begun(desk, output_kind=DELTA)
    assert not desk.process("a").finished
    output = desk.process("b", LENGTH)
    assert (output.finished, completion(output).finish_reason) == (False, "length")
    assert not desk.is_empty
    desk.add("r", " two", fields=LAST)
    output = desk.process("c")
    assert (completion(output).text, completion(output).finish_reason) == ("c", None)
    output = desk.process("d", LENGTH)
    assert (output.finished, completion(output).text) == (True, "d")
    assert desk.is_empty


def test_further_parts_register_nothing_anew(desk):
    begun(desk)
    for _ in range(3):
        desk.add("r", "x", fields=MORE)
    kept = desk.processor
    assert kept.num_unfinished_requests() == 1
    assert (kept._by_parent, kept._by_external) == ({}, {"user's r": {"r": None}})
    kept.drop(["r"])
    assert desk.is_empty


def test_the_prompt_grows_when_the_part_begins(desk):
    begun(desk)
    first = desk.process("a", LENGTH)
    assert first.prompt == "one"
    desk.add("r", " two", fields=MORE)
    desk.add("r", " three", fields=LAST)  # waits for the end of the second part
    second = desk.process("b", LENGTH)
    assert (second.prompt, second.finished) == ("one two", False)
    third = desk.process("c", LENGTH)
    assert (third.prompt, third.finished) == ("one two three", True)
    assert third.prompt_token_ids == desk.tokenizer.encode("one two three")
    assert first.prompt_token_ids == desk.tokenizer.encode("one")
    assert completion(third).text == "abc"


def test_a_last_part_that_comes_early_does_not_end_the_first(desk):
    begun(desk, output_kind=DELTA)
    desk.add("r", " two", fields=LAST)
    assert not desk.process("a", STOP).finished
    assert desk.process("b", STOP).finished
    assert desk.is_empty


def test_final_only_waits_for_the_last_part(desk):
    begun(desk, output_kind=FINAL_ONLY)
    assert desk.process("a", LENGTH) is None
    desk.add("r", " two", fields=LAST)
    assert desk.process("b") is None
    assert completion(desk.process("c", LENGTH)).text == "abc"


def test_completions_keep_their_own_parts(desk):
    params = {"n": 2, "output_kind": DELTA}
    first, second = desk.add("r", "one", fields=MORE, **params)
    assert not desk.process("a", LENGTH, name=first).finished
    assert not desk.process("b", LENGTH, name=second).finished
    desk.add("r", " two", fields=LAST, **params)
    assert not desk.process("c", LENGTH, name=first).finished
    assert desk.process("d", LENGTH, name=second).finished
    assert desk.is_empty


def test_nothing_follows_the_last_part(desk):
    begun(desk)
    desk.add("r", " two", fields=LAST)
    with pytest.raises(RequestError, match="request_id: the prompt of 'r' is complete, nothing ma"):
        desk.add("r", " three", fields=LAST)
    desk.process("a", LENGTH)
    assert desk.process("b", LENGTH).prompt == "one two"


@pytest.mark.parametrize("reason", [ERROR, TIMEOUT, ABORT])
def test_some_ends_are_the_end_of_all(desk, reason):
    begun(desk)
    desk.add("r", " two", fields=MORE)
    output = desk.process("a", reason)
    assert (output.finished, completion(output).finish_reason) == (True, str(reason))
    assert desk.is_empty


def test_an_abort_ends_all(desk):
    begun(desk, stop=["\ufffd"])
    half = EngineCoreOutput(request_id="r", new_token_ids=desk.tokenizer.encode("😀")[:2])
    desk.take(desk.output("a"), half)
    ((_, output),) = desk.processor.abort(["r"]).request_outputs
    assert (output.finished, completion(output).text) == (True, "a")
    assert completion(output).finish_reason == "stop"  # of the whole: nothing follows it
    assert desk.is_empty


class TestStopStrings:
    def test_one_ends_its_part_alone(self, desk):
        begun(desk, stop=["STOP"], output_kind=DELTA)
        desk.add("r", " two", fields=LAST)
        (output,), aborts = desk.take(desk.output("aSTOPb"))
        shown = completion(output)
        assert (shown.text, shown.finish_reason, shown.stop_reason) == ("a", "stop", "STOP")
        assert (output.finished, aborts) == (False, [])
        assert desk.process("c") is None  # the engine's last outputs of that part
        assert desk.process("d", LENGTH) is None
        assert completion(desk.process("e")).text == ""  # it may begin a stop string
        output = desk.process("f", LENGTH)
        assert (completion(output).text, output.finished) == ("ef", True)

    def test_an_error_meanwhile_is_told(self, desk):
        begun(desk, stop=["STOP"])
        desk.process("aSTOP")
        output = desk.process("", ERROR, error="it broke")
        assert (output.finished, completion(output).error) == (True, "it broke")
        assert desk.is_empty

    def test_they_do_not_reach_across_parts(self, desk):
        begun(desk, stop=["STOP", "P"], include_stop_str_in_output=True, output_kind=CUMULATIVE)
        assert completion(desk.process("aSTOP", STOP)).text == "aSTOP"
        desk.add("r", " two", fields=LAST)
        shown = completion(desk.process("b"))
        assert (shown.text, shown.finish_reason) == ("aSTOPb", None)
