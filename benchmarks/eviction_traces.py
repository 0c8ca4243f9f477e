"""Prompts of three workloads, as token ids; the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable

BLOCK = 16
Trace = list[list[int]]


class _Texts:
    """Draws texts, no two of which have a token in common."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._used = 0

    def new(self, blocks: int) -> list[int]:
        """Return a new text of about `blocks` blocks."""
        first = self._used
        self._used += blocks * BLOCK - self.random.randrange(BLOCK)
        return list(range(first, self._used))

    def pick(self, count: int) -> int:
        """Return a number below `count`, small ones more often (Zipf with exponent 1)."""
        weights = [1 / (rank + 1) for rank in range(count)]
        return self.random.choices(range(count), weights)[0]


def shared_prompts(seed: int, requests: int) -> Trace:
    """40 system prompts of 8 to 24 blocks, some used far more often, with a question of 1 to 6."""
    texts = _Texts(seed)
    system = [texts.new(texts.random.randint(8, 24)) for _ in range(40)]
    return [system[texts.pick(40)] + texts.new(texts.random.randint(1, 6)) for _ in range(requests)]


def chat(seed: int, requests: int) -> Trace:
    """Up to 48 conversations at a time, each of 1 to 10 turns; a turn repeats what came before."""
    texts = _Texts(seed)
    system = texts.new(12)
    open_ones: list[tuple[list[int], int]] = []
    trace = []
    for _ in range(requests):
        if not open_ones or (len(open_ones) < 48 and texts.random.random() < 0.4):
            open_ones.append((system, texts.random.randint(1, 10)))
        # The newest are the most active.
        index = len(open_ones) - 1 - texts.pick(len(open_ones))
        history, turns = open_ones.pop(index)
        prompt = history + texts.new(texts.random.randint(1, 4))
        trace.append(prompt)
        if turns > 1:
            open_ones.append((prompt + texts.new(texts.random.randint(2, 8)), turns - 1))
    return trace


def scans(seed: int, requests: int) -> Trace:
    """12 system prompts of 16 blocks, and now and then a run of long documents, each read once."""
    texts = _Texts(seed)
    system = [texts.new(16) for _ in range(12)]
    trace: Trace = []
    while len(trace) < requests:
        trace += [texts.random.choice(system) + texts.new(2) for _ in range(30)]
        trace += [texts.new(40) for _ in range(8)]
    return trace[:requests]


TRACES: dict[str, Callable[[int, int], Trace]] = {
    "shared prompts": shared_prompts,
    "chat": chat,
    "scans": scans,
}
