"""Communication by torch.distributed: nccl between GPUs, gloo between CPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed as dist

from hardpoint.plugins.parallel import Communicator, CommunicatorContext


class TorchCommunicator(Communicator):
    """A process group of torch.distributed."""

    contract = 1
    devices = ("cpu", "cuda")

    def __init__(self, context: CommunicatorContext) -> None:
        """Meet the other ranks."""
        super().__init__(context)
        timeout = timedelta(seconds=context.timeout_seconds)
        store = dist.FileStore(f"{context.placement.folder}/{context.group}", context.size)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore(context.group, store), context.rank, context.size, options
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the x of all ranks, in float32, in their order."""
        parts = self.all_gather(x)
        return parts.float().sum(0).to(x.dtype) if x.is_floating_point() else parts.sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the x of all ranks."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.stack(parts)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange rows."""
        result = torch.empty_like(x)
        self._group.alltoall_base(result, x.contiguous(), [], []).wait()
        return result

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Return the x of one rank."""
        self._group.broadcast(x, source).wait()
        return x

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Send x."""
        self._group.send([x], destination, 0).wait()

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into x."""
        self._group.recv([x], source, 0).wait()
        return x

    def abort(self, reason: str) -> None:
        """Do nothing yet."""
