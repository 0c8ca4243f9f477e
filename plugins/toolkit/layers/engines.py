"""Experts that are spread over several engines: tokens go to them, and results come back.

Importing this module loads torch, as `models` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hardpoint.plugins.parallel import Communicator

__all__ = ["over_engines"]

Apply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the sum of this rank's experts, given x, chosen experts and weights."""


def over_engines(
    engines: Communicator,
    apply: Apply,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return [rows, hidden]: this tensor rank's sum over the experts of all engines.

    Every rank gets the tokens of all engines, as many as each has, and computes its own
    experts. All engines have to call this, each with at least one row.

    Args:
        engines: `Parallel.engines`; with one engine alone nothing is sent.
        apply: computes the experts of this rank.
        x: [rows, hidden].
        chosen: int64 [rows, experts per token], among all experts.
        weights: the weight of each of these, float32.
    """
    if engines.size == 1:
        return apply(x, chosen, weights)
    num_rows = len(x)
    counts = _gathered(engines, torch.tensor([num_rows], device=x.device)).flatten().tolist()
    parts = (x, chosen.to(torch.int32), weights)
    tokens = _with_rows(torch.cat([_as_bytes(part) for part in parts], 1), max(counts))
    sent = _gathered(engines, tokens)  # [engines, rows, bytes]
    every = torch.cat([rows[:count] for rows, count in zip(sent, counts, strict=True)])
    x, chosen, weights = _parted(every, parts)
    y = apply(x, chosen.long(), weights)
    results = torch.stack([_with_rows(rows, max(counts)) for rows in torch.split(y, counts)])
    received = engines.all_to_all(results)[:, :num_rows]
    total = received[0].to(torch.promote_types(y.dtype, torch.float32))
    for part in received[1:]:  # in the order of the engines, so that all add alike
        total = total + part
    return total.to(y.dtype)


def _gathered(engines: Communicator, x: torch.Tensor) -> torch.Tensor:
    return engines.all_gather(x.contiguous())


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _parted(rows: torch.Tensor, like: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the columns of rows of bytes as tensors, with the dtypes and widths of others."""
    sizes = [part.shape[1] * part.element_size() for part in like]
    columns = torch.split(rows, sizes, 1)
    return [c.contiguous().view(part.dtype) for c, part in zip(columns, like, strict=True)]


def _with_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(count - len(x), x.shape[1])]) if count > len(x) else x
