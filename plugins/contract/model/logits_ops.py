"""Operations on logits for samplers, processors and grammars, with a reference in torch."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

from .exponential_race import listed, race

if TYPE_CHECKING:
    import torch

__all__ = ["LogitsOps", "Op"]


_MAX_LISTED = 4096
"""With more unmasked tokens per row than this, listing them costs more than it saves."""

_CHUNK = 2**19
"""Chunk size of noise on a CPU, in logits, so that it stays in the CPU's cache."""


class Op(Enum):
    """Effect of an edit on its logit."""

    ADD = "add"
    """Add the value. A token at -inf stays there. Values for one token are summed first."""
    SET = "set"
    """Replace by the value; of several for one token, by the last."""
    KEEP_ONLY = "keep_only"
    """Set all other tokens of the row to -inf; values are unused. A kept token keeps its logit,
    also -inf."""


class LogitsOps:
    """The operations on logits; `Ops` has the fastest implementations for its device.

    Each has a reference implementation in torch here. A row's result does not
    depend on the other rows.
    """

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's most likely token, int64 [rows]; of equals, the lowest id.

        NaN is larger than any number, as in torch.

        Args:
            logits: float32 [rows, vocab], as for the methods below.
        """
        return logits.argmax(-1)

    def keep_tokens(self, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Set the logits of some rows to -inf, in place, but for the tokens of a bitmask.

        Args:
            logits: to change.
            rows: int64 [n], each once.
            bitmask: int32 [n, ceil(vocab / 32)]; token t stays where bit t % 32 of column t // 32
                is set.
        """
        import torch  # noqa: PLC0415 - the contract is imported without it

        vocab = logits.shape[1]
        if logits.device.type != "cpu":
            # Reading the rows' numbers would make the host wait for the device.
            places = torch.arange(8, dtype=torch.uint8, device=bitmask.device)
            bits = (bitmask.contiguous().view(torch.uint8).unsqueeze(-1) >> places) & 1
            masked = bits.flatten(1)[:, :vocab] == 0
            part = logits.index_select(0, rows).masked_fill_(masked, -math.inf)
            logits.index_copy_(0, rows, part)
            return
        places = torch.arange(32, dtype=torch.int32, device=bitmask.device)
        for row, columns in zip(rows.tolist(), bitmask, strict=True):  # one by one: 32 bytes a word
            bits = ((columns.unsqueeze(1) >> places) & 1).flatten()[:vocab]
            logits[row].masked_fill_(bits == 0, -math.inf)

    def edit(
        self,
        logits: torch.Tensor,
        op: Op,
        places: torch.Tensor,
        values: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Edit the logits of some tokens in place, as `Op` defines.

        Args:
            logits: to change.
            op: the edit of each of the tokens.
            places: int64 [n], row * vocab + token; each once.
            values: float32 [n], to add or to set; of no use to KEEP_ONLY.
            rows: int64, the rows of the places, each once; of use to KEEP_ONLY alone.
        """
        if op is Op.KEEP_ONLY:
            assert rows is not None
            kept_logits = logits.take(places)
            if len(rows) == len(logits):
                logits.fill_(-math.inf)
            else:
                logits.index_fill_(0, rows, -math.inf)
            logits.put_(places, kept_logits)
        else:
            assert values is not None
            logits.put_(places, values, accumulate=op is Op.ADD)

    def divide(self, logits: torch.Tensor, divisors: torch.Tensor) -> None:
        """Divide each row by its number, in place; rounded as IEEE 754 defines.

        Args:
            logits: to change.
            divisors: float32 [rows, 1].
        """
        logits.div_(divisors)

    def keep_top_k(self, logits: torch.Tensor, k: torch.Tensor, largest_k: int) -> None:
        """Set the logits below each row's k-th largest one to -inf, in place.

        A row with a largest logit that is not finite stays as it is.

        Args:
            logits: to change.
            k: int64 [rows, 1]; a row with another number than 1 to vocab - 1 stays as it is.
            largest_k: the largest k between 1 and vocab - 1.
        """
        values = logits.topk(largest_k).values
        smallest = values.gather(1, (k - 1).clamp(0, largest_k - 1))
        _mask_below(logits, values, smallest, (k < 1) | (k >= logits.shape[1]))

    def keep_top_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set the logits below each row's nucleus to -inf, in place (arXiv:1904.09751).

        The nucleus is the smallest set of most likely tokens with a total of at least p - 1e-6,
        and all that equal the last of them. Probabilities are summed as whole numbers,
        in any order: round(exp(logit - largest) * 2^40). A row with a largest logit that is not
        finite stays as it is.

        Args:
            logits: to change.
            p: float32 [rows, 1]; a row with 1 or more stays as it is.
        """
        values = logits.sort(descending=True).values
        weights = (values - values[:, :1]).double().exp_().mul_(2.0**40).round_().long()
        reached = weights.cumsum(-1)
        goal = ((p.double() - 1e-6) * reached[:, -1:].double()).long()
        index = (reached < goal).sum(-1, keepdim=True).clamp_(max=values.shape[1] - 1)
        _mask_below(logits, values, values.gather(1, index), p >= 1)

    def keep_min_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set logits below each row's largest one + log(p) to -inf, in place (arXiv:2407.01082).

        A row with a largest logit that is not finite stays as it is.

        Args:
            logits: to change.
            p: float32 [rows, 1]; a row with 0 stays as it is.
        """
        best = logits.amax(-1, keepdim=True)
        _mask_below(logits, best, best + p.log(), p <= 0)

    def draw(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        greedy: torch.Tensor,
    ) -> torch.Tensor:
        """Return a token of each row, int64 [rows], drawn with the probabilities of its logits.

        Tokens run an exponential race: the one with the largest logit - log(E) wins, where E =
        -log(1 - u) is an exponential variate (the Gumbel-max trick, arXiv:1411.0030). u = (bits +
        0.5) / 2^31, where bits is a hash of seed, position and token id. Scores are float64, so
        that implementations draw the same tokens, except where two scores are as close as its
        rounding errors.

        Greedy rows, and rows with a largest logit that is not finite, get the result of `argmax`.

        Args:
            logits: left as they are.
            seeds: int64 [rows].
            positions: int64 [rows]; output position of the token to draw.
            greedy: bool [rows].
        """
        import torch  # noqa: PLC0415 - the contract is imported without it

        tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        if logits.device.type != "cpu":
            # Selecting rows or tokens would make the host wait for the device.
            return race(logits, tokens, seeds, positions, greedy)
        random = (~greedy).nonzero().squeeze(1)
        if len(random) < len(logits):
            chosen = logits.argmax(-1)
            if len(random):
                some = (x[random] for x in (logits, seeds, positions, greedy))
                chosen[random] = LogitsOps.draw(self, *some)
            return chosen
        unmasked = logits != -math.inf
        if int(torch.count_nonzero(unmasked)) <= _MAX_LISTED * len(logits):
            values, places = listed(logits, unmasked)
            winner = race(values, places, seeds, positions, greedy)
            return places.gather(1, winner.unsqueeze(1)).squeeze(1).long()
        step = max(1, _CHUNK // logits.shape[1])
        parts = [slice(start, start + step) for start in range(0, len(logits), step)]
        return torch.cat(
            [race(logits[p], tokens, seeds[p], positions[p], greedy[p]) for p in parts]
        )


def _mask_below(
    logits: torch.Tensor, best: torch.Tensor, threshold: torch.Tensor, is_off: torch.Tensor
) -> None:
    """Set logits below each row's threshold to -inf, in place; `best[:, :1]` are the largest."""
    threshold = threshold.masked_fill(is_off | ~best[:, :1].isfinite(), -math.inf)
    logits.masked_fill_(logits < threshold, -math.inf)


def warm_up(ops: LogitsOps, vocab_size: int, device: torch.device) -> None:
    """Choose tokens of a row of logits in each of the usual ways.

    Kernels that compile at their first call are compiled then, and no request waits for
    it: the trial step of a model calls none of these.
    """
    import torch  # noqa: PLC0415 - the contract is imported without it

    logits = torch.zeros(1, vocab_size, device=device)
    ones = torch.ones(1, 1, device=device)
    number = torch.ones(1, dtype=torch.int64, device=device)
    ops.argmax(logits)
    ops.divide(logits, ones)
    ops.keep_top_k(logits, number.unsqueeze(1), 1)
    ops.keep_top_p(logits, ones / 2)
    ops.keep_min_p(logits, ones / 2)
    ops.draw(logits, number, number, torch.zeros(1, dtype=torch.bool, device=device))
