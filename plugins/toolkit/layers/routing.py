"""How the router of a mixture of experts chooses some of them for a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["SigmoidRouting", "SoftmaxRouting"]


@dataclass(frozen=True, kw_only=True)
class SigmoidRouting:
    """How experts are chosen by sigmoids of the router's logits (DeepSeek-V3, arXiv:2412.19437).

    The largest sums of sigmoid and `gate.e_score_correction_bias` are chosen; the sigmoids are the
    weights. Experts may be in groups of one size; then only the groups with the largest sums of
    their two largest values count.

    Attributes:
        groups: number of groups.
        chosen_groups: how many of them count.
        scale: factor of the weights.
    """

    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    def route(
        self, logits: torch.Tensor, bias: torch.Tensor, per_token: int, *, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the chosen experts, and the experts, each [rows, per_token].

        Args:
            logits: logits of the router, float32 [rows, experts].
            bias: float32 [experts].
            per_token: number of experts of a row.
            normalize: whether weights are scaled to a sum of 1, before `scale`.
        """
        scores = sigmoid(logits)
        ranked = scores + bias
        if self.chosen_groups < self.groups:
            ranked = _of_best_groups(ranked, self.groups, self.chosen_groups, summed=2)
        chosen = ranked.topk(per_token).indices
        weights = scores.gather(-1, chosen)
        if normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, chosen


@dataclass(frozen=True, kw_only=True)
class SoftmaxRouting:
    """How experts are chosen by the softmax of the router's logits, the largest of it.

    They are the weights. Experts may be in groups of one size; then only the groups with the
    largest values count (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        groups: number of groups.
        chosen_groups: how many of them count.
        scale: factor of the weights.
    """

    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    def route(
        self, logits: torch.Tensor, per_token: int, *, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the chosen experts, and the experts, each [rows, per_token].

        Args:
            logits: logits of the router, float32 [rows, experts].
            per_token: number of experts of a row.
            normalize: whether weights are scaled to a sum of 1, before `scale`.
        """
        scores = logits.softmax(-1)
        if self.chosen_groups < self.groups:
            scores = _of_best_groups(scores, self.groups, self.chosen_groups, summed=1)
        weights, chosen = scores.topk(per_token)
        if normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scale, chosen


def _of_best_groups(scores: torch.Tensor, groups: int, chosen: int, *, summed: int) -> torch.Tensor:
    """Return scores [rows, experts], -inf but for the groups with the largest sums.

    Args:
        scores: they are not changed.
        chosen: how many of them keep their scores.
        summed: how many scores of a group are summed, the largest ones.
    """
    grouped = scores.view(len(scores), groups, -1)
    best = grouped.topk(summed).values.sum(-1).topk(chosen).indices
    counts = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~counts.unsqueeze(-1), -torch.inf).flatten(-2)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid as a softmax of two values; rows do not depend on each other."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]
