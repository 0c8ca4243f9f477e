"""A watermark for Hardpoint: the noise that draws tokens comes from a secret key.

The noise of a token depends on seed, output position and token id alone. A hook gives each request
a seed that follows from the key, so its tokens are drawn as without it; who has the key computes
the noise again, and finds that the chosen tokens had too much luck to be by others.

Source: Kuditipudi et al., "Robust distortion-free watermarks for language models", TMLR 2024.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch

from hardpoint import plugins
from hardpoint.plugins import EngineCoreRequest, HookContext, Meta, hookimpl
from hardpoint.plugins.exponential_race import mixed_seed, token_noise

__all__ = ["Watermark", "detect"]


class Watermark:
    """Draws the tokens of random requests by the key; requests with one seed stay repeatable."""

    contract = 1

    class Options(plugins.Options):
        """The secret, and how many seeds follow from it: outputs of a prompt differ by these."""

        key: Annotated[str, Meta(min_length=16)]
        num_seeds: Annotated[int, Meta(ge=1, le=4096)] = 64

    def __init__(self, context: HookContext) -> None:
        """Keep the options."""
        self.options = context.options

    @hookimpl
    def request_received(self, request: EngineCoreRequest) -> None:
        """Give a request one of the seeds, by its own, which is a random one if it has none."""
        seed = request.params.seed
        if seed is not None and not request.params.greedy:
            seed = seed_of(self.options.key, seed % self.options.num_seeds)
            request.params = msgspec.structs.replace(request.params, seed=seed)


def seed_of(key: str, number: int) -> int:
    """Return a seed of a key."""
    digest = hmac.digest(key.encode(), number.to_bytes(4), "sha256")
    return int.from_bytes(digest[:8], signed=True)


def detect(token_ids: Sequence[int], key: str, num_seeds: int = 64, completions: int = 1) -> float:
    """Return the probability that tokens drawn without the key look at least so much as with it.

    Args:
        token_ids: output tokens, from the first on.
        key: secret of the server.
        num_seeds: as the server has it.
        completions: the largest `n` of its requests.
    """
    count = len(token_ids)
    tokens, positions = torch.tensor(token_ids, dtype=torch.int32), torch.arange(count)
    least = 1.0
    for number in range(num_seeds):
        for index in range(completions):
            seed = mixed_seed(seed_of(key, number), index)
            noise = token_noise(tokens, torch.full((count,), seed), positions)
            # Uniform without the key, so the sum is of a gamma distribution.
            luck = -(-(-noise).expm1()).log().sum()
            least = min(least, float(torch.special.gammaincc(torch.tensor(float(count)), luck)))
    return min(1.0, least * num_seeds * completions)
