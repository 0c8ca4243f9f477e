"""The default sampler: greedy, seeded draws, and that a row never depends on its neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.builtin_plugins import sampler as module
from hardpoint.builtin_plugins.sampler import DefaultSampler
from hardpoint.plugins import SamplerContext, SamplingRows

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64, 12345]


def build(vocab_size):
    context = SamplerContext(
        name="default",
        options=DefaultSampler.Options(),
        device=torch.device("cpu"),
        vocab_size=vocab_size,
    )
    return DefaultSampler(context)


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


def uniforms(vocab, seeds, positions):
    """The sampler's noise turned back into uniform numbers, [rows, vocab]."""
    race = build(vocab)._race(torch.tensor(seeds), torch.tensor(positions))
    return -torch.expm1(-race.double().exp())


class TestGreedy:
    def test_takes_the_likeliest(self):
        logits = random_logits(9, 1000)
        chosen = build(1000).sample(logits, rows_of([1] * 9, [0] * 9, [True] * 9))
        assert torch.equal(chosen, logits.argmax(-1))
        assert chosen.dtype == torch.int64

    @pytest.mark.parametrize("rows", [1, 2, 33])
    @pytest.mark.parametrize("vocab", [5, 63, 1000, 49152])
    def test_the_lowest_id_wins_ties(self, rows, vocab):
        logits = torch.zeros(rows, vocab)
        best = [(7 * row) % (vocab - 1) for row in range(rows)]
        for row, first in enumerate(best):
            logits[row, first:] = torch.tensor([1.0, 0.5]).repeat(vocab)[: vocab - first]
        sampler = build(vocab)
        assert (
            sampler.sample(logits, rows_of([0] * rows, [0] * rows, [True] * rows)).tolist() == best
        )

    def test_mixed_rows_are_chosen_as_they_would_be_apart(self):
        logits, sampler = random_logits(6, 500), build(500)
        greedy = [True, False, False, True, False, True]
        mixed = sampler.sample(logits, rows_of(list(range(6)), [3] * 6, greedy))
        drawn = sampler.sample(logits, rows_of(list(range(6)), [3] * 6))
        for row, is_greedy in enumerate(greedy):
            assert mixed[row] == (logits[row].argmax() if is_greedy else drawn[row])


class TestRepeatable:
    @examples(25)
    @given(
        rows=st.integers(1, 12),
        vocab=st.integers(1, 3000),
        left=st.integers(1, 3000),
        seed=st.integers(0, 2**31),
    )
    def test_a_row_is_the_same_alone_and_in_any_batch(self, rows, vocab, left, seed):
        sampler, logits = build(vocab), random_logits(rows, vocab, seed)
        logits[logits < logits.topk(min(left, vocab)).values[:, -1:]] = -math.inf
        seeds, positions = [seed + 31 * row for row in range(rows)], list(range(rows))
        batch = sampler.sample(logits, rows_of(seeds, positions))
        for row in range(rows):
            alone = sampler.sample(logits[row : row + 1], rows_of([seeds[row]], [positions[row]]))
            assert alone.tolist() == [batch[row]]

    @pytest.mark.parametrize("left", [1, 2, 50, 4000, 20000])
    def test_listing_survivors_gives_exactly_the_full_computation(self, left, monkeypatch):
        sampler, logits = build(20000), random_logits(7, 20000, left)
        logits[logits < logits.topk(left).values[:, -1:]] = -math.inf
        full = logits - sampler._race(torch.tensor(SEEDS), torch.arange(7))
        for few in (0, 10**6):
            monkeypatch.setattr(module, "_MAX_GATHERED", few)
            chosen = sampler.sample(logits, rows_of(SEEDS, list(range(7))))
            assert torch.equal(chosen, full.argmax(-1))

    def test_noise_has_the_same_bits_however_it_is_computed(self):
        sampler = build(4099)
        race = sampler._race(torch.tensor(SEEDS), torch.arange(7))
        low, high = module._row_keys(torch.tensor(SEEDS), torch.arange(7))
        generator = torch.Generator().manual_seed(0)
        for count in (1, 3, 7, 15, 16, 17, 1000, 4097):
            row = torch.randint(7, (count,), generator=generator)
            token = torch.randint(4099, (count,), generator=generator)
            listed = module._log_exponential(sampler._hashes[token], low[row], high[row])
            assert torch.equal(listed, race[row, token])

    def test_chunks_do_not_show(self, monkeypatch):
        sampler, logits = build(6000), random_logits(9, 6000)
        rows = rows_of(list(range(9)), [0] * 9)
        whole = sampler.sample(logits, rows)
        monkeypatch.setattr(module, "_CHUNK", 6000)
        assert torch.equal(sampler.sample(logits, rows), whole)

    def test_the_device_path_gives_the_same_tokens(self):
        sampler, logits = build(800), random_logits(6, 800)
        rows = rows_of(list(range(6)), [1] * 6, [True, False] * 3)
        race = sampler._race(rows.seeds, rows.positions).masked_fill_(rows.greedy[:, None], 0)
        assert torch.equal((logits - race).argmax(-1), sampler.sample(logits, rows))

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

        tokens = [0, 1, 2, 255, 4095, 49151]
        race = build(49152)._race(torch.tensor(SEEDS), torch.arange(7) * 1000)
        for row, seed in enumerate(SEEDS):
            key = splitmix64((splitmix64(seed & mask64) + row * 1000) & mask64)
            for token in tokens:
                x = (lowbias32(token ^ 0x5BD1E995) ^ key) & mask32
                x = (x * 0x7FEB352D) & mask32
                x = ((x ^ (x >> 15) ^ (key >> 32)) * 0x846CA68B) & mask32
                u = (((x ^ (x >> 16)) & (2**31 - 1)) + 0.5) * 2**-31
                expected = math.log(-math.log1p(-u))
                assert race[row, token].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


