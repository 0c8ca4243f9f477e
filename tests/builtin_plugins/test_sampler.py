"""The default sampler: greedy, seeded draws, and that a row never depends on its neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.builtin_plugins.sampler import DefaultSampler
from hardpoint.plugins import ModelError, SamplerContext, SamplingRows
from hardpoint.plugins.model import exponential_race
from hardpoint.plugins.model import logits_ops as module
from hardpoint.testing import load_ops

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64, 12345]


@pytest.fixture(scope="module", params=["torch", "native_cpu"])
def ops(request):
    try:
        return load_ops(torch.float32, use=request.param)
    except ModelError as cause:
        pytest.skip(str(cause))


@pytest.fixture(scope="module")
def build(ops):
    """Returns a function that builds a sampler for a vocabulary."""

    def build(vocab_size):
        context = SamplerContext(
            name="default",
            options=DefaultSampler.Options(),
            device=torch.device("cpu"),
            vocab_size=vocab_size,
            ops=ops,
        )
        return DefaultSampler(context)

    return build


def rows_of(seeds, positions, greedy=None):
    greedy = torch.tensor(greedy or [False] * len(seeds))
    return SamplingRows(
        greedy=greedy,
        all_greedy=bool(greedy.all()),
        any_greedy=bool(greedy.any()),
        seeds=torch.tensor(seeds),
        positions=torch.tensor(positions),
    )


def random_logits(rows, vocab, seed=0, scale=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def chi_square(observed, expected):
    return float(((observed - expected) ** 2 / expected).sum())


def hashes(vocab, seeds, positions):
    """The documented hash of 31 bits, int64 [rows, vocab]."""

    def mix(z):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    seeds, positions = (np.array(x, np.int64).view(np.uint64) for x in (seeds, positions))
    key = mix(mix(seeds) + positions)[:, None]
    first, second = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
    x = np.arange(vocab, dtype=np.uint32) ^ np.uint32(0x5BD1E995)
    x = (x ^ (x >> 16)) * first
    x = (x ^ (x >> 15)) * second
    x = ((x ^ (x >> 16)) ^ key.astype(np.uint32)) * first
    x = (x ^ (x >> 15) ^ (key >> np.uint64(32)).astype(np.uint32)) * second
    return torch.from_numpy(((x ^ (x >> 16)) & np.uint32(2**31 - 1)).astype(np.int64))


def uniforms(vocab, seeds, positions):
    """The numbers that draws are made from, [rows, vocab]."""
    return (hashes(vocab, seeds, positions).double() + 0.5) * 2.0**-31


def winners(logits, seeds, positions):
    """The tokens that win the documented race."""
    unit = uniforms(logits.shape[1], seeds, positions)
    return (logits.double() - (-torch.log1p(-unit)).log()).argmax(-1)


class TestGreedy:
    def test_takes_the_likeliest(self, build):
        logits = random_logits(9, 1000)
        chosen = build(1000).sample(logits, rows_of([1] * 9, [0] * 9, [True] * 9))
        assert torch.equal(chosen, logits.argmax(-1))
        assert chosen.dtype == torch.int64

    @pytest.mark.parametrize("rows", [1, 2, 33])
    @pytest.mark.parametrize("vocab", [5, 63, 1000, 49152])
    def test_the_lowest_id_wins_ties(self, build, rows, vocab):
        logits = torch.zeros(rows, vocab)
        best = [(7 * row) % (vocab - 1) for row in range(rows)]
        for row, first in enumerate(best):
            logits[row, first:] = torch.tensor([1.0, 0.5]).repeat(vocab)[: vocab - first]
        sampler = build(vocab)
        assert (
            sampler.sample(logits, rows_of([0] * rows, [0] * rows, [True] * rows)).tolist() == best
        )

    def test_mixed_rows_are_chosen_as_they_would_be_apart(self, build):
        logits, sampler = random_logits(6, 500), build(500)
        greedy = [True, False, False, True, False, True]
        mixed = sampler.sample(logits, rows_of(list(range(6)), [3] * 6, greedy))
        drawn = sampler.sample(logits, rows_of(list(range(6)), [3] * 6))
        for row, is_greedy in enumerate(greedy):
            assert mixed[row] == (logits[row].argmax() if is_greedy else drawn[row])


class TestRepeatable:
    @examples(8)
    @given(
        rows=st.integers(1, 12),
        vocab=st.integers(1, 3000),
        left=st.integers(1, 3000),
        seed=st.integers(0, 2**31),
    )
    def test_a_row_is_the_same_alone_and_in_any_batch(self, build, rows, vocab, left, seed):
        sampler, logits = build(vocab), random_logits(rows, vocab, seed)
        logits[logits < logits.topk(min(left, vocab)).values[:, -1:]] = -math.inf
        seeds, positions = [seed + 31 * row for row in range(rows)], list(range(rows))
        batch = sampler.sample(logits, rows_of(seeds, positions))
        for row in range(rows):
            alone = sampler.sample(logits[row : row + 1], rows_of([seeds[row]], [positions[row]]))
            assert alone.tolist() == [batch[row]]

    @pytest.mark.parametrize("left", [1, 2, 50, 4000, 20000])
    def test_draws_are_those_of_the_documented_race(self, build, left, monkeypatch):
        sampler, logits = build(20000), random_logits(7, 20000, left)
        logits[logits < logits.topk(left).values[:, -1:]] = -math.inf
        for few in (-1, 10**6):  # listing the survivors or not
            monkeypatch.setattr(module, "_MAX_LISTED", few)
            chosen = sampler.sample(logits, rows_of(SEEDS, list(range(7))))
            assert torch.equal(chosen, winners(logits, SEEDS, list(range(7))))

    @pytest.mark.parametrize("vocab", [1, 7, 16, 17, 4099])
    @pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 30.0, 1e6])
    def test_many_draws_are_those_of_the_documented_race(self, build, vocab, scale):
        seeds, positions = list(range(300)), [3] * 300
        logits = random_logits(300, vocab, 1, scale)
        chosen = build(vocab).sample(logits, rows_of(seeds, positions))
        assert torch.equal(chosen, winners(logits, seeds, positions))

    def test_chunks_do_not_show(self, build, monkeypatch):
        sampler, logits = build(6000), random_logits(9, 6000)
        rows = rows_of(list(range(9)), [0] * 9)
        whole = sampler.sample(logits, rows)
        monkeypatch.setattr(module, "_CHUNK", 6000)
        assert torch.equal(sampler.sample(logits, rows), whole)

    def test_the_device_path_gives_the_same_tokens(self, build):
        logits = random_logits(6, 800)
        rows = rows_of(list(range(6)), [1] * 6, [True, False] * 3)
        tokens = torch.arange(800, dtype=torch.int32)
        chosen = exponential_race.race(logits, tokens, rows.seeds, rows.positions, rows.greedy)
        assert torch.equal(chosen, build(800).sample(logits, rows))

    def test_the_hash_is_the_documented_one(self):
        """Against the same arithmetic in Python's unbounded integers."""
        mask32, mask64 = 2**32 - 1, 2**64 - 1

        def lowbias32(x):
            x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask32
            x = ((x ^ (x >> 15)) * 0x846CA68B) & mask32
            return x ^ (x >> 16)

        def splitmix64(z):
            z = (z + 0x9E3779B97F4A7C15) & mask64
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask64
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask64
            return z ^ (z >> 31)

        bits = hashes(49152, SEEDS, [1000 * row for row in range(7)])
        for row, seed in enumerate(SEEDS):
            key = splitmix64((splitmix64(seed & mask64) + row * 1000) & mask64)
            for token in (0, 1, 2, 255, 4095, 49151):
                x = (lowbias32(token ^ 0x5BD1E995) ^ key) & mask32
                x = (x * 0x7FEB352D) & mask32
                x = ((x ^ (x >> 15) ^ (key >> 32)) * 0x846CA68B) & mask32
                assert bits[row, token].item() == (x ^ (x >> 16)) & (2**31 - 1)


