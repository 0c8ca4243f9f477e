"""Attention weights of the torch backend are those of a plain softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.builtins.model_harness import build_backend

from hardpoint.plugins import AttentionStep, KVSpec

SIZE, LENGTH, QUERIES = 4, 22, 5


def plain(spec, q, keys):
    groups = spec.num_heads // spec.num_kv_heads
    scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(groups, 1)) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    position = torch.arange(LENGTH)[LENGTH - QUERIES :, None]
    key = torch.arange(LENGTH)
    hidden = key > position
    if spec.window is not None:
        hidden |= key <= position - spec.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.view(-1, 1, 1).expand(-1, QUERIES, 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].sum(1)
    return scores.softmax(-1).sum(1)


@pytest.mark.parametrize(
    "fields",
    [{}, {"window": 9}, {"softcap": 3.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_weights_are_those_of_a_softmax(fields):
    spec = KVSpec(num_heads=4, num_kv_heads=2, head_size=8, scale=0.4, **fields)
    backend = build_backend(torch.float32, SIZE)
    cache = backend.allocate(spec, 12)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(LENGTH, heads, 8, generator=generator) for heads in (4, 2, 2))
    table = torch.tensor([[0] * 6, [7, 2, 9, 1, 11, 4]])
    places = np.arange(LENGTH)
    slots = table[1][places // SIZE] * SIZE + torch.from_numpy(places % SIZE)
    step = AttentionStep(
        query_starts=np.array([0, 1, LENGTH + 1]),
        seq_lens=np.array([1, LENGTH]),
        num_single=1,
        block_table=table,
        slots=torch.cat((torch.tensor([0]), slots)),
        block_size=SIZE,
    )
    rows = [torch.cat((side[:1], side)) for side in (q, k, v)]
    backend.attend(spec, cache, backend.plan(step), *rows)
    weights = backend.attention_weights(spec, cache, step, 1, q[LENGTH - QUERIES :])
    torch.testing.assert_close(weights, plain(spec, q[LENGTH - QUERIES :], k))
