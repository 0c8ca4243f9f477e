"""Checks of an engine in which a step part releases KV blocks of running requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hardpoint.errors import ConfigError, ModelError, PluginFaultError
from hardpoint.plugins import (
    AttentionBackend,
    AttentionStep,
    EngineConfig,
    KVSpec,
    LogitsRequest,
    Scheduler,
    StepPart,
)
from hardpoint.plugins.component import Source

if TYPE_CHECKING:
    import torch

__all__ = ["StepWeights", "check_attention", "check_scheduler"]


class PartOwner(Protocol):
    """The half of a step part."""

    @property
    def part(self) -> StepPart:
        """The part."""

    @property
    def source(self) -> Source:
        """Its name in messages."""


class Attention(Protocol):
    """The attention backend of a model, its layers, and `states` of recurrent layers or None."""

    backend: AttentionBackend
    source: Source
    specs: Sequence[KVSpec]
    group_of: tuple[int, ...]
    states: Any


def check_scheduler(
    halves: Sequence[PartOwner], scheduler: type[Scheduler], source: Source, config: EngineConfig
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


def check_attention(
    releasing: Sequence[Source], reading: Sequence[Source], attention: Attention, max_model_len: int
) -> None:
    """Check that step parts can release blocks and read attention weights.

    Args:
        releasing: step parts with `releases_blocks`.
        reading: step parts with `take_attention_weights`.
        attention: attention of the model.
        max_model_len: longest request.

    Raises:
        ConfigError: a layer does not attend to all tokens.
        ModelError: the attention backend reports no weights.
    """
    for part in reading:
        if not attention.backend.reports_weights:
            raise ModelError(
                f"attention.use: {attention.source} has no attention weights (reports_weights), "
                f'which {part} reads; "torch" has them'
            )
    windows = [s.window for s in attention.specs if s.window and s.window < max_model_len]
    other = "sliding windows" if windows else "no KV cache"
    other = other if attention.states is None else "recurrent layers"
    for part in releasing:
        if windows or attention.states is not None or not attention.specs:
            raise ConfigError(
                f"{part} releases blocks of the KV cache (releases_blocks): expected a model with "
                f"attention to all tokens in each layer, got {other}"
            )


@dataclass(frozen=True)
class StepWeights:
    """The attention weights of a step; see `AttentionWeights`.

    Attributes:
        attention: attention of the model.
        caches: cache of each layer.
        steps: positions of the step, one per group.
        requests: requests of the step.
    """

    attention: Attention
    caches: Sequence[Any]
    steps: Sequence[AttentionStep]
    requests: Sequence[LogitsRequest]

    def __call__(self, layer: int, q: torch.Tensor, request_id: str, count: int) -> torch.Tensor:
        """Return the attention weights of the last tokens of a request.

        Raises:
            PluginFaultError: the backend returned something else.
        """
        attention, row = self.attention, [r.request_id for r in self.requests].index(request_id)
        step, spec = self.steps[attention.group_of[layer]], attention.specs[layer]
        end, shape = int(step.query_starts[row + 1]), (spec.num_heads, int(step.seq_lens[row]))
        queries, cache = q[end - count : end], self.caches[layer]
        weights = attention.backend.attention_weights(spec, cache, step, row, queries)
        form = getattr(weights, "shape", None), str(getattr(weights, "dtype", None))
        if form != (shape, "torch.float32"):
            raise PluginFaultError(
                f"{attention.source}: its attention_weights() gave {form[1]} {form[0]}, expected "
                f"torch.float32 {list(shape)}"
            )
        return weights
