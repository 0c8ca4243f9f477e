"""Loads of offline batches as data: numbers of requests, and lengths of prompts and outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from backends import Batch

VALID = (100, 40_000)
"""Range of token ids that are valid in every engine."""
BYTES = (1, 250)
"""Range of the token ids of the scripted model."""
_WARM_UP = 8  # requests of a load that warm up for it


def random_ids(rng: random.Random, count: int, vocabulary: tuple[int, int]) -> list[int]:
    """Return random token ids of a range."""
    return [rng.randrange(*vocabulary) for _ in range(count)]


@dataclass(frozen=True)
class Load:
    """`count` prompts of random tokens, sent at once, each continued greedily.

    Attributes:
        prompt: the fewest and the most tokens of a prompt.
        output: the fewest and the most tokens of its continuation.
        shared: number of prompt tokens that all share.
        vocabulary: range of token ids; by default those that are valid in every engine.
        adapters: number of LoRA adapters that the prompts use in turn.
    """

    count: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    shared: int = 0
    vocabulary: tuple[int, int] = VALID
    adapters: int = 0

    def lengths(self) -> list[tuple[int, int]]:
        """Return prompt and output tokens per request, the same in each round."""
        rng = random.Random(0)
        return [(rng.randint(*self.prompt), rng.randint(*self.output)) for _ in range(self.count)]

    def batch(self, seed: str, count: int | None = None) -> Batch:
        """Return the first `count` requests."""
        rng = random.Random(seed)
        prefix = random_ids(rng, self.shared, self.vocabulary)
        lengths = self.lengths()[:count]
        prompts = [
            prefix + random_ids(rng, length - self.shared, self.vocabulary) for length, _ in lengths
        ]
        adapters = [index % self.adapters for index in range(len(prompts) * bool(self.adapters))]
        return Batch(prompts, [output for _, output in lengths], self.shared, adapters)

    def rounds(self, name: str, count: int) -> Iterator[Batch]:
        """Yield a few requests that warm up, then the batch of each round."""
        yield self.batch(f"{name}, first", _WARM_UP)
        for number in range(count):
            yield self.batch(f"{name}, {number}")

    @property
    def generated(self) -> int:
        """The number of output tokens."""
        return sum(output for _, output in self.lengths())

    @property
    def tokens(self) -> int:
        """The number of counted tokens: output tokens; prompt tokens if one token is generated."""
        if self.output == (1, 1):
            return sum(prompt for prompt, _ in self.lengths())
        return self.generated

    def __str__(self) -> str:
        """Return the load as a table names it."""
        low, high = self.prompt
        prompt, output = _range(low, high), _range(*self.output)
        if self.shared:
            prompt = f"({self.shared} shared + {_range(low - self.shared, high - self.shared)})"
        return f"{self.count} x {prompt}/{output}"


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


LOADS = {
    "single": Load(1, (32, 32), (128, 128)),
    "batch": Load(32, (128, 128), (128, 128)),
    "prefill": Load(16, (512, 512), (1, 1)),
    "mixed": Load(128, (64, 512), (16, 256)),
    "shared": Load(64, (544, 544), (32, 32), shared=512),
    "short": Load(2, (16, 16), (8, 8)),
}
"""`short` is no load of a table: it shows that the engines run."""
