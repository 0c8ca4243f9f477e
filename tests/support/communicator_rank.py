"""A rank of a torch communicator, in a process of its own or in a thread."""

from __future__ import annotations

import sys
import time

import torch

from hardpoint.builtin_plugins.communicators.torch import TorchCommunicator
from hardpoint.plugins.parallel import CommunicatorContext, Placement


def join(rank, placement, group="group", seconds=120.0):
    """Return the communicator of a rank, once all have come."""
    return TorchCommunicator(
        CommunicatorContext(
            name="torch",
            options=None,
            group=group,
            rank=rank,
            size=len(placement.hosts),
            device=torch.device("cpu"),
            placement=placement,
            timeout_seconds=seconds,
        )
    )


if __name__ == "__main__":
    communicator = join(int(sys.argv[1]), Placement(hosts=("", ""), folder=sys.argv[2]))
    communicator.all_reduce(torch.zeros(1))
    time.sleep(600)  # it is killed
