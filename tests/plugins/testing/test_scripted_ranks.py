"""The scripted model detects missing exchanges between ranks that share it."""

import pytest
import torch

from hardpoint.plugins import ForwardBatch, ModelConfig, ModelContext
from hardpoint.plugins.parallel import Parallel
from hardpoint.testing import ScriptedModel, load_ops
from hardpoint.testing.model.rank_threads import run_ranks

TOKENS = torch.tensor([3, 250, 7, 199, 80])


def model(parallel):
    config = ModelConfig(
        architecture="ScriptedForCausalLM", hf={}, vocab_size=257, max_position_embeddings=64
    )
    return ScriptedModel(
        ModelContext(
            name="scripted",
            options=None,
            config=config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=64,
            ops=load_ops(torch.float32),
            parallel=parallel,
        )
    )


def logits(parallel, before=None):
    """Return the results of a rank; attention mixes the keys, so that wrong ones show."""
    sharded = model(parallel)
    batch = ForwardBatch(
        TOKENS, torch.arange(5), lambda layer, q, k, v: k.cumsum(0) * 3 + 1, before
    )
    hidden = sharded.forward(batch)
    return hidden, sharded.compute_logits(hidden)


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_the_logits_of_one(size, expert):
    hidden, expected = logits(Parallel())
    for got in run_ranks(size, lambda tensor: logits(Parallel(tensor, expert=expert))):
        assert torch.equal(got[0], hidden)
        assert torch.equal(got[1], expected)


@pytest.mark.parametrize(
    ("method", "replacement"),
    [
        ("all_reduce", lambda tensor: lambda x: x),
        ("all_gather", lambda tensor: lambda x: torch.stack([x] * tensor.size)),
    ],
)
def test_what_is_not_exchanged_shows(method, replacement):
    _, expected = logits(Parallel())

    def run(tensor):
        setattr(tensor, method, replacement(tensor))
        return logits(Parallel(tensor))[1]

    assert all(not torch.equal(got, expected) for got in run_ranks(2, run))


def test_a_stage_needs_the_hidden_states_of_the_one_before():
    hidden, expected = logits(Parallel())
    second = Parallel(stage=1, num_stages=2)
    assert torch.equal(logits(second, hidden)[1], expected)
    assert not torch.equal(logits(second, hidden + 1)[1], expected)
