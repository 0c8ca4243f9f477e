"""Arithmetic sampling: codes are evenly spaced, and decode to the tokens of their intervals."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from acme_sampling.arithmetic import Arithmetic

from hardpoint.plugins import LogitsRequest, SamplerContext, SamplingParams


@dataclass
class Rows:
    current: list
    greedy: torch.Tensor

    def states(self):
        return self.current


def build(vocab_size):
    context = SamplerContext(
        name="arithmetic", options=None, device=torch.device("cpu"), vocab_size=vocab_size
    )
    return Arithmetic(context)


def started(sampler, index, n, seed=1):
    params = SamplingParams(seed=seed, n=n)
    return sampler.start(LogitsRequest("r", [1], [], params, [], child_index=index))


def test_completions_divide_the_distribution():
    sampler, n = build(4), 8
    states = [started(sampler, index, n) for index in range(n)]
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().repeat(n, 1)
    tokens = sampler.sample(logits, Rows(states, torch.zeros(n, dtype=torch.bool))).tolist()
    assert sorted(tokens) == [0, 0, 0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("code", [0.0, 0.3, 0.74, 0.999])
def test_code_moves_into_the_interval_of_the_token(code):
    sampler = build(3)
    state = sampler.State(code=code, bits=0.0, seed="")
    probabilities = [0.25, 0.5, 0.25]
    token = next(t for t in range(3) if code < sum(probabilities[: t + 1]))
    below, share = sum(probabilities[:token]), probabilities[token]
    logits = torch.tensor([probabilities]).log()
    (chosen,) = sampler.sample(logits, Rows([state], torch.zeros(1, dtype=torch.bool))).tolist()
    after = sampler.observe(state, token, math.log(share), SimpleNamespace(below=below))
    assert chosen == token
    assert after.code == pytest.approx((code - below) / share)
    assert after.bits == pytest.approx(-math.log2(share))


def test_code_that_is_used_up_is_drawn_again():
    sampler = build(3)
    state = sampler.State(code=0.5, bits=39.5, seed="7 0")
    after = sampler.observe(state, 1, math.log(0.5), SimpleNamespace(below=0.25))
    assert after.bits == 0.0
    assert after.code != 0.5
