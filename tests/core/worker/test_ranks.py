"""Exchanges of a worker with the ranks that share its model."""

from __future__ import annotations

import pytest
import torch

from hardpoint.core.worker.ranks import Ranks
from hardpoint.plugins import ModelError
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.parallel import Cut, Parallel, Placement, SingleRank
from hardpoint.testing import run_ranks

CPU = torch.device("cpu")


def in_each(function, **sizes):
    """Call a function with the Ranks of each of two ranks; return what it gave, in rank order."""
    config = ParallelConfig(**sizes)
    placement = Placement(hosts=("here", "here"))

    def run(communicator):
        def connect(group, rank, members):
            assert rank == communicator.rank
            assert members == [0, 1]
            return communicator

        ranks = Ranks(config, communicator.rank, placement)
        ranks.meet(connect)
        return function(ranks)

    return run_ranks(2, run)


def test_the_last_stage_samples_and_its_first_rank():
    def place(ranks):
        parallel = ranks.parallel
        return ranks.is_output, parallel.stage, parallel.tensor.rank, parallel.is_last

    assert in_each(place, tensor=2) == [(True, 0, 0, True), (False, 0, 1, True)]
    assert in_each(place, pipeline=2) == [(False, 0, 0, False), (True, 1, 0, True)]


def test_four_ranks_are_stages_of_tensor_ranks():
    met = []
    config = ParallelConfig(tensor=2, pipeline=2)

    def connect(group, rank, members):
        met.append((group, rank, members))
        return SingleRank()

    Ranks(config, 3, Placement(hosts=("a", "a", "b", "b"))).meet(connect)
    assert met == [("tensor-1", 1, [2, 3]), ("pipeline-1", 1, [1, 3])]
    assert config.output_rank == 2


def test_hidden_states_go_to_the_next_stage():
    def step(ranks):
        before = ranks.receive_hidden(torch.empty(2, 3))
        if before is None:
            ranks.send_hidden(torch.arange(6.0).view(2, 3))
            return None
        return before.tolist()

    assert in_each(step, pipeline=2) == [None, [[0, 1, 2], [3, 4, 5]]]


def test_the_other_ranks_compute_the_rows_that_the_output_rank_asks_for():
    def sample(ranks):
        if ranks.is_output:
            ranks.ask_for_logits(torch.tensor([4, 7]))
            ranks.ask_for_logits(torch.tensor([1]))
            ranks.ask_for_logits(torch.empty(0, dtype=torch.int64))
            return None
        asked = []
        while (rows := ranks.asked_for_logits(CPU)) is not None:
            asked.append(rows.tolist())
        return asked

    assert in_each(sample, tensor=2) == [None, [[4, 7], [1]]]


def test_one_rank_exchanges_nothing():
    ranks = Ranks(ParallelConfig(), 0, None)
    ranks.meet(pytest.fail)
    ranks.ask_for_logits(torch.tensor([1]))
    ranks.wait_for_all()
    assert ranks.receive_hidden(torch.empty(1)) is None
    assert ranks.is_output
    assert not ranks.are_many
    ranks.close()


@pytest.mark.parametrize(
    ("layers", "stages", "parts"),
    [(5, 2, [range(3), range(3, 5)]), (4, 4, [range(i, i + 1) for i in range(4)])],
)
def test_layers_are_divided_into_stages(layers, stages, parts):
    found = [
        Parallel(stage=stage, num_stages=stages).stage_layers(layers) for stage in range(stages)
    ]
    assert found == parts


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ModelError, match=r"parallel\.pipeline: expected at most 2, .* got 3"):
        Parallel(stage=0, num_stages=3).stage_layers(2)


def test_what_divides_is_shared():
    def shares(communicator):
        parallel = Parallel(communicator)
        with pytest.raises(ModelError, match=r"9 attention heads .* among 2 ranks.*1, 3, 9"):
            parallel.share(9, "attention heads")
        return (
            parallel.share(6, "columns"),
            parallel.share_or_copy(1, "key and value heads"),
            parallel.padded_share(5),
        )

    assert run_ranks(2, shares) == [
        (range(3), range(1), range(3)),
        (range(3, 6), range(1), range(3, 5)),
    ]


def test_a_cut_is_a_part_of_one_dimension():
    weight = torch.arange(24).view(2, 3, 4)
    cut = Cut(1, 1, 3)
    assert cut.shape(weight.shape) == (2, 2, 4)
    assert torch.equal(cut.of(weight), weight[:, 1:3])
