"""Parallel execution: how the ranks of an engine share a model, and how they communicate.

An engine has `parallel.tensor` x `parallel.pipeline` ranks, each with one worker. The layers are
divided into stages, one after the other; the ranks of a stage divide each of its layers. Rank r is
tensor rank r % tensor of stage r // tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec

from hardpoint.errors import ModelError
from hardpoint.plugins.component.base import Component, Context

if TYPE_CHECKING:
    import torch

__all__ = [
    "Communicator",
    "CommunicatorContext",
    "Placement",
]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of an engine run, and how they find each other.

    Attributes:
        hosts: name of the host of each rank; ranks of equal hosts share memory and devices.
        addresses: IP address of each rank, where it listens for ranks of other hosts. Empty where
            all ranks are on one host.
        folder: private folder that the ranks of one host share while they start; empty where they
            are on several.
        store: `host:port` of a torch TCPStore, for ranks on several hosts. The worker of rank 0 of
            the engine serves it, for all groups, on this address only, until all ranks have met.
        devices: index of each rank's GPU among the GPUs that its process may use. Empty is the
            rank's place among the ranks of its host, which all may use the same GPUs.
    """

    hosts: tuple[str, ...]
    addresses: tuple[str, ...] = ()
    folder: str = ""
    store: str = ""
    devices: tuple[int, ...] = ()

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(set(self.hosts)) == 1

    def of(self, ranks: Sequence[int]) -> Placement:
        """Return the placement of a group of the ranks, in its order."""
        return Placement(
            hosts=tuple(self.hosts[rank] for rank in ranks),
            addresses=tuple(self.addresses[rank] for rank in ranks) if self.addresses else (),
            folder=self.folder,
            store=self.store,
            devices=tuple(self.devices[rank] for rank in ranks) if self.devices else (),
        )

    def local(self, rank: int) -> list[int]:
        """Return the ranks on the host of a rank, itself included, in order."""
        return [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]


def _no_reason() -> None:
    """Abort nothing."""


@dataclass(frozen=True, kw_only=True)
class CommunicatorContext(Context["Communicator"]):
    """Context of a communicator.

    Attributes:
        group: name of the group of ranks, which no other group of the engine has.
        rank: in the group.
        size: number of ranks in the group, at least 2.
        device: device of the tensors.
        placement: placement of the ranks of the group, in its order.
        timeout_seconds: maximum time to find the other ranks.
        abort_reason: returns why this rank shall no longer wait for the others, else None. Loops
            of the constructor ask it every few milliseconds, and raise CommunicationAbortedError.
    """

    group: str
    rank: int
    size: int
    device: torch.device
    placement: Placement
    timeout_seconds: float
    abort_reason: Callable[[], str | None] = _no_reason


class Communicator(Component):
    """Moves tensors between the ranks of a group. Each rank has one; all call the same methods.

    The constructor returns once all ranks of the group have met; it raises ModelError if it cannot
    run here, and does so in all ranks alike, so that `parallel.communicator = "auto"` tries others.
    Tensors are on the context's device and contiguous. The calls of one rank are made by one thread
    at a time, and are matched with other ranks' calls in their order; calls of `send` and `recv`
    in the order between two ranks. A rank closes it when no other waits for it any more; sent
    tensors that no rank has received by then may be lost.
    """

    devices: ClassVar[tuple[str, ...]]
    """Device types that it runs on, such as `("cpu",)`."""

    context: CommunicatorContext

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.context.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.context.size

    def describe(self) -> str:
        """Return the text that the engine logs for it."""
        return self.name

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the x of all ranks; x may be overwritten, and be the result.

        Floating numbers are summed in float32 at least, in the order of the ranks, and rounded
        once, so that the result is the same in every rank and every time. On a GPU the library's
        way is allowed: nccl sums bfloat16 and float16 in their own precision, in an order that is
        the same for tensors of equal size.
        """

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [size, *x.shape]: the x of each rank, which have the same shape."""

    @abstractmethod
    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange rows: row i of x [size, ...] goes to rank i; row i of the result is from it."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Return the x of rank `source`; the x of the others, of the same shape, is overwritten."""

    @abstractmethod
    def send(self, x: torch.Tensor, destination: int) -> None:
        """Send x to a rank; x may be changed when this returns.

        It may wait for `destination` to receive earlier tensors; for x itself only if x is
        larger than its buffer, which is some 100 KB at least.
        """

    @abstractmethod
    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Receive a tensor from a rank into x, which has its shape and dtype, and return it."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Let all calls fail, also waiting ones, in every rank if possible; thread-safe.

        They raise CommunicationAbortedError with the reason, also where another rank's process has
        ended: so executors distinguish the failure of a rank from the errors that follow from it.
        """


class SingleRank(Communicator):
    """The communicator of a group of one rank."""

    contract = 1
    devices = ("cpu", "cuda")

    def __init__(self) -> None:
        """There is no other rank to find."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as the only row."""
        return x.unsqueeze(0)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:  # noqa: ARG002
        """Return x."""
        return x

    def send(self, x: torch.Tensor, destination: int) -> None:  # noqa: ARG002
        """Refuse: there is no other rank."""
        raise ValueError(f"destination: a group of one rank has no rank {destination} to send to")

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:  # noqa: ARG002
        """Refuse: there is no other rank."""
        raise ValueError(f"source: a group of one rank has no rank {source} to receive from")

    def abort(self, reason: str) -> None:
        """Do nothing: no call waits."""


