"""The options of the executor `ray`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from hardpoint import plugins


class RayOptions(plugins.Options):
    """Which cluster the workers run on, and what each of them gets.

    Attributes:
        address: `HOST:PORT` of the cluster. "auto" is the one that RAY_ADDRESS names, else the one
            that runs on this machine. "local" starts a cluster on this machine and ends it with
            the engine. A cluster that the program has joined itself is used and left as it is.
        namespace: Ray's namespace in which the actors are; empty is a new one.
        placement: how the workers are spread over nodes: PACK on few, SPREAD over many, STRICT_PACK
            on one, STRICT_SPREAD each on another.
        num_cpus: CPUs that a worker reserves.
        num_gpus: GPUs that a worker reserves; None is 1 if the cluster has GPUs, else 0.
        resources: resources of the cluster's own kinds that a worker reserves.
        runtime_env: runtime environment of the actors, as Ray has it.
        join_timeout_seconds: maximum time until the cluster answers.
        start_timeout_seconds: maximum time until the resources are free and the actors run,
            including what `runtime_env` installs.
    """

    address: Annotated[str, Meta(min_length=1)] = "auto"
    namespace: str = ""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    num_gpus: Annotated[int, Meta(ge=0, le=1)] | None = None
    resources: dict[str, Annotated[float, Meta(gt=0)]] = {}
    runtime_env: dict[str, Any] = {}
    join_timeout_seconds: Annotated[float, Meta(gt=0)] = 10.0
    start_timeout_seconds: Annotated[float, Meta(gt=0)] = 300.0
