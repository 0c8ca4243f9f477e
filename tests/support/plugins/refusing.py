"""A plugin that cannot be made, which only the rank that samples finds out."""

from __future__ import annotations

from hardpoint.plugins import Sampler


class RefusesToSample(Sampler):
    contract = 1

    def __init__(self, context):
        raise OSError("no such thing")

    def sample(self, logits, rows):
        raise NotImplementedError
