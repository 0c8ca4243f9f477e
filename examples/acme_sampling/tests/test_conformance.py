"""The package's processors keep every rule of the engine: the conformance kit checks it."""

import math

from acme_sampling import TopA
from acme_sampling.arithmetic import Arithmetic
from acme_sampling.dry import Dry
from acme_sampling.mirostat import Mirostat
from acme_sampling.top_n_sigma import TopNSigma
from acme_sampling.xtc import Xtc
from hypothesis import strategies as st

from hardpoint.plugins import SamplingParams
from hardpoint.testing import LogitsProcessorSuite, SamplerSuite

pytest_plugins = ["hardpoint.testing"]

tokens = st.integers(0, 130)


class TestTopA(LogitsProcessorSuite):
    processor = TopA
    arguments = st.builds(TopA.Arguments, a=st.floats(0, 1, exclude_min=True))


class TestDry(LogitsProcessorSuite):
    processor = Dry
    arguments = st.builds(
        Dry.Arguments,
        multiplier=st.floats(0, 100),
        base=st.floats(1, 4),
        allowed_length=st.integers(1, 3),
        sequence_breakers=st.just(()),
        breaker_ids=st.lists(tokens, max_size=2),
        range=st.sampled_from([0, 1, 5]),
    )


class TestXtc(LogitsProcessorSuite):
    processor = Xtc
    arguments = st.builds(
        Xtc.Arguments,
        threshold=st.floats(0, 1, exclude_min=True),
        probability=st.floats(0, 1),
        protected=st.lists(tokens, max_size=3),
    )
    params = st.builds(SamplingParams, seed=st.integers(0, 99), max_tokens=st.none())


class TestMirostat(LogitsProcessorSuite):
    processor = Mirostat
    arguments = st.builds(
        Mirostat.Arguments,
        tau=st.floats(0, 20, exclude_min=True),
        eta=st.floats(0, 1, exclude_min=True),
    )


class TestArithmetic(SamplerSuite):
    sampler = Arithmetic
    examples = 0.3


class TestTopNSigma(SamplerSuite):
    sampler = TopNSigma
    examples = 0.3
    arguments = st.builds(TopNSigma.Arguments, n=st.floats(0, 1000, exclude_min=True))

    def probabilities(self, logits):
        allowed = logits > -math.inf
        sigma = logits[allowed].std(correction=0)
        return logits.masked_fill(logits < logits.max() - sigma, -math.inf).softmax(-1)
