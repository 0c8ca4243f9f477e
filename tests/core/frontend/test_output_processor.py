"""The output processor alone, with scripted outputs of an engine."""

from __future__ import annotations

import itertools

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
from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.testing import EOS


@pytest.fixture
def desk(byte_tokenizer):
    return Desk(byte_tokenizer)


class TestUnknownIds:
    def test_one_that_was_never_seen_is_skipped(self, desk):
        desk.add("known")
        outputs, aborts = desk.take(desk.output("a", name="who"), desk.output("b", name="known"))
        assert [o.request_id for o in outputs] == ["user's known"]
        assert aborts == []

    def test_one_that_was_aborted_is_skipped(self, desk):
        desk.add()
        desk.processor.abort(["r"])
        assert desk.take(desk.output("a"), desk.output("b", LENGTH)) == ([], [])

    def test_one_that_has_ended_is_skipped(self, desk):
        desk.add()
        outputs, aborts = desk.take(desk.output("a", LENGTH), desk.output("b", LENGTH))
        assert len(outputs) == 1
        assert aborts == []
        assert desk.is_empty


class TestFaultsOfTheTokenizer:
    @pytest.fixture
    def half(self, desk, monkeypatch):
        """The token of half a character, with a tokenizer whose `decode` fails."""
        monkeypatch.setattr(TransformersTokenizer, "decode", lambda *_, **__: 1 / 0)
        desk.add()
        return [desk.tokenizer.encode("é")[0]]

    def test_one_at_the_end_is_the_end(self, desk, half):
        output = desk.process(finish=LENGTH, ids=half)
        assert completion(output).finish_reason == "error"
        assert completion(output).error.endswith(
            "its decode failed: ZeroDivisionError: division by zero"
        )
        assert desk.is_empty

    def test_one_in_an_abort_is_shown(self, desk, half):
        desk.process(ids=half)
        processed = desk.processor.abort(["r"])
        ((_, output),) = processed.request_outputs
        assert (completion(output).finish_reason, processed.aborts) == ("error", ["r"])
        assert processed.faults[0][:2] == ("transformers", "r")
        assert desk.is_empty


class TestStopStrings:
    def test_one_found_while_the_engine_goes_on_aborts_there(self, desk):
        desk.add(stop=["STOP"])
        assert completion(desk.process("a ST")).finish_reason is None
        (output,), aborts = desk.take(desk.output("OP and more"))
        assert (completion(output).text, completion(output).finish_reason) == ("a ", "stop")
        assert completion(output).stop_reason == "STOP"
        assert output.finished
        assert aborts == ["r"]
        assert desk.is_empty

    @pytest.mark.parametrize("reason", [STOP, LENGTH])
    def test_one_found_at_the_engines_own_end_needs_no_abort(self, desk, reason):
        desk.add(stop=["c"])
        output = desk.output("abcd", reason)
        if reason is STOP:
            output.new_token_ids.append(EOS)
        (output,), aborts = desk.take(output)
        assert aborts == []
        found = completion(output)
        assert (found.text, found.finish_reason, found.stop_reason) == ("ab", "stop", "c")

    def test_without_one_the_engines_reason_stands(self, desk):
        desk.add(stop=["x"], stop_token_ids=[7])
        found = completion(desk.process("ab", STOP, stop_reason=7))
        assert (found.finish_reason, found.stop_reason) == ("stop", 7)

    @pytest.mark.parametrize("text", ["abSTOPcd", "abSTOP"])
    def test_one_before_an_error_in_the_same_message_is_the_end(self, desk, text):
        """As where the error would have come by itself, to a request that has ended."""
        desk.add(stop=["STOP"])
        (output,), aborts = desk.take(desk.output(text, ERROR, error="dry: it broke"))
        found = completion(output)
        assert (found.finish_reason, found.error) == ("stop", None)
        assert (found.text, found.stop_reason) == ("ab", "STOP")
        assert aborts == []

    def test_an_error_stays_an_error(self, desk):
        desk.add(stop=["STOP"])
        desk.take(desk.output("abSTO"))
        (output,), aborts = desk.take(desk.output("", ERROR, error="dry: it broke"))
        found = completion(output)
        assert (found.finish_reason, found.error) == ("error", "dry: it broke")
        assert (found.text, found.stop_reason) == ("abSTO", None)
        assert aborts == []

    @pytest.mark.parametrize("reason", [TIMEOUT, ABORT])
    def test_a_text_that_is_whole_was_not_cut_off(self, desk, reason):
        """The request ended after its stop string, which the engine does not know."""
        desk.add(stop=["STOP"])
        found = completion(desk.process("abSTOPcd", reason))
        assert (found.text, found.finish_reason, found.stop_reason) == ("ab", "stop", "STOP")
        desk.add(stop=["STOP"])
        found = completion(desk.process("abSTO", reason))
        assert (found.text, found.stop_reason) == ("abSTO", None)
        assert found.finish_reason == str(reason)

    def test_an_abort_here_takes_what_is_there(self, desk):
        desk.add(stop=["STOP"])
        desk.process("abST")
        ((_, output),) = desk.processor.abort(["r"]).request_outputs
        assert completion(output).text == "abST"
        assert completion(output).finish_reason == "abort"


