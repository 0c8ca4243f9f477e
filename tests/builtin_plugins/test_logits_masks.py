"""allowed_token_ids, min_tokens and bad_words."""

from __future__ import annotations

import pytest
import torch
from support.builtins.fake_rows import (
    FakeRows,
    applied,
    build,
    prepared,
    request_of,
    rows_of,
    survivors,
)

from hardpoint.builtin_plugins.logits.masks import AllowedTokenIds, BadWords, MinTokens
from hardpoint.plugins import Op, Phase, SamplingParams

ZEROS = torch.zeros(2, 10)


class Spelling:
    """A tokenizer that gives each known text its ids and refuses to add special tokens."""

    texts = {
        "cat": [3],
        " cat": [4],
        "hotdog": [5, 6],
        " hotdog": [7],
        "": [],
        " ": [8],
        "big": [99],
    }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return self.texts.get(text, [9])


class TestAllowedTokenIds:
    def test_leaves_each_row_only_its_own_tokens(self):
        processor = build(AllowedTokenIds, "allowed_token_ids")
        rows = rows_of(
            processor,
            request_of(processor, allowed_token_ids=[1, 2]),
            request_of(processor, allowed_token_ids=[9]),
        )
        edits = processor.edits(rows)
        assert edits.op is Op.KEEP_ONLY
        assert survivors(applied(edits, ZEROS)) == [[1, 2], [9]]

    def test_returns_the_same_edits_until_the_rows_change(self):
        processor = build(AllowedTokenIds, "allowed_token_ids")
        request = request_of(processor, allowed_token_ids=[1])
        rows = rows_of(processor, request)
        first = processor.edits(rows)
        request.output_token_ids.append(1)
        assert processor.edits(rows) is first
        assert processor.edits(FakeRows(processor, [request])) is not first

    def test_refuses_ids_outside_the_vocabulary(self):
        with pytest.raises(ValueError, match=r"expected token ids under 10 .* got 10$"):
            prepared(AllowedTokenIds, allowed_token_ids=[1, 10])
        assert prepared(AllowedTokenIds, allowed_token_ids=[9]).allowed_token_ids == [9]


class TestMinTokens:
    def test_forbids_stop_tokens_of_short_rows_only(self):
        processor = build(MinTokens, "min_tokens")
        short = request_of(processor, output=[5], stop=[0, 3, 3], min_tokens=2)
        long = request_of(processor, output=[5, 5], stop=[0], min_tokens=2)
        edits = processor.edits(rows_of(processor, long, short))
        assert edits.op is Op.SET
        assert survivors(applied(edits, ZEROS)) == [
            list(range(10)),
            [token for token in range(10) if token not in (0, 3)],
        ]

    def test_ends_exactly_when_the_length_is_reached(self):
        processor = build(MinTokens, "min_tokens")
        request = request_of(processor, stop=[0], min_tokens=2)
        rows = rows_of(processor, request)
        first = processor.edits(rows)
        request.output_token_ids.append(1)
        assert processor.edits(rows) is first
        request.output_token_ids.append(1)
        assert processor.edits(rows) is None

    def test_new_edits_when_one_of_two_rows_grows_up(self):
        processor = build(MinTokens, "min_tokens")
        requests = [request_of(processor, stop=[0], min_tokens=n) for n in (1, 2)]
        rows = rows_of(processor, *requests)
        assert list(processor.edits(rows).row) == [0, 1]
        for request in requests:
            request.output_token_ids.append(4)
        assert list(processor.edits(rows).row) == [1]

    def test_a_stop_token_outside_the_vocabulary_needs_no_edit(self):
        processor = build(MinTokens, "min_tokens")
        edits = processor.edits(
            rows_of(processor, request_of(processor, stop=[99, 2], min_tokens=1))
        )
        assert list(edits.token) == [2]

    def test_refuses_a_request_that_may_only_stop(self):
        params = SamplingParams(allowed_token_ids=[2, 3])
        with pytest.raises(ValueError, match=r"5 tokens cannot be produced.*\[2, 3\] ends"):
            prepared(MinTokens, params=params, stop=[1, 2, 3], min_tokens=5)
        assert prepared(MinTokens, params=params, stop=[2], min_tokens=5).min_tokens == 5


class TestBadWords:
    def test_spells_a_word_bare_and_after_a_space(self):
        arguments = prepared(BadWords, bad_words=["cat", " hotdog"], tokenizer=Spelling())
        assert (arguments.sequences, arguments.encoded) == ([], [[3], [4], [5, 6], [7]])

    def test_keeps_equal_spellings_once_and_drops_empty_ones(self):
        arguments = prepared(BadWords, bad_words=["x", "  "], tokenizer=Spelling())
        assert arguments.encoded == [[9], [8]]

    def test_takes_sequences_without_a_tokenizer(self):
        arguments = prepared(BadWords, sequences=[[1, 2]])
        assert (arguments.sequences, arguments.encoded) == ([[1, 2]], [])

    def test_bad_words_need_a_tokenizer(self):
        with pytest.raises(ValueError, match=r"'cat' needs a tokenizer.*bad_words\.sequences"):
            prepared(BadWords, bad_words=["cat"])

    def test_refuses_tokens_outside_the_vocabulary(self):
        with pytest.raises(ValueError, match=r"under 10 .* got 99"):
            prepared(BadWords, bad_words=["big"], tokenizer=Spelling())
        with pytest.raises(ValueError, match=r"under 10 .* got 12"):
            prepared(BadWords, sequences=[[1, 12]])

    def test_forbids_single_tokens_always_and_last_tokens_after_their_prefix(self):
        processor = build(BadWords, "bad_words")
        sequences = [[3], [5, 6], [1, 5, 7], [2, 5, 8]]
        request = request_of(processor, prompt=[5], sequences=sequences)
        rows = rows_of(processor, request)

        def forbidden():
            return set(range(10)) - set(survivors(applied(processor.edits(rows), ZEROS))[0])

        assert forbidden() == {3}  # the prompt does not count
        request.output_token_ids.append(1)
        assert forbidden() == {3}
        request.output_token_ids.append(5)
        assert forbidden() == {3, 6, 7}
        request.output_token_ids.append(6)
        assert forbidden() == {3}

    def test_a_prefix_longer_than_the_output_does_not_match(self):
        processor = build(BadWords, "bad_words")
        rows = rows_of(processor, request_of(processor, output=[5], sequences=[[5, 5, 2]]))
        assert processor.edits(rows) is None

    def test_returns_the_same_edits_while_nothing_changes(self):
        processor = build(BadWords, "bad_words")
        request = request_of(processor, sequences=[[3], [5, 6]])
        rows = rows_of(processor, request)
        first = processor.edits(rows)
        request.output_token_ids.append(1)
        assert processor.edits(rows) is first
        request.output_token_ids.append(5)
        assert processor.edits(rows) is not first

    def test_rows_do_not_mix(self):
        processor = build(BadWords, "bad_words")
        rows = rows_of(
            processor,
            request_of(processor, output=[5], sequences=[[5, 6]]),
            request_of(processor, output=[4], sequences=[[5, 6], [1]]),
        )
        left = survivors(applied(processor.edits(rows), ZEROS))
        assert [set(range(10)) - set(row) for row in left] == [{6}, {1}]


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (AllowedTokenIds, "allowed_token_ids"),
        (MinTokens, "min_tokens"),
        (BadWords, "bad_words"),
    ],
)
def test_masks_run_first_and_honour_their_field(cls, field):
    assert cls.phase is Phase.MASK
    assert cls.params_fields == (field,)
    assert not cls.argmax_invariant
