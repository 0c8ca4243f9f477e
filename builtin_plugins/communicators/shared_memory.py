"""Communication between the CPU ranks of one host, through memory that they share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
from msgspec import Meta

from hardpoint import plugins
from hardpoint.errors import CommunicationAbortedError
from hardpoint.kernels import cpu
from hardpoint.kernels.collectives import SUMMED, Group, allocate_group
from hardpoint.kernels.shared_memory import MAX_MEMBERS, AbortedError
from hardpoint.plugins import ModelError
from hardpoint.plugins.parallel import Communicator, CommunicatorContext

from .meeting import Meeting


class SharedMemoryCommunicator(Communicator):
    """Exchanges tensors through shared memory, in compiled code.

    The memory is anonymous, and allocated at start. Ranks notice within 0.1 s that the process of
    another rank has ended.
    """

    contract = 1
    devices = ("cpu",)

    class Options(plugins.Options):
        """Sizes of the memory allocated at start.

        Attributes:
            chunk_bytes: size of the pieces of large tensors; each rank has two buffers of it.
            ring_bytes: size of the send buffer between two ranks, one per direction. Larger
                tensors are streamed.
        """

        chunk_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 256 << 10
        ring_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 512 << 10

    options: Options

    def __init__(self, context: CommunicatorContext) -> None:
        """Meet the other ranks.

        Raises:
            ModelError: the ranks are not on one host, or one cannot share memory.
        """
        super().__init__(context)
        if not context.placement.is_one_host:
            hosts = ", ".join(dict.fromkeys(context.placement.hosts))
            raise self._unusable(f"its ranks are on several hosts: {hosts}")
        if context.device.type != "cpu":
            raise self._unusable(f"it moves tensors of the CPU, these are on {context.device}")
        if context.size > MAX_MEMBERS:
            raise self._unusable(f"it has at most {MAX_MEMBERS} ranks, these are {context.size}")
        self._group = self._meet(context)

    def describe(self) -> str:
        """Say that nothing else is needed."""
        return "shared memory"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the x of all ranks."""
        if x.dtype not in SUMMED:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
            raise ValueError(f"x: expected one of the dtypes {names}, got {x.dtype}")
        with self._running("all_reduce", x):
            return self._group.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the x of all ranks."""
        with self._running("all_gather", x):
            return self._group.all_gather(x)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange rows."""
        if x.dim() == 0 or len(x) != self.size:
            raise ValueError(
                f"x: expected {self.size} rows, one per rank, got the shape {list(x.shape)}"
            )
        with self._running("all_to_all", x):
            return self._group.all_to_all(x)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Return the x of one rank."""
        self._check_rank("source", source)
        with self._running("broadcast", x):
            return self._group.broadcast(x, source)

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Copy x; wait if the ring to the destination is full."""
        self._check_rank("destination", destination, is_other=True)
        with self._running("send", x):
            self._group.send(x, destination)

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into x."""
        self._check_rank("source", source, is_other=True)
        with self._running("recv", x):
            return self._group.recv(x, source)

    def abort(self, reason: str) -> None:
        """Let all calls of all ranks fail."""
        self._group.abort(reason)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def _meet(self, context: CommunicatorContext) -> Group:
        meeting, options = Meeting(context), self.options
        descriptor = -1
        joined: list[Group] = []

        def allocate() -> str:
            nonlocal descriptor
            cpu.load()
            if context.rank == 0:
                descriptor = allocate_group(context.size, options.chunk_bytes, options.ring_bytes)
            return f"{os.getpid()}/fd/{descriptor}"

        def join() -> str:
            # Rank 0 has it open until all have joined.
            memory = os.open(f"/proc/{files[0]}", os.O_RDWR | os.O_CLOEXEC)
            try:
                joined.append(Group(memory, context.rank, names))
            finally:
                os.close(memory)
            return ""

        try:
            files = meeting.agree("memory", allocate)
            names = [
                f"rank {rank} (process {text.partition('/')[0]})" for rank, text in enumerate(files)
            ]
            meeting.agree("joined", join)
            joined[0].watch()
        except BaseException:
            for group in joined:
                group.close()
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return joined[0]

    @contextmanager
    def _running(self, call: str, x: torch.Tensor) -> Iterator[None]:
        if not x.is_contiguous() or x.device.type != "cpu":
            raise ValueError(
                f"x: expected a contiguous tensor on the CPU, got one with strides {x.stride()} on "
                f"{x.device}"
            )
        try:
            yield
        except AbortedError as error:
            raise CommunicationAbortedError(
                f"{call} of rank {self.rank} in group {self.context.group!r}: {error}"
            ) from None

    def _check_rank(self, operation: str, rank: int, *, is_other: bool = False) -> None:
        if not 0 <= rank < self.size or (is_other and rank == self.rank):
            which = f"one of the others than {self.rank}" if is_other else "a rank"
            raise ValueError(f"{operation}: expected {which} from 0 to {self.size - 1}, got {rank}")

    def _unusable(self, reason: str) -> ModelError:
        return ModelError(
            f"parallel.communicator: {self.name!r} cannot be used for group "
            f"{self.context.group!r}: {reason}"
        )
