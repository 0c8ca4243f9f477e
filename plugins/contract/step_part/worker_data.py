"""Arguments of the worker hooks of step parts: rows of a step, and the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint.plugins.kv_cache.block_identity import BlockIdentity

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.model.attention_step import AttentionStep
    from hardpoint.plugins.model.forward import Attend

__all__: list[str] = []


@dataclass(frozen=True)
class KVBlocks:
    """The KV cache of a rank, as a step part sees it that moves blocks.

    Attributes:
        identity: inputs of the bytes of its blocks, besides tokens.
        layers: per layer of this rank, views of its memory, uint8 [num_blocks, bytes], which
            together are all bytes of each block: of keys and values, and of `block_memory`.
    """

    identity: BlockIdentity
    layers: Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class AllocatedCache:
    """The KV cache of a worker.

    Attributes:
        attend: plans a step over this cache by the layouts of its groups; returns its attention.
        max_model_len: tokens of a sequence, at most.
        block_size: tokens per block.
        num_groups: KV cache groups.
        num_blocks: blocks, of all groups.
        group_of: group of each layer of this rank.
        windows: tokens that the layers of each group see; None is all. Blocks before these may be
            others' by now.
    """

    attend: Callable[[Sequence[AttentionStep]], Attend]
    max_model_len: int
    block_size: int
    num_groups: int
    num_blocks: int = 0
    group_of: Sequence[int] = ()
    windows: Sequence[int | None] = ()


@dataclass(frozen=True)
class StepRows:
    """The requests of a worker's step that use a part, in the order of their tokens.

    Attributes:
        request_ids: ids of these requests.
        starts: index of the first token of each request, and at the end the number of all tokens.
    """

    request_ids: Sequence[str]
    starts: Sequence[int]
