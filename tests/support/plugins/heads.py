"""Speculators that draft from hidden states, as EAGLE does (Y. Li et al., 2024)."""

from __future__ import annotations

import torch

from hardpoint.plugins import Speculator
from hardpoint.testing import history_hash
from hardpoint.testing.scripted import HISTORY_BASE, HISTORY_MODULUS

STARTS = []
"""Of each call and request: length of its output, and position of the first hidden state."""


class Head(Speculator):
    """Drafts by a network of random weights, from a hidden state and the token after it.

    What it computes takes the place of the hidden state for the draft after the next.
    """

    contract = 1
    needs_hidden = True

    def __init__(self, context):
        super().__init__(context)
        generator = torch.Generator().manual_seed(0)
        size, vocab_size = context.hidden_size, context.vocab_size
        self.mix = torch.randn(2 * size, size, generator=generator)
        self.embeddings = torch.randn(vocab_size, size, generator=generator)

    def propose(self, requests, budget):
        hidden = torch.stack([request.hidden[-1] for request in requests]).float()
        tokens = torch.tensor([request.output_token_ids[-1] for request in requests])
        drafts = []
        for _ in range(max(request.limit for request in requests)):
            hidden = self.following(hidden, tokens)
            tokens = self.logits(hidden).argmax(-1)
            drafts.append(tokens)
        rows = torch.stack(drafts, 1).tolist()
        return [row[: request.limit] for row, request in zip(rows, requests, strict=True)]

    def following(self, hidden, tokens):
        return torch.cat([hidden, self.embeddings[tokens]], 1).mul(0.1) @ self.mix

    def logits(self, hidden):
        return hidden @ self.embeddings.T


class ExactHead(Head):
    """The scripted model as a head: each draft of a greedy request is right.

    It fails unless the hidden states are those of the tokens just before the newest one.
    """

    contract = 1

    def propose(self, requests, budget):
        for request in requests:
            text = [*request.prompt_token_ids, *request.output_token_ids][:-1]
            start = len(text) - len(request.hidden)
            STARTS.append((len(request.output_token_ids), start))
            values = self.values(request.hidden)
            expected = [history_hash(text[:end]) for end in range(start + 1, len(text) + 1)]
            assert values.view(-1).tolist() == expected
        return super().propose(requests, budget)

    def values(self, hidden):
        parts = hidden.long()
        return (parts[:, :1] << 16) + parts[:, 1:]

    def following(self, hidden, tokens):
        values = self.values(hidden) * HISTORY_BASE + tokens.unsqueeze(1) + 1
        values %= HISTORY_MODULUS
        return torch.cat([values >> 16, values & 0xFFFF], 1).float()

    def logits(self, hidden):
        tokens = torch.arange(self.context.vocab_size)
        mixed = (self.values(hidden) * 48_271 + tokens * 69_621) % HISTORY_MODULUS
        return (mixed * 16_807 + 11) % HISTORY_MODULUS % 65_536
