"""The gated delta rule and the short convolution, compared with one token after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardpoint.toolkit.delta_rule import gated_delta_rule, short_convolution

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 8, 6
LENGTHS = {
    "one-token-each": [1, 1, 1],
    "chunks": [64, 65, 3, 130],
    "mixed": [1, 70, 1, 2, 128],
}


def slow_delta_rule(state, starts, q, k, v, g, beta):
    """Return the results of gated_delta_rule, in float64."""
    state, output = state.double(), torch.empty(v.shape, dtype=torch.float64)
    q, k = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q * KEY**-0.5, k))
    for row in range(len(state)):
        for token in range(starts[row], starts[row + 1]):
            held = state[row] * g[token].double().exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", held, k[token])
            update = (v[token].double() - read) * beta[token].double()[:, None]
            state[row] = held + torch.einsum("hk,hv->hkv", k[token], update)
            output[token] = torch.einsum("hkv,hk->hv", state[row], q[token])
    return output, state


def inputs(lengths):
    generator = torch.Generator().manual_seed(3)
    starts = np.cumsum([0, *lengths])
    tokens = int(starts[-1])

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return (
        normal(len(lengths), HEADS, KEY, VALUE),
        starts,
        normal(tokens, KEY_HEADS, KEY),
        normal(tokens, KEY_HEADS, KEY),
        normal(tokens, HEADS, VALUE),
        -normal(tokens, HEADS).square() * 0.1,
        normal(tokens, HEADS).sigmoid(),
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_delta_rule_is_that_of_one_token_after_the_other(lengths):
    tensors = inputs(lengths)
    before = tensors[0].clone()
    expected = slow_delta_rule(*tensors)
    results = gated_delta_rule(*tensors)
    for result, other in zip(results, expected, strict=True):
        assert (result - other).abs().max() < 1e-5
    assert torch.equal(tensors[0], before)


def test_a_strong_decay_leaves_no_nan():
    state, starts, q, k, v, _, beta = inputs([100])
    g = torch.full((100, HEADS), -1e4)
    output, after = gated_delta_rule(state, starts, q, k, v, g, beta)
    expected, last = slow_delta_rule(state, starts, q, k, v, g, beta)
    assert (output - expected).abs().max() < 1e-5
    assert (after - last).abs().max() < 1e-5


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1, 1], [5, 1, 2, 9]], ids=str)
def test_the_convolution_is_that_of_torch(lengths, size):
    generator = torch.Generator().manual_seed(3)
    state = torch.randn(len(lengths), size - 1, 10, generator=generator)
    weight = torch.randn(10, size, generator=generator)
    starts = np.cumsum([0, *lengths])
    x = torch.randn(int(starts[-1]), 10, generator=generator)
    output, after = short_convolution(state, starts, x, weight)
    for row, length in enumerate(lengths):
        rows = torch.cat((state[row], x[starts[row] : starts[row] + length]))
        expected = torch.nn.functional.conv1d(rows.T[None], weight[:, None], groups=10)[0].T
        assert (output[starts[row] : starts[row] + length] - expected).abs().max() < 1e-5
        assert torch.equal(after[row], rows[length:])
