"""Communication by torch.distributed: nccl between GPUs, gloo between CPUs."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hardpoint.errors import CommunicationAbortedError, ModelError
from hardpoint.plugins.parallel import Communicator, CommunicatorContext

from .gloo import GlooGroup
from .nccl import NcclGroup
from .rendezvous import Rendezvous, dist


class TorchCommunicator(Communicator):
    """Groups of torch.distributed that are registered nowhere, so that plugins may use their own.

    On one host, ranks listen on loopback only; on several, each on its address of the placement.
    Nccl chooses interfaces by itself (`NCCL_SOCKET_IFNAME`).
    """

    contract = 1
    devices = ("cpu", "cuda")

    def __init__(self, context: CommunicatorContext) -> None:
        """Meet the other ranks.

        Raises:
            ModelError: torch has no such communication, a rank cannot listen on its address, or
                did not come in time.
        """
        super().__init__(context)
        self._failure: str | None = None
        self._lock = threading.Lock()
        on_gpu = context.device.type == "cuda"
        if not (dist.is_available() and _has_library(on_gpu=on_gpu)):
            raise ModelError(
                f"parallel.communicator: {context.name!r} needs torch with "
                f"{'nccl' if on_gpu else 'gloo'}, which torch {torch.__version__} does not have"
            )
        rendezvous = Rendezvous(context)
        self._group: GlooGroup | NcclGroup | None = (
            NcclGroup(context, rendezvous) if on_gpu else GlooGroup(context, rendezvous)
        )
        self._description = self._group.description

    def describe(self) -> str:
        """Name the library and the address."""
        return self._description

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the x of all ranks."""
        with self._running("all_reduce", x) as group:
            return group.all_reduce(x) if x.numel() else x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the x of all ranks."""
        with self._running("all_gather", x) as group:
            return group.all_gather(x) if x.numel() else x.new_empty((self.size, *x.shape))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange rows."""
        if x.dim() == 0 or len(x) != self.size:
            raise ValueError(
                f"x: expected {self.size} rows, one per rank, got the shape {list(x.shape)}"
            )
        with self._running("all_to_all", x) as group:
            return group.all_to_all(x) if x.numel() else x

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Return the x of one rank."""
        self._check_rank("source", source)
        with self._running("broadcast", x) as group:
            return group.broadcast(x, source) if x.numel() else x

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Send a copy of x; wait if four that were sent before have not been received."""
        self._check_rank("destination", destination, is_other=True)
        with self._running("send", x) as group:
            if x.numel():
                group.send(x, destination)

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into x."""
        self._check_rank("source", source, is_other=True)
        with self._running("recv", x) as group:
            return group.recv(x, source) if x.numel() else x

    def abort(self, reason: str) -> None:
        """Close the connections, at which all ranks fail."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure, group = reason, self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Leave the group; messages not yet received are lost."""
        with self._lock:
            self._failure = self._failure or "it was closed"
            self._group = None

    @contextmanager
    def _running(self, call: str, x: torch.Tensor) -> Iterator[GlooGroup | NcclGroup]:
        """Return the group; after a failed call, all further calls fail in all ranks."""
        group = self._group
        if self._failure is not None or group is None:
            raise CommunicationAbortedError(self._message(call))
        if not x.is_contiguous() or x.device.type != self.context.device.type:
            raise ValueError(
                f"x: expected a contiguous tensor on {self.context.device}, got one with strides "
                f"{x.stride()} on {x.device}"
            )
        try:
            yield group
        except RuntimeError as error:
            was_aborted = self._failure is not None
            self.abort(_cause(error))
            if was_aborted or _is_of_connection(error):
                raise CommunicationAbortedError(self._message(call)) from error
            raise

    def _message(self, call: str) -> str:
        return f"{call} of rank {self.rank} in group {self.context.group!r}: {self._failure}"

    def _check_rank(self, operation: str, rank: int, *, is_other: bool = False) -> None:
        if not 0 <= rank < self.size or (is_other and rank == self.rank):
            which = f"one of the others than {self.rank}" if is_other else "a rank"
            raise ValueError(f"{operation}: expected {which} from 0 to {self.size - 1}, got {rank}")


def _has_library(*, on_gpu: bool) -> bool:
    return bool(dist.is_nccl_available() if on_gpu else dist.is_gloo_available())


def _is_of_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "/gloo/transport/" in str(error)


def _cause(error: RuntimeError) -> str:
    text = re.sub(r"^\[[^\]]*:\d+\] ", "", str(error).partition("\n")[0])
    return text.partition(". This is typically")[0]
