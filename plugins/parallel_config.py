"""The table `[parallel]` of the configuration."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hardpoint.typed import Strict

from .config_tables import Live, PositiveSeconds, Reference


class RayConfig(Strict):
    """The table `[parallel.ray]`: engines in actors of a Ray cluster.

    Attributes:
        address: `HOST:PORT` of the cluster. "auto" is the one that RAY_ADDRESS names, else the one
            that runs on this machine. A cluster that the program has joined itself is used.
        num_cpus: CPUs that each rank of an engine reserves.
        num_gpus: GPUs that each rank reserves; None is 1 if the cluster has GPUs, else 0.
        resources: resources of the cluster's own kinds that each rank reserves.
    """

    address: Annotated[str, Meta(min_length=1)] = "auto"
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    num_gpus: Annotated[int, Meta(ge=0, le=1)] | None = None
    resources: dict[str, Annotated[float, Meta(gt=0)]] = {}


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
        join_address: where engines of other machines join, `tcp://HOST:PORT`; None if none do. With
            `ray`, where its engines connect to; None is any port of this node.
        join_address_file: file that the address is written to while engines may join, with the port
            that the system chose if `join_address` has port 0.
        local: engines that are processes of this machine, those of the lowest ranks; the others
            join, or run on Ray. None is all of them, with `ray` none.
        ray: run the engines that are not local on a Ray cluster; None is without.
        keys: folder of the keys of engines that may join (`hardpoint keys`), needed where
            `join_address` is not one of this machine alone.
        join_seconds: maximum time to wait for each engine that is to join, or to run on Ray.
        heartbeat_seconds: an engine that sends nothing for so long counts as dead; its process ends
            after so long without a message of this program.
    """

    tensor: Annotated[int, Meta(ge=1, le=1024)] = 1
    pipeline: Annotated[int, Meta(ge=1, le=1024)] = 1
    expert: bool = False
    communicator: Reference = "auto"
    start_seconds: PositiveSeconds = 120.0
    data: Annotated[int, Meta(ge=1, le=1024)] = 1
    balancer: Live[Reference] = "least_cost"
    join_address: Annotated[str, Meta(min_length=1)] | None = None
    join_address_file: Annotated[str, Meta(min_length=1)] | None = None
    local: Annotated[int, Meta(ge=0, le=1024)] | None = None
    ray: RayConfig | None = None
    keys: Annotated[str, Meta(min_length=1)] | None = None
    join_seconds: PositiveSeconds = 600.0
    heartbeat_seconds: Annotated[float, Meta(ge=0.5, le=3600)] = 10.0

    @property
    def num_local(self) -> int:
        """Number of engines that are processes of this machine."""
        if self.local is None:
            return self.data if self.ray is None else 0
        return min(self.local, self.data)

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
