"""Sparse edits, compiled: the plain meaning of each kind, on some or all rows."""

from __future__ import annotations

import math

import pytest
import torch

from hardpoint.host.boundary.logits.edits import compile_edits
from hardpoint.plugins import Edits, Op
from hardpoint.testing import load_ops

INF = math.inf
OPS = load_ops(torch.float32)


def edited(edits: Edits, batch_rows: list[int], rows: int = 3) -> list[list[float]]:
    logits = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4)
    compile_edits(edits, batch_rows, logits, OPS)(logits)
    return logits.tolist()


def test_add_counts_each_edit_of_one_token():
    result = edited(Edits([0, 1, 0], [1, 3, 1], [0.5, 1.0, 0.25]), [0, 2])
    assert result == [[0, 1.75, 2, 3], [4, 5, 6, 7], [8, 9, 10, 12]]


def test_values_to_add_to_one_token_are_summed_first():
    tiny = 2.0**-24  # added to 1 alone, it would be rounded away
    result = edited(Edits([0] * 4, [1, 0, 1, 1], [tiny, -INF, tiny, tiny]), [0], 1)
    assert result == [[-INF, 1 + 2 * 2.0**-23, 2, 3]]


def test_of_two_values_set_for_one_token_the_last_counts():
    result = edited(Edits([1, 1, 0], [0, 0, 2], [5.0, 7.0, -INF], Op.SET), [2, 0])
    assert result == [[7, 1, 2, 3], [4, 5, 6, 7], [8, 9, -INF, 11]]


@pytest.mark.parametrize("rows", [1, 3])
def test_keep_only_drops_the_rest_of_its_rows_alone(rows):
    result = edited(Edits([0, 0, 0], [3, 1, 3], (), Op.KEEP_ONLY), [rows - 1], rows)
    kept = [-INF, 4 * rows - 3, -INF, 4 * rows - 1]
    assert result == [*[[0, 1, 2, 3], [4, 5, 6, 7]][: rows - 1], kept]


@pytest.mark.parametrize("op", list(Op))
def test_rows_that_lie_apart_in_memory(op):
    logits = torch.arange(8, dtype=torch.float32).view(4, 2).t()
    expected = logits.contiguous()
    edits = Edits([1, 0], [2, 3], [1.0, 2.0], op)
    compile_edits(edits, [0, 1], logits, OPS)(logits)
    compile_edits(edits, [0, 1], expected, OPS)(expected)
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, torch.arange(8, dtype=torch.float32).view(4, 2).t())