class TestNoise:
    def test_extreme_hashes_stay_finite(self):
        """In the float32 race of the torch path."""
        largest = (
            torch.tensor([2.0**31 - 1]).add(0.5).mul(-exponential_race._TO_UNIT).log1p().neg().log()
        )
        smallest = torch.tensor([0.0]).add(0.5).mul(-exponential_race._TO_UNIT).log1p().neg().log()
        assert largest.isfinite().all()
        assert smallest.item() == pytest.approx(math.log(2**-32), rel=1e-6)

    def test_is_uniform_within_a_row_and_over_positions(self):
        vocab, bins = 49152, 256
        over_tokens = uniforms(vocab, [7] * 4, [0, 1, 2, 3]).flatten()
        over_positions = uniforms(8, [7] * 20000, list(range(20000))).flatten()
        over_seeds = uniforms(8, list(range(20000)), [0] * 20000).flatten()
        for values in (over_tokens, over_positions, over_seeds):
            counts = torch.histc(values, bins, 0, 1)
            # 255 degrees of freedom: mean 255, standard deviation 22.6
            assert 160 < chi_square(counts, len(values) / bins) < 370

    @pytest.mark.parametrize("step", [1, 2, 64, 4096])
    def test_tokens_positions_and_seeds_are_uncorrelated(self, step):
        base = uniforms(16384, [5, 5, 5 + step], [9, 9 + step, 9]) - 0.5
        pairs = [
            (base[0], base[1]),  # positions
            (base[0], base[2]),  # seeds
            (base[0, :-step], base[0, step:]),  # tokens
            (base[0, :-step], base[1, step:]),  # tokens and positions
        ]
        for left, right in pairs:
            correlation = float((left * right).mean() * 12)
            assert abs(correlation) < 5 / math.sqrt(len(left))

    def test_seed_and_position_are_not_interchangeable(self):
        noise = uniforms(64, [1, 2, 0], [2, 1, 3])
        assert len({tuple(row) for row in noise.tolist()}) == 3

    def test_pairs_of_rows_fill_the_square(self):
        values = uniforms(49152, [3, 3, 4], [0, 1, 0])
        cells = (values * 16).long()
        for other in (1, 2):
            counts = torch.bincount(cells[0] * 16 + cells[other], minlength=256).double()
            assert 160 < chi_square(counts, 49152 / 256) < 370