class TestStreamInterval:
    @pytest.fixture
    def desk(self, byte_tokenizer):
        return Desk(byte_tokenizer, stream_interval=5)

    @pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
    def test_first_and_last_at_once_and_the_others_by_five(self, desk, kind):
        ids = desk.add(n=3, output_kind=kind)
        counts = {index: [] for index in range(3)}
        texts = dict.fromkeys(range(3), "")
        for number, (letter, name) in enumerate(itertools.product("abcdefghijklm", ids)):
            last = LENGTH if letter == "m" else None
            output = desk.process(letter, last, name=name)
            if output is None:
                continue
            shown = completion(output)
            counts[shown.index].append(len(shown.token_ids))
            texts[shown.index] = (texts[shown.index] if kind is DELTA else "") + shown.text
            assert output.finished == (number == 38)
            assert shown.finish_reason == ("length" if letter == "m" else None)
        expected = [1, 5, 5, 2] if kind is DELTA else [1, 6, 11, 13]
        assert counts == dict.fromkeys(range(3), expected)
        assert texts == dict.fromkeys(range(3), "abcdefghijklm")

    def test_one_that_ends_at_once(self, desk):
        desk.add(output_kind=DELTA)
        assert completion(desk.process("a", LENGTH)).text == "a"
        assert desk.is_empty


class TestLogprobs:
    def test_the_sum_is_whole_in_every_delta(self, desk):
        desk.add(output_kind=DELTA, logprobs=0)
        sums, parts = [], []
        for text, finish in [("a", None), ("bc", None), ("d", LENGTH)]:
            shown = completion(desk.process(text, finish, logprobs=desk.logprobs(text)))
            sums.append(shown.cumulative_logprob)
            parts.append([list(entry) for entry in shown.logprobs])
            assert len(shown.logprobs) == len(shown.token_ids) == len(text)
        assert sums == [-1.0, -3.0, -4.0]
        assert [len(part) for part in parts] == [1, 2, 1]

    def test_an_end_without_tokens_has_none(self, desk):
        desk.add(output_kind=DELTA, logprobs=0)
        desk.process("ab", logprobs=desk.logprobs("ab"))
        shown = completion(desk.process("", ABORT))
        assert (shown.token_ids, shown.text, shown.logprobs) == ([], "", [])
        assert shown.cumulative_logprob == -2.0
        assert shown.finish_reason == "abort"

    def test_those_behind_a_stop_string_are_dropped(self, desk):
        desk.add(logprobs=0, stop=["b"])
        shown = completion(desk.process("abc", logprobs=desk.logprobs("abc")))
        assert (len(shown.logprobs), shown.cumulative_logprob) == (2, -2.0)


class TestWhatUsersGet:
    def test_reasons_are_none_until_the_end(self, desk):
        desk.add(stop_token_ids=[7])
        for _ in range(3):
            shown = completion(desk.process("a"))
            assert (shown.finish_reason, shown.stop_reason) == (None, None)
        shown = completion(desk.process("a", STOP, stop_reason=7))
        assert (shown.finish_reason, shown.stop_reason) == ("stop", 7)

    def test_each_completion_has_its_index(self, desk):
        first, second = desk.add(n=2)
        assert completion(desk.process("a", name=second)).index == 1
        assert completion(desk.process("b", name=first)).index == 0
        ended = desk.process("c", LENGTH, name=second)
        assert (completion(ended).text, ended.finished) == ("ac", False)
        ended = desk.process("d", LENGTH, name=first)
        assert (completion(ended).text, ended.finished) == ("bd", True)

    def test_fields_of_the_cache_and_the_connector(self, desk):
        desk.add("r", "prompt")
        output = desk.process("a")
        assert (output.num_cached_tokens, output.kv_transfer_params) == (None, None)
        assert desk.process("b", num_cached_tokens=4).num_cached_tokens == 4
        output = desk.process("c", LENGTH, kv_transfer_params={"blocks": [3]})
        assert (output.num_cached_tokens, output.kv_transfer_params) == (4, {"blocks": [3]})
        assert (output.request_id, output.prompt) == ("user's r", "prompt")
        assert output.prompt_token_ids == desk.tokenizer.encode("prompt")

    def test_final_only_gathers_in_silence(self, desk):
        desk.add(output_kind=FINAL_ONLY, logprobs=0)
        for text in ("ab", "c", ""):
            assert desk.process(text, logprobs=desk.logprobs(text), num_cached_tokens=2) is None
        output = desk.process("d", LENGTH, logprobs=desk.logprobs("d"))
        shown = completion(output)
        assert (shown.text, len(shown.token_ids), len(shown.logprobs)) == ("abcd", 4, 4)
        assert (output.finished, output.num_cached_tokens) == (True, 2)

    def test_final_only_waits_for_all_completions(self, desk):
        first, second = desk.add(n=2, output_kind=FINAL_ONLY)
        assert desk.process("b", LENGTH, name=second) is None
        output = desk.process("a", LENGTH, name=first)
        assert [(c.index, c.text) for c in output.outputs] == [(0, "a"), (1, "b")]
        assert output.finished

    def test_without_detokenizing(self, desk):
        desk.add(detokenize=False, output_kind=DELTA)
        tokens = desk.tokenizer.encode("abc")
        shown = [completion(desk.process("ab")), completion(desk.process("c", LENGTH))]
        assert [c.token_ids for c in shown] == [tokens[:2], tokens[2:]]
        assert [c.text for c in shown] == ["", ""]


def test_a_live_id_is_not_registered_twice(desk):
    desk.add()
    with pytest.raises(RequestError, match="request_id: 'r' is the id of a live request"):
        desk.add()
    assert completion(desk.process("a", LENGTH)).text == "a"
    assert desk.is_empty
