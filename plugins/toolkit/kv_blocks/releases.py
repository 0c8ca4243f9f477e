"""Checks of an engine in which a step part releases KV blocks of running requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hardpoint.errors import ConfigError
from hardpoint.plugins import EngineConfig, KVSpec, Scheduler, StepPart
from hardpoint.plugins.component import Source

__all__ = ["check_layers", "check_scheduler"]


class Half(Protocol):
    """The half of a step part."""

    @property
    def part(self) -> StepPart:
        """The part."""

    @property
    def source(self) -> Source:
        """Its name in messages."""


def check_scheduler(
    halves: Sequence[Half], scheduler: type[Scheduler], source: Source, config: EngineConfig
) -> None:
    """Check that steps end where blocks are released, and that no connector moves blocks.

    Raises:
        ConfigError: a part releases blocks, and cannot here.
    """
    for part in [half.source for half in halves if half.part.releases_blocks]:
        releases = f"{part} releases blocks of the KV cache (releases_blocks)"
        if not scheduler.releases_blocks:
            raise ConfigError(
                f"{source}: expected a scheduler with releases_blocks = True, because {releases}"
            )
        if not config.scheduler.chunked_prefill:
            raise ConfigError(
                f"scheduler.chunked_prefill: expected true, because {releases}, got false"
            )
        if moving := [half.part.moves_blocks for half in halves if half.part.moves_blocks]:
            raise ConfigError(f"{moving[0]}: expected none, because {releases}")


def check_layers(
    part: Source, specs: Sequence[KVSpec], max_model_len: int, *, has_states: bool
) -> None:
    """Check that all layers of a model attend to all tokens.

    Args:
        part: step part that releases blocks.
        specs: attention layers.
        max_model_len: longest request.
        has_states: whether there are recurrent layers.

    Raises:
        ConfigError: there are other layers.
    """
    windows = [spec.window for spec in specs if spec.window and spec.window < max_model_len]
    if windows or has_states or not specs:
        other = "recurrent layers" if has_states else "no KV cache"
        if windows:
            other = f"sliding windows of {windows[0]} tokens"
        raise ConfigError(
            f"{part} releases blocks of the KV cache (releases_blocks): expected a model with "
            f"attention to all tokens in each layer, got {other}"
        )
