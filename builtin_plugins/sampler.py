"""The default sampler: greedy, or seeded random sampling."""

from __future__ import annotations

import math

import torch

from hardpoint.plugins import Sampler, SamplerContext, SamplingRows

# Multipliers of splitmix64 (Steele, Lea, Flood, OOPSLA 2014) and of lowbias32 (Wellons, "hash
# prospector"), as the signed numbers that torch's integers hold.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_MIX_32 = (0x7FEB352D, 0x846CA68B - 2**32)

# Scales (whole number + 0.5) to (0, 1 - 2**-24]: float32 would round the largest ones up to 1.
_TO_UNIT = 2.0**-31 * (1 - 2.0**-24)

# With more unmasked tokens per row than this, gathering them costs more than it saves.
_MAX_GATHERED = 4096

# Number of logits whose noise is computed at a time on a CPU, so that it stays in its cache.
_CHUNK = 2**19


class DefaultSampler(Sampler):
    """Greedy rows get the most likely token, ties the lowest id; other rows a random one.

    Random sampling is an exponential race: token i wins if E_i / p_i is smallest, with E_i =
    -log1p(-u_i) an exponential variate, which is the Gumbel-max trick (Maddison et al.,
    arXiv:1411.0030). u_i is a hash of (seed, output position, token id) and nothing else, so a
    row's token is the same alone and in any batch. Only E near 0 can win, where u has 31 bits
    without rounding: probabilities down to about 1e-9 are resolved.
    """

    contract = 1
    context: SamplerContext

    def __init__(self, context: SamplerContext) -> None:
        """Compute the hashes of all token ids."""
        super().__init__(context)
        ids = torch.arange(context.vocab_size, dtype=torch.int32, device=context.device)
        self._hashes = _mix_32(ids ^ 0x5BD1E995)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Return the sampled token ids, int64 [rows]; a token at -inf is never sampled."""
        if rows.all_greedy:
            return logits.argmax(-1)
        if logits.device.type != "cpu":
            # Selecting rows or tokens would make the host wait for the device.
            race = self._race(rows.seeds, rows.positions).masked_fill_(rows.greedy[:, None], 0)
            return (logits - race).argmax(-1)
        if not rows.any_greedy:
            return self._draw(logits, rows.seeds, rows.positions)
        chosen = logits.argmax(-1)
        random = (~rows.greedy).nonzero().squeeze(1)
        chosen[random] = self._draw(logits[random], rows.seeds[random], rows.positions[random])
        return chosen

    def _draw(
        self, logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return one random token per row; both code paths return the same."""
        unmasked = logits != -math.inf
        if int(torch.count_nonzero(unmasked)) > _MAX_GATHERED * len(logits):
            step = max(1, _CHUNK // logits.shape[1])
            parts = [slice(start, start + step) for start in range(0, len(logits), step)]
            chosen = [(logits[p] - self._race(seeds[p], positions[p])).argmax(-1) for p in parts]
            return torch.cat(chosen)
        row, token = unmasked.nonzero(as_tuple=True)
        low, high = _row_keys(seeds, positions)
        keys = logits[row, token] - _log_exponential(self._hashes[token], low[row], high[row])
        return _argmax_per_row(keys, row, token, len(logits))

    def _race(self, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return log E for every token of the vocabulary, float32 [rows, vocab]."""
        low, high = _row_keys(seeds, positions)
        return _log_exponential(self._hashes, low[:, None], high[:, None])


def _argmax_per_row(
    keys: torch.Tensor, row: torch.Tensor, token: torch.Tensor, rows: int
) -> torch.Tensor:
    """Return each row's token with the largest key, [rows]; 0 for a row without tokens.

    Args:
        keys: float32 [tokens].
        row: the row of each key, ascending.
        token: the token of each key, ascending within a row.
        rows: number of rows.
    """
    counts = torch.bincount(row, minlength=rows)
    starts = counts.cumsum(0) - counts
    width = max(int(counts.max()), 1)
    table = keys.new_full((rows, width), -math.inf)
    table[row, torch.arange(len(row)) - starts[row]] = keys
    winner = (starts + table.argmax(-1)).clamp(max=max(len(token) - 1, 0))
    return token[winner].masked_fill_(counts == 0, 0) if len(token) else winner


def _log_exponential(hashes: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of exponential variates, from int32 hashes of tokens and rows."""
    bits = hashes ^ low
    bits *= _MIX_32[0]
    bits ^= _shift(bits, 15)
    bits ^= high
    bits *= _MIX_32[1]
    bits ^= _shift(bits, 16)
    bits &= 0x7FFFFFFF
    unit = bits.float()
    unit += 0.5
    unit *= -_TO_UNIT
    return unit.log1p_().neg_().log_()


def _row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hash int64 seeds and positions into two int32 keys, [rows] each."""
    key = _mix_64(_mix_64(seeds) + positions)
    return key.to(torch.int32), (key >> 32).to(torch.int32)


def _mix_64(value: torch.Tensor) -> torch.Tensor:
    """Return splitmix64 of int64 values; products wrap."""
    value = value + _GOLDEN
    value = (value ^ _shift(value, 30)) * _MIX_64[0]
    value = (value ^ _shift(value, 27)) * _MIX_64[1]
    return value ^ _shift(value, 31)


def _mix_32(value: torch.Tensor) -> torch.Tensor:
    """Return lowbias32 of int32 values; products wrap."""
    value = (value ^ _shift(value, 16)) * _MIX_32[0]
    value = (value ^ _shift(value, 15)) * _MIX_32[1]
    return value ^ _shift(value, 16)


def _shift(value: torch.Tensor, places: int) -> torch.Tensor:
    """Return a logical right shift; torch's own shift copies the sign."""
    width = torch.iinfo(value.dtype).bits
    return (value >> places) & ((1 << (width - places)) - 1)
