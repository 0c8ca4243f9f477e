"""Poolers with faults, for the tests of pooling."""

from __future__ import annotations

import torch

from hardpoint.plugins import Pooler, PromptPooler

STARTED: list[int] = []
"""Length of the prompt of each pooling that was started."""


class _Sum(PromptPooler):
    def __init__(self, fails: str):
        self._fails, self._sum = fails, 0

    def update(self, hidden):
        if self._fails == "update":
            raise KeyError("no hidden states")
        self._sum = self._sum + hidden.sum(0)

    def finish(self):
        if self._fails == "finish":
            raise ValueError("nothing to give")
        return {
            "shape": self._sum[:3],
            "kind": [1.0],
            "nan": self._sum * float("nan"),
        }.get(self._fails, self._sum)


class Faulty(Pooler):
    """Fails for prompts, by their first token."""

    contract = 1
    fails = ("", "start", "update", "finish", "shape", "kind", "nan", "object")

    def start(self, prompt_token_ids, arguments):
        STARTED.append(len(prompt_token_ids))
        fails = self.fails[prompt_token_ids[0]] if prompt_token_ids[0] < len(self.fails) else ""
        if fails == "start":
            raise RuntimeError("not today")
        return torch.zeros(1) if fails == "object" else _Sum(fails)