class IndivisibleError(ModelError):
    """A part of a model cannot be divided among the ranks; see `Parallel.share`.

    Attributes:
        problem: the message without the valid sizes for this part; other parts may need
            other sizes.
        count: number of the things that are to be divided.
    """

    def __init__(self, count: int, what: str, size: int) -> None:
        """Create the error of `count` units that `size` ranks cannot share equally."""
        self.count = count
        self.problem = f"parallel.tensor: {count} {what} cannot be divided among {size} ranks"
        fitting = [str(n) for n in range(1, min(count, 64) + 1) if count % n == 0]
        super().__init__(f"{self.problem}; {', '.join(fitting)} would do")


@dataclass(frozen=True)
class Parallel:
    """The share of a model that a rank computes.

    Attributes:
        tensor: the ranks that divide the layers of this stage.
        stage: which part of the layers, from 0.
        num_stages: number of parts.
        expert: whether experts are spread over `tensor` whole, instead of being divided each.
        engines: the ranks of other engines with the same share, over which experts are spread too.
            Each has tokens of its own: see `toolkit.layers.over_engines`.
    """

    tensor: Communicator = field(default_factory=SingleRank)
    stage: int = 0
    num_stages: int = 1
    expert: bool = False
    engines: Communicator = field(default_factory=SingleRank)

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the logits."""
        return self.stage == self.num_stages - 1

    def stage_layers(self, count: int) -> range:
        """Return which of `count` layers this stage computes; earlier stages get the odd ones.

        Raises:
            ModelError: there are fewer layers than stages.
        """
        if count < self.num_stages:
            raise ModelError(
                f"parallel.pipeline: expected at most {count}, the model's number of layers, got "
                f"{self.num_stages}"
            )
        least, more = divmod(count, self.num_stages)
        start = self.stage * least + min(self.stage, more)
        return range(start, start + least + (self.stage < more))

    def share(self, count: int, what: str) -> range:
        """Return which of `count` equal things this rank has.

        Args:
            count: number of heads, columns or whatever is divided.
            what: name of the units in the message, such as "attention heads".

        Raises:
            IndivisibleError: they do not divide; the message names sizes that do. At an engine's
                start it becomes a ModelError with the sizes that do for the whole model.
        """
        size = self.tensor.size
        if count % size:
            raise IndivisibleError(count, what, size)
        part = count // size
        return range(self.tensor.rank * part, (self.tensor.rank + 1) * part)

    def share_experts(self, count: int) -> range:
        """Return the indices of this rank's experts among the `count` experts of a layer.

        Raises:
            ModelError: they do not divide.
        """
        engines, tensor = self.engines, self.tensor
        if engines.size == 1:
            return self.share(count, "experts")
        size = engines.size * tensor.size
        if count % size:
            raise ModelError(
                f"parallel.data: {count} experts cannot be spread over {engines.size} engines of "
                f"{tensor.size} ranks (parallel.expert); expected that data x tensor divides them"
            )
        start = (engines.rank * tensor.size + tensor.rank) * (count // size)
        return range(start, start + count // size)

    def share_or_copy(self, count: int, what: str) -> range:
        """Return which of `count` things this rank has; fewer than ranks are copied to several.

        Args:
            count: number of key and value heads.
            what: name of the units in the message.

        Raises:
            IndivisibleError: they neither divide among the ranks, nor the ranks among them.
        """
        size = self.tensor.size
        if count >= size or size % count:
            return self.share(count, what)
        index = self.tensor.rank * count // size
        return range(index, index + 1)

    def padded_share(self, count: int) -> range:
        """Return which of `count` rows this rank has, where the last ranks may have fewer or none.

        Every rank computes with `-(-count // size)` rows; missing rows are zero.
        """
        part = -(-count // self.tensor.size)
        start = min(self.tensor.rank * part, count)
        return range(start, min(start + part, count))
