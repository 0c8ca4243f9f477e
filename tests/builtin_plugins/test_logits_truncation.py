"""top_k, top_p and min_p, against their definitions."""

from __future__ import annotations

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.fake_rows import build, request_of, rows_of, survivors
from support.searching import examples

from hardpoint.builtin_plugins.logits.truncation import MinP, TopK, TopP
from hardpoint.plugins import ModelError, Ops, Phase
from hardpoint.testing import load_ops

VOCAB = 12
row_values = st.lists(
    st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 1.0, 4.0]) | st.floats(-20, 20, width=32),
    min_size=VOCAB,
    max_size=VOCAB,
)


@functools.cache
def all_ops():
    """Return the operations available here, of the torch path first."""
    paths = [load_ops(torch.float32)]
    with contextlib.suppress(ModelError):
        paths.append(load_ops(torch.float32, use="native_cpu"))
    return paths


def run(cls, name, field, values, logits):
    """Return the logits that a processor leaves, the same with all operations."""
    results = []
    for ops in all_ops():
        processor = build(cls, name, logits.shape[1], ops)
        rows = rows_of(processor, *(request_of(processor, **{field: value}) for value in values))
        results.append(processor.apply(logits.clone(), rows))
    for result in results:
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))
    return results[0]


def keeps_the_rest(result, logits):
    is_kept = result > -math.inf
    return torch.equal(result[is_kept], logits[is_kept])


class TestTopK:
    @examples(8)
    @given(rows=st.lists(st.tuples(st.integers(-1, VOCAB + 3), row_values), min_size=1, max_size=4))
    def test_keeps_what_is_at_least_the_kth(self, rows):
        logits = torch.tensor([values for _, values in rows])
        result = run(TopK, "top_k", "top_k", [k for k, _ in rows], logits)
        for (k, values), left in zip(rows, survivors(result), strict=True):
            limit = sorted(values, reverse=True)[min(k, VOCAB) - 1] if k > 0 else -math.inf
            assert left == [t for t, v in enumerate(values) if v >= limit and v > -math.inf]
        assert keeps_the_rest(result, logits)

    def test_ties_at_the_kth_are_all_kept(self):
        logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
        assert survivors(run(TopK, "top_k", "top_k", [2], logits)) == [[0, 1, 2]]

    @pytest.mark.parametrize("off", [0, -1, 4, 9])
    def test_off_changes_nothing(self, off):
        logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
        assert torch.equal(run(TopK, "top_k", "top_k", [off], logits), logits)


class TestTopP:
    @examples(8)
    @given(
        rows=st.lists(
            st.tuples(st.floats(0.015625, 1, width=32), row_values.filter(lambda v: max(v) > -20)),
            min_size=1,
            max_size=4,
        )
    )
    def test_keeps_the_smallest_set_that_reaches_p_and_its_ties(self, rows):
        logits = torch.tensor([values for _, values in rows])
        result = run(TopP, "top_p", "top_p", [p for p, _ in rows], logits)
        for (p, _), before, after in zip(rows, logits.double(), result, strict=True):
            probs = before.softmax(-1)
            is_kept = after > -math.inf
            total = probs[is_kept].sum()
            assert total >= min(p, 1) - 1e-6
            if p < 1:  # without the least likely ones that were kept, p is not reached
                least = before[is_kept].min()
                assert probs[before > least].sum() < p + 1e-6
                assert torch.equal(is_kept, before >= least)
            else:
                assert torch.equal(after, before.float())
        assert keeps_the_rest(result, logits)

    def test_known_distribution(self):
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(4, 1)
        result = run(TopP, "top_p", "top_p", [0.4, 0.6, 0.85, 1.0], logits)
        assert survivors(result) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]

    @pytest.mark.parametrize("shift", [-30.0, 0.0, 25.0])
    def test_a_set_that_reaches_p_exactly_is_not_enlarged(self, shift):
        logits = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]]).log() + shift
        assert survivors(run(TopP, "top_p", "top_p", [0.8, 0.7], logits)) == [[0, 1], [0, 1]]
        assert survivors(run(TopP, "top_p", "top_p", [0.5, 0.9], logits)) == [[0], [0, 1, 2]]
        assert survivors(run(TopP, "top_p", "top_p", [0.81, 0.91], logits)) == [[0, 1, 2, 3]] * 2

    def test_the_likeliest_token_always_stays(self):
        logits = torch.zeros(1, 8)
        logits[0, 3] = 1.0
        assert survivors(run(TopP, "top_p", "top_p", [1e-9], logits)) == [[3]]

    @pytest.mark.parametrize("vocab", [63, 5000, 20_001])
    @pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 20.0])
    def test_gives_exactly_what_a_full_sort_gives(self, scale, vocab):
        logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(7)) * scale
        logits[1, 40:] = -math.inf
        logits[2] = logits[2].round()  # many ties
        logits[3, 5] = -math.inf
        values = [0.9, 0.9999, 0.99, 0.9999, 1.0, 0.999999, 0.5, 0.05]
        actual = run(TopP, "top_p", "top_p", values, logits)
        expected = logits.clone()
        Ops.keep_top_p(all_ops()[0], expected, torch.tensor(values).unsqueeze(1))
        assert torch.equal(actual, expected)

    def test_rows_are_not_sorted_whole(self, monkeypatch):
        sizes, argsort = [], np.argsort
        monkeypatch.setattr(np, "argsort", lambda x: sizes.append(x.size) or argsort(x))
        peaked, wide = torch.zeros(8, 20_000), torch.randn(8, 20_000) * 2
        peaked[:, 7] = 30.0
        run(TopP, "top_p", "top_p", [0.9] * 8, peaked)
        assert sizes == []
        run(TopP, "top_p", "top_p", [0.999] * 8, wide)
        assert len(sizes) == 8  # of what is near the ends of their nuclei
        assert max(sizes) < 500

    def test_a_row_is_truncated_the_same_alone_and_in_a_batch(self):
        logits = torch.randn(8, 3001, generator=torch.Generator().manual_seed(1)) * 2
        batch = run(TopP, "top_p", "top_p", [0.9] * 8, logits)
        for row in range(8):
            alone = run(TopP, "top_p", "top_p", [0.9], logits[row : row + 1])
            assert torch.equal(alone[0], batch[row])


