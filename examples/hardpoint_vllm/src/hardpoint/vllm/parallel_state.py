"""vLLM's state of ranks, as a program's own process sees it: it is alone.

Ranks of an engine run in processes of the engine, and leave their groups when it is closed.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessGroup:
    """The group of this process."""

    rank: int = 0
    rank_in_group: int = 0
    local_rank: int = 0
    world_size: int = 1
    is_first_rank: bool = True
    is_last_rank: bool = True


def get_world_group() -> ProcessGroup:
    """Return the group of this process, which is alone."""
    return ProcessGroup()


get_tp_group = get_pp_group = get_dp_group = get_ep_group = get_world_group


def get_tensor_model_parallel_rank() -> int:
    """Return 0: this process is alone."""
    return 0


def get_tensor_model_parallel_world_size() -> int:
    """Return 1: this process is alone."""
    return 1


def model_parallel_is_initialized() -> bool:
    """Return False: this process has no ranks."""
    return False


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage. `LLM.close` and leaving its `with` block release an engine."""
    del shutdown_ray
    gc.collect()


def destroy_model_parallel() -> None:
    """Do nothing: an engine that is closed has left its groups."""


def destroy_distributed_environment() -> None:
    """Do nothing: an engine that is closed has left its groups."""