class TestDistribution:
    @pytest.mark.parametrize("few", [-1, 4096])
    def test_draws_follow_the_probabilities(self, build, few, monkeypatch):
        monkeypatch.setattr(module, "_MAX_LISTED", few)
        probs = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.05, 0.04, 0.009, 0.001], dtype=torch.float64)
        draws = 60000
        logits = probs.log().float().expand(draws, 8)
        chosen = build(8).sample(logits, rows_of([11] * draws, list(range(draws))))
        counts = torch.bincount(chosen, minlength=8).double()
        assert counts[1] == 0
        alive = probs > 0
        # 6 degrees of freedom: over 27.9 once in ten thousand
        assert chi_square(counts[alive], probs[alive] * draws) < 27.9

    def test_seeds_give_independent_draws(self, build):
        draws = 40000
        logits = torch.zeros(draws, 4)
        sampler = build(4)
        first = sampler.sample(logits, rows_of(list(range(draws)), [0] * draws))
        second = sampler.sample(logits, rows_of(list(range(draws)), [1] * draws))
        counts = torch.bincount(first * 4 + second, minlength=16).double()
        assert chi_square(counts, draws / 16) < 44.3  # 15 degrees of freedom, 1 in ten thousand

    def test_a_big_vocabulary_keeps_its_tail(self, build):
        """Half of the mass on one token, half spread over 4095 others."""
        draws = 4000
        logits = torch.zeros(draws, 4096)
        logits[:, 9] = math.log(4095)
        chosen = build(4096).sample(logits, rows_of([2] * draws, list(range(draws))))
        share = float((chosen == 9).double().mean())
        assert abs(share - 0.5) < 5 * math.sqrt(0.25 / draws)
        tail = chosen[chosen != 9]
        counts = torch.histc(tail.double(), 16, 0, 4096)
        assert chi_square(counts, len(tail) / 16) < 44.3

    def test_logits_shifted_by_a_constant_draw_alike(self, build):
        logits = (random_logits(50, 100) * 8).round() / 8
        rows = rows_of(list(range(50)), [0] * 50)
        assert torch.equal(build(100).sample(logits, rows), build(100).sample(logits + 64, rows))

    @pytest.mark.parametrize("few", [-1, 4096])
    def test_a_masked_token_is_never_drawn(self, build, few, monkeypatch):
        monkeypatch.setattr(module, "_MAX_LISTED", few)
        logits = torch.full((5000, 5), -math.inf)
        only = torch.arange(5000) % 5
        logits[torch.arange(5000), only] = -1e4
        chosen = build(5).sample(logits, rows_of(list(range(5000)), [0] * 5000))
        assert torch.equal(chosen, only)

    @pytest.mark.parametrize("few", [-1, 4096])
    def test_rows_without_a_token_left_give_the_first_and_spare_the_others(
        self, build, few, monkeypatch
    ):
        monkeypatch.setattr(module, "_MAX_LISTED", few)
        logits = torch.full((4, 6), -math.inf)
        logits[1, 4] = logits[2, 2] = 0.0
        rows = rows_of([1, 2, 3, 4], [0] * 4)
        assert build(6).sample(logits, rows).tolist() == [0, 4, 2, 0]
        assert build(6).sample(torch.full((1, 6), -math.inf), rows_of([1], [0])).tolist() == [0]
