"""logit_bias."""

from __future__ import annotations

import pytest
import torch
from support.builtins.fake_rows import FakeRows, applied, build, prepared, request_of, rows_of

from hardpoint.builtin_plugins.logits.bias import LogitBias
from hardpoint.plugins import Op, Phase


def test_adds_each_rows_numbers():
    processor = build(LogitBias, "logit_bias")
    rows = rows_of(
        processor,
        request_of(processor, logit_bias={1: 2.5, 9: -100.0}),
        request_of(processor, logit_bias={1: -1.0}),
    )
    edits = processor.edits(rows)
    assert edits.op is Op.ADD
    expected = torch.ones(2, 10)
    expected[0, 1], expected[0, 9], expected[1, 1] = 3.5, -99.0, 0.0
    assert torch.equal(applied(edits, torch.ones(2, 10)), expected)


def test_an_empty_bias_edits_nothing():
    processor = build(LogitBias, "logit_bias")
    edits = processor.edits(rows_of(processor, request_of(processor, logit_bias={})))
    assert list(edits.row) == []


def test_returns_the_same_edits_until_the_rows_change():
    processor = build(LogitBias, "logit_bias")
    request = request_of(processor, logit_bias={1: 1.0})
    rows = rows_of(processor, request)
    first = processor.edits(rows)
    request.output_token_ids.append(1)
    assert processor.edits(rows) is first
    assert processor.edits(FakeRows(processor, [request])) is not first


def test_refuses_ids_outside_the_vocabulary():
    with pytest.raises(ValueError, match=r"expected token ids under 10 .* got 10$"):
        prepared(LogitBias, logit_bias={3: 1.0, 10: 1.0})
    assert prepared(LogitBias, logit_bias={9: 1.0}).logit_bias == {9: 1.0}


def test_runs_in_its_phase_and_is_not_skipped_by_greedy_requests():
    assert LogitBias.phase is Phase.BIAS
    assert not LogitBias.argmax_invariant
