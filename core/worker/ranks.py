"""The ranks that share a model with this worker, and its messages to and from them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hardpoint.core.weights.worker_spec import ONLY_ENGINE, EnginePlace
from hardpoint.host.boundary.errors import close_all
from hardpoint.host.system.arrivals import count_arrivals
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.parallel import Communicator, Parallel, Placement, SingleRank

Connect = Callable[..., Communicator]
"""Makes the communicator of a group: its name, this rank in it, and its ranks in the engine, or in
the placement that follows them.
"""


class Ranks:
    """This rank's place among the ranks that share the model.

    Args:
        placement: placement of all ranks; None if there is one.
        asynchronous: whether steps are planned ahead.

    Attributes:
        rank: in the engine.
        parallel: the share of the model that this rank computes, once the ranks have met.
        are_many: whether there is another rank.
        is_output: whether this rank samples.
        num_local: ranks on this host, which share its memory.
        have_met: whether the ranks have met.
        shares_tokens: whether the output rank sends the tokens that it samples to the others.
    """

    def __init__(
        self,
        config: ParallelConfig,
        rank: int,
        placement: Placement | None,
        *,
        asynchronous: bool = False,
    ) -> None:
        self.rank = rank
        self.are_many = config.world_size > 1
        self.is_output = rank == config.output_rank
        self.num_local = 1 if placement is None else len(placement.local(rank))
        self.shares_tokens = asynchronous and config.pipeline == 1
        self._config = config
        self._pipeline: Communicator = SingleRank()
        self._groups: list[Communicator] = []
        self._abort_reason: str | None = None
        self.have_met = False

    def meet(self, connect: Connect, place: EnginePlace = ONLY_ENGINE) -> None:
        """Meet the other ranks; `abort` ends this, too."""
        config = self._config
        stage, tensor_rank = divmod(self.rank, config.tensor)
        tensor: Communicator = SingleRank()
        engines: Communicator = SingleRank()
        try:
            if config.tensor > 1:
                ranks = list(range(stage * config.tensor, (stage + 1) * config.tensor))
                tensor = self._join(connect, f"tensor-{stage}", tensor_rank, ranks)
            if config.pipeline > 1:
                ranks = list(range(tensor_rank, config.world_size, config.tensor))
                self._pipeline = self._join(connect, f"pipeline-{tensor_rank}", stage, ranks)
            if (every := place.engines) is not None:
                ranks = list(range(len(every.hosts)))
                engines = self._join(connect, f"engines-{self.rank}", place.rank, ranks, every)
                count_arrivals(engines)
            self.parallel = Parallel(tensor, stage, config.pipeline, config.expert, engines)
            self.wait_for_all()
        except BaseException as error:
            self._abort_groups(f"rank {self.rank} failed: {error}")
            with contextlib.suppress(Exception):
                self.close()
            raise
        self.have_met = True

    def _join(self, connect: Connect, group: str, rank: int, *members: Any) -> Communicator:
        communicator = connect(group, rank, *members)
        self._groups.append(communicator)
        if self._abort_reason is not None:  # it came before the group was here
            communicator.abort(self._abort_reason)
        return communicator

    def abort_reason(self) -> str | None:
        """Return why `abort` was called; None if it was not."""
        return self._abort_reason

    def describe(self) -> str:
        """Return how the ranks communicate, for the log."""
        groups = (self.parallel.tensor, self._pipeline, self.parallel.engines)
        return ", ".join(dict.fromkeys(group.describe() for group in groups if group.size > 1))

    def wait_for_all(self) -> None:
        """Return once all ranks have called this."""
        tensor, pipeline = self.parallel.tensor, self._pipeline
        for group in (tensor, pipeline, tensor):
            if group.size > 1:
                # Read, since on a GPU the call itself does not wait.
                group.all_reduce(torch.zeros(1, device=group.context.device)).item()

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank, once all ranks have called this."""
        for group in (self._pipeline, self.parallel.tensor):
            if group.size > 1:
                count = torch.tensor([float(flag)], device=group.context.device)
                flag = bool(group.all_reduce(count).item())
        return flag

    def receive_hidden(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the hidden states of the stage before, in `hidden`; None in the first stage."""
        if self.parallel.is_first:
            return None
        return self._pipeline.recv(hidden, self.parallel.stage - 1)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send hidden states to the next stage."""
        self._pipeline.send(hidden.contiguous(), self.parallel.stage + 1)

    # Logits are computed by all ranks of the last stage, whenever the output rank asks for them.

    def ask_for_logits(self, rows: torch.Tensor) -> None:
        """Let the other ranks of this stage compute the logits of rows of the step's hidden states.

        Args:
            rows: int64 [rows]; none ends the step.
        """
        if self.parallel.tensor.size > 1:
            self._send(rows)

    def asked_for_logits(self, device: torch.device) -> torch.Tensor | None:
        """Return the rows that the output rank asks for, int64 [rows]; None at the step's end."""
        rows = self._receive(device)
        return rows if len(rows) else None

    # Where steps are planned ahead, the tokens of one are not in the plan of the next.

    def share_tokens(self, tokens: Sequence[Sequence[int]], device: torch.device) -> None:
        """Send the tokens that each request of a step has got to the other ranks of this stage."""
        flat = [x for row in tokens for x in (len(row), *row)]
        self._send(torch.tensor(flat, dtype=torch.int64, device=device))

    def shared_tokens(self, device: torch.device) -> list[list[int]]:
        """Return the tokens of each request of a step, which the output rank has sampled."""
        rest = iter(self._receive(device).tolist())
        return [list(itertools.islice(rest, length)) for length in rest]

    def _send(self, numbers: torch.Tensor) -> None:
        """Send int64 [count] from the output rank to the other ranks of this stage."""
        tensor = self.parallel.tensor
        tensor.broadcast(torch.tensor([len(numbers)], device=numbers.device), 0)
        if len(numbers):
            tensor.broadcast(numbers.contiguous(), 0)

    def _receive(self, device: torch.device) -> torch.Tensor:
        tensor = self.parallel.tensor
        count = int(tensor.broadcast(torch.zeros(1, dtype=torch.int64, device=device), 0))
        numbers = torch.empty(count, dtype=torch.int64, device=device)
        return tensor.broadcast(numbers, 0) if count else numbers

    def abort(self, reason: str) -> None:
        """Let calls that wait for other ranks fail, now and later. For any thread."""
        self._abort_reason = self._abort_reason or reason
        self._abort_groups(reason)

    def _abort_groups(self, reason: str) -> None:
        for group in list(self._groups):
            group.abort(reason)

    def close(self) -> None:
        """Leave the groups."""
        groups, self._groups = self._groups, []
        close_all(groups)