class TestMinP:
    def test_known_distribution(self):
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(4, 1)
        result = run(MinP, "min_p", "min_p", [0.0, 0.2, 0.4, 0.8], logits)
        assert survivors(result) == [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]

    def test_one_keeps_every_likeliest_token(self):
        logits = torch.tensor([[1.0, 3.0, 3.0, 2.9]])
        assert survivors(run(MinP, "min_p", "min_p", [1.0], logits)) == [[1, 2]]

    def test_a_token_exactly_at_the_border_stays(self):
        logits = torch.tensor([[0.0, 0.0, 0.0]])
        logits[0, 1] = torch.tensor(0.5).log()
        logits[0, 2] = torch.nextafter(logits[0, 1], torch.tensor(-1.0))
        assert survivors(run(MinP, "min_p", "min_p", [0.5], logits)) == [[0, 1]]

    def test_does_not_underflow_where_probabilities_would(self):
        logits = torch.tensor([[0.0, -200.0, -250.0]])  # exp(-200) is 0 in float32
        assert survivors(run(MinP, "min_p", "min_p", [0.0], logits)) == [[0, 1, 2]]
        assert survivors(run(MinP, "min_p", "min_p", [1e-30], logits)) == [[0]]

    @examples(8)
    @given(rows=st.lists(st.tuples(st.floats(0, 1, width=32), row_values), min_size=1, max_size=4))
    def test_compares_with_the_maximum(self, rows):
        logits = torch.tensor([values for _, values in rows])
        result = run(MinP, "min_p", "min_p", [p for p, _ in rows], logits)
        for (p, values), left in zip(rows, survivors(result), strict=True):
            limit = max(values) + (math.log(p) if p else -math.inf)
            for token, value in enumerate(values):
                if value > -math.inf and (p == 0 or abs(value - limit) > 1e-4):
                    assert (token in left) == (value > limit)
        assert keeps_the_rest(result, logits)


@pytest.mark.parametrize(
    ("cls", "field", "value"), [(TopK, "top_k", 3), (TopP, "top_p", 0.5), (MinP, "min_p", 0.3)]
)
class TestAll:
    def test_rows_keep_their_own_argument(self, cls, field, value):
        logits = torch.arange(12.0).repeat(2, 1)
        off = getattr(cls.Arguments(), field)
        result = run(cls, field, field, [value, off], logits)
        assert len(survivors(result)[0]) < 12
        assert torch.equal(result[1], logits[1])

    def test_the_likeliest_token_never_changes(self, cls, field, value):
        logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(3))
        result = run(cls, field, field, [value] * 16, logits)
        assert torch.equal(result.argmax(-1), logits.argmax(-1))
        assert cls.argmax_invariant

    def test_a_row_without_any_token_left_stays_so(self, cls, field, value):
        logits = torch.full((1, 12), -math.inf)
        assert survivors(run(cls, field, field, [value], logits)) == [[]]

    def test_runs_in_its_phase(self, cls, field, value):
        assert cls.phase is Phase.TRUNCATE
        assert cls.params_fields == (field,)


def test_they_run_in_the_documented_order():
    assert TopP.after == ("top_k",)
    assert MinP.after == ("top_k", "top_p")