class TestNoise:
    def test_extreme_hashes_stay_finite(self):
        """`bits` runs over its whole range through `_log_exponential`'s last steps."""
        race = build(2**20)._race(torch.tensor(SEEDS), torch.zeros(7, dtype=torch.int64))
        assert race.isfinite().all()
        largest = torch.tensor([2.0**31 - 1]).add(0.5).mul(-module._TO_UNIT).log1p().neg().log()
        smallest = torch.tensor([0.0]).add(0.5).mul(-module._TO_UNIT).log1p().neg().log()
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
    @pytest.mark.parametrize("few", [0, 4096])
    def test_draws_follow_the_probabilities(self, few, monkeypatch):
        monkeypatch.setattr(module, "_MAX_GATHERED", few)
        probs = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.05, 0.04, 0.009, 0.001], dtype=torch.float64)
        draws = 60000
        logits = probs.log().float().expand(draws, 8)
        chosen = build(8).sample(logits, rows_of([11] * draws, list(range(draws))))
        counts = torch.bincount(chosen, minlength=8).double()
        assert counts[1] == 0
        alive = probs > 0
        # 6 degrees of freedom: over 27.9 once in ten thousand
        assert chi_square(counts[alive], probs[alive] * draws) < 27.9

    def test_seeds_give_independent_draws(self):
        draws = 40000
        logits = torch.zeros(draws, 4)
        sampler = build(4)
        first = sampler.sample(logits, rows_of(list(range(draws)), [0] * draws))
        second = sampler.sample(logits, rows_of(list(range(draws)), [1] * draws))
        counts = torch.bincount(first * 4 + second, minlength=16).double()
        assert chi_square(counts, draws / 16) < 44.3  # 15 degrees of freedom, 1 in ten thousand

    def test_a_big_vocabulary_keeps_its_tail(self):
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

    def test_logits_shifted_by_a_constant_draw_alike(self):
        logits = (random_logits(50, 100) * 8).round() / 8
        rows = rows_of(list(range(50)), [0] * 50)
        assert torch.equal(build(100).sample(logits, rows), build(100).sample(logits + 64, rows))

    @pytest.mark.parametrize("few", [0, 4096])
    def test_a_masked_token_is_never_drawn(self, few, monkeypatch):
        monkeypatch.setattr(module, "_MAX_GATHERED", few)
        logits = torch.full((5000, 5), -math.inf)
        only = torch.arange(5000) % 5
        logits[torch.arange(5000), only] = -1e4
        chosen = build(5).sample(logits, rows_of(list(range(5000)), [0] * 5000))
        assert torch.equal(chosen, only)

    @pytest.mark.parametrize("few", [-1, 4096])
    def test_rows_without_a_token_left_give_the_first_and_spare_the_others(self, few, monkeypatch):
        monkeypatch.setattr(module, "_MAX_GATHERED", few)
        logits = torch.full((4, 6), -math.inf)
        logits[1, 4] = logits[2, 2] = 0.0
        rows = rows_of([1, 2, 3, 4], [0] * 4)
        assert build(6).sample(logits, rows).tolist() == [0, 4, 2, 0]
        assert build(6).sample(torch.full((1, 6), -math.inf), rows_of([1], [0])).tolist() == [0]
