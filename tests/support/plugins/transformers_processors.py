"""Logits processors in transformers' form."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class Repetition(LogitsProcessor):
    """Punishes tokens of prompt and output by a factor; dense, as transformers' own is.

    Method: CTRL, arXiv:1909.05858.
    """

    def __init__(self, penalty):
        self.penalty = penalty

    def __call__(self, input_ids, scores):
        assert input_ids.dtype == torch.int64
        assert input_ids.shape[0] == scores.shape[0] == 1
        score = torch.gather(scores, 1, input_ids)
        score = torch.where(score < 0, score * self.penalty, score / self.penalty)
        return scores.scatter(1, input_ids, score)


class Counting:
    """In transformers' form without deriving from it; keeps state between its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor):
        scores[:, 65 + self.calls] = 1e4
        self.calls += 1
        return scores


counting = Counting()
repetition = Repetition(0.1)


both = LogitsProcessorList([Repetition(0.1), Counting()])
