"""The race by which `LogitsOps.draw` chooses a token: noise by seed, position and token id."""

from .model.exponential_race import listed as listed
from .model.exponential_race import (
    mixed_seed,
    token_noise,
)
from .model.exponential_race import race as race

__all__ = ["mixed_seed", "token_noise"]
