"""The table `[parallel]` of the configuration."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hardpoint.typed import Strict

from .config_tables import PositiveSeconds, Reference


class ParallelConfig(Strict):
    """How many workers share the model, and how they communicate.

    Attributes:
        tensor: ranks that divide each layer among them.
        pipeline: stages that the layers are divided into, each of `tensor` ranks.
        expert: give each rank whole experts of a mixture of experts, instead of a part of each;
            with `data`, spread them over the ranks of all engines.
        communicator: what moves tensors between ranks; "auto" is shared memory between the CPU
            ranks of one host, and torch.distributed elsewhere.
        start_seconds: maximum time for the ranks to find each other.
        data: engines, each in a process of its own, with the whole model, or with a part of its
            experts (`expert`); requests are divided among them.
        balancer: chooses the engine of each request.
    """

    tensor: Annotated[int, Meta(ge=1, le=1024)] = 1
    pipeline: Annotated[int, Meta(ge=1, le=1024)] = 1
    expert: bool = False
    communicator: Reference = "auto"
    start_seconds: PositiveSeconds = 120.0
    data: Annotated[int, Meta(ge=1, le=1024)] = 1
    balancer: Reference = "least_cost"

    @property
    def world_size(self) -> int:
        """Number of ranks of an engine."""
        return self.tensor * self.pipeline

    @property
    def spreads_experts(self) -> bool:
        """Whether the engines share experts, so that each needs the others in every step."""
        return self.expert and self.data > 1

    @property
    def output_rank(self) -> int:
        """The rank that samples: tensor rank 0 of the last stage."""
        return self.world_size - self.tensor
