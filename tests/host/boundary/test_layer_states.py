"""States of a step: which parts of it are computed together, and what is checked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.layers.states import LayerStates, TrialStates
from hardpoint.plugins import AttentionStep, TensorSpec
from hardpoint.plugins.component import Source

SOURCE = Source("sum", "sums", "acme", "1", "default")
SPECS = [(TensorSpec((), "int64"), TensorSpec((2,), "float32", fill=1.0))]
CPU = torch.device("cpu")


def step(tables, computed, counts, size=4) -> AttentionStep:
    return AttentionStep(
        query_starts=np.cumsum([0, *counts]),
        seq_lens=np.array(computed) + np.array(counts),
        num_single=sum(count == 1 for count in counts),
        block_table=torch.tensor(tables),
        slots=torch.zeros(sum(counts), dtype=torch.int64),
        block_size=size,
        group=1,
    )


def running_sum(calls):
    """Return an advance whose outputs are sums of all tokens so far; it records its calls."""

    def advance(states, starts, x):
        sums, others = states
        calls.append((np.diff(starts).tolist(), sums.tolist()))
        out = torch.empty_like(x)
        for row, (first, end) in enumerate(itertools.pairwise(starts)):
            out[first:end] = sums[row] + x[first:end].cumsum(0)
            sums[row] = out[end - 1]
        return out, (sums, others * 2)

    return advance


def test_sequences_of_one_part_are_computed_together():
    states, calls = LayerStates(SPECS, SOURCE, CPU), []
    caches = states.allocate(8)
    assert states.bytes_per_state == 16
    advance = running_sum(calls)
    recur = states.of_step(["kv", *caches], [None, step([[3, 0], [5, 0]], [0, 0], [1, 3])])
    assert recur(0, advance, torch.tensor([7, 1, 2, 3])).tolist() == [7, 1, 3, 6]
    recur = states.of_step(["kv", *caches], [None, step([[3, 0], [5, 6]], [1, 3], [1, 1])])
    assert recur(0, advance, torch.tensor([1, 4])).tolist() == [8, 10]
    assert calls == [([1, 3], [0, 0]), ([1, 1], [7, 6])]
    assert caches[0][0].tolist() == [0, 0, 0, 8, 0, 10, 0, 0]
    assert caches[0][1][3].tolist() == [4.0, 4.0]


def test_a_state_is_kept_where_the_last_block_begins():
    states, calls = LayerStates(SPECS, SOURCE, CPU), []
    caches = states.allocate(8)
    recur = states.of_step(caches, [None, step([[0, 2, 3]], [0], [10])])
    assert recur(0, running_sum(calls), torch.ones(10, dtype=torch.int64)).tolist() == [
        *range(1, 11)
    ]
    assert calls == [([8], [0]), ([2], [8])]
    assert caches[0][0].tolist() == [0, 0, 8, 10, 0, 0, 0, 0]


def test_a_request_may_continue_from_a_block_that_the_step_fills():
    """Whichever comes first in the step."""
    states, calls = LayerStates(SPECS, SOURCE, CPU), []
    caches = states.allocate(8)
    tables = [[2, 5, 0], [2, 3, 4], [2, 3, 6]]  # the first one has 4 tokens of the second one
    recur = states.of_step(caches, [None, step(tables, [4, 0, 8], [1, 10, 2])])
    x = torch.ones(13, dtype=torch.int64)
    tables_sum = recur(0, running_sum(calls), x).tolist()
    assert tables_sum[11:] == [9, 10]
    assert [counts for counts, _ in calls] == [[1, 8], [2, 2]]


@pytest.mark.parametrize(
    ("advance", "got"),
    [
        (lambda states, _starts, x: (x[1:], states), "expected outputs"),
        (lambda states, _starts, x: (x, states[:1]), "states int64"),
        (lambda states, _starts, x: (x, (states[0].float(), states[1])), "states int64"),
        (lambda _states, _starts, x: x, "gave"),
    ],
    ids=["outputs", "number", "dtype", "no-states"],
)
def test_a_wrong_advance_is_named(advance, got):
    trial = TrialStates(SOURCE, SPECS, CPU, 3)
    with pytest.raises(PluginFaultError, match=rf"advance\(\) of layer 0 gave .*{got}|{got}"):
        trial.recur(0, advance, torch.ones(3))


def test_a_trial_notices_layers():
    trial = TrialStates(SOURCE, SPECS, CPU, 3)
    with pytest.raises(PluginFaultError, match="called recur for no layer 0, though state_specs"):
        trial.check_complete()
    with pytest.raises(PluginFaultError, match=r"called recur for layer 1, expected 0\.\.0"):
        trial.recur(1, running_sum([]), torch.ones(3))
    with pytest.raises(PluginFaultError, match=r"with .*, expected tensors \[3, \.\.\.\]"):
        TrialStates(SOURCE, SPECS, CPU, 3).recur(0, running_sum([]), torch.ones(2))
    trial = TrialStates(SOURCE, SPECS, CPU, 3)
    trial.recur(0, running_sum([]), torch.ones(3, dtype=torch.int64))
    trial.check_complete()
    with pytest.raises(PluginFaultError, match="called recur for layer 0 twice"):
        trial.recur(0, running_sum([]), torch.ones(3, dtype=torch.int64))
