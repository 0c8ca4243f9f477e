"""Groups of requests in a batch: rows of requests and of their members."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hardpoint.errors import PluginContractError
from hardpoint.plugins import EngineCoreRequest, LogitsRequest, ModelRunnerOutput, RequestFault
from hardpoint.plugins.sampling.rows import RowGroup

if TYPE_CHECKING:
    import numpy as np

_NO_ARGUMENTS: Mapping[str, Any] = {}


class CombiningHalf(Protocol):
    """A worker half of a step part."""

    name: str

    def serves(self, generation: int) -> bool:
        """Return whether requests of a generation of the plugins use it."""

    def overrides(self, method: str) -> bool:
        """Return whether it has a hook."""

    def combine(self, rows: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
        """Return the combined logits of a request and its members, or a fault."""


class PlannedRows(Protocol):
    """The input of a step."""

    @property
    def requests(self) -> Sequence[LogitsRequest]:
        """Its requests."""

    @property
    def query_starts(self) -> np.ndarray[Any, Any]:
        """First token of each request, and the number of all tokens."""


class RowGroups:
    """The groups of the requests in a batch. Without any, a step calls none of its methods.

    Attributes:
        by_leader: the groups, by the id of their leader.
        members: the members of all groups.
    """

    def __init__(self) -> None:
        self.members: set[LogitsRequest] = set()
        self.by_leader: dict[str, RowGroup] = {}

    def join(self, source: EngineCoreRequest) -> RowGroup:
        """Return the group of a leader or a member that is added to the batch."""
        leader = source.leader or source.request_id
        group = self.by_leader.setdefault(leader, RowGroup(leader))
        if source.members:
            arguments = source.plugin_args
            group.parts = [
                (
                    part,
                    arguments.get(f"step_parts/{part}", _NO_ARGUMENTS),
                    [member.request_id for member in members],
                )
                for part, members in source.members.items()
            ]
        return group

    def add(self, request: LogitsRequest) -> None:
        """Add a request to its group."""
        group = request.group
        assert group is not None
        group.requests[request.request_id] = request
        if request.request_id != group.leader:
            self.members.add(request)

    def remove(self, request_ids: Collection[str]) -> None:
        """Forget the groups of requests that left the batch; skip other requests."""
        for name in self.by_leader.keys() & request_ids:
            self.members.difference_update(self.by_leader.pop(name).requests.values())

    def shown(self, requests: Sequence[LogitsRequest]) -> list[bool]:
        """Return whether each request is not a member."""
        return [request not in self.members for request in requests]

    def with_members(
        self, requests: Sequence[LogitsRequest]
    ) -> tuple[Sequence[LogitsRequest], Sequence[int]]:
        """Return requests, then the members of each, and the index of the request of each."""
        pairs = [
            (member, index)
            for index, request in enumerate(requests)
            for member in members_in(request)
        ]
        members = [member for member, _ in pairs]
        return [*requests, *members], [*range(len(requests)), *(index for _, index in pairs)]

    def with_rows(self, requests: Sequence[LogitsRequest], rows: Any, step: PlannedRows) -> Any:
        """Return rows of requests, then rows of their members equally far from the end.

        Args:
            requests: request of each row.
            rows: int [requests], token of the step with the logits of each.
            step: the step.

        Raises:
            PluginContractError: the scheduler has planned a request without its members.
        """
        names = [request.request_id for request in step.requests]
        ends = dict(zip(names, step.query_starts[1:].tolist(), strict=True))
        try:
            return [
                *map(int, rows),
                *(
                    int(row) + ends[member.request_id] - ends[request.request_id]
                    for request, row in zip(requests, rows, strict=True)
                    for member in members_in(request)
                ),
            ]
        except KeyError as missing:
            raise PluginContractError(
                f"the scheduler: a step samples requests, and lacks the last token of the member "
                f"{missing}; expected all members (Scheduler.keeps_groups)"
            ) from None


def members_in(request: LogitsRequest) -> Sequence[LogitsRequest]:
    """Return the members of a request; none of a member."""
    group = request.group
    return () if group is None or group.leader != request.request_id else group.members


def combine_groups(
    logits: torch.Tensor, requests: Sequence[LogitsRequest], halves: Sequence[CombiningHalf]
) -> torch.Tensor:
    """Return the logits of requests, combined with the logits of their members.

    A fault is stored in the group; `copy_to_members` adds it to the result of the step.

    Args:
        logits: [rows, vocab_size]; a row of each request, then the rows of their members.
        requests: request of each of the first rows.
        halves: the worker halves of all parts.
    """
    end = len(requests)
    for row, request in enumerate(requests):
        for part, arguments, names in request.group.parts if request.group is not None else ():
            start, end = end, end + len(names)
            rows = torch.cat((logits[row : row + 1], logits[start:end]))
            serving = (h for h in halves if h.name == part and h.serves(request.generation))
            half = next(serving, None)
            if half is None or not half.overrides("combine"):
                message = f"step_parts {part!r}: expected a worker half with combine(), got none"
                combined: Any = RequestFault(message, part)
            else:
                combined = half.combine(rows, arguments)
            if isinstance(combined, torch.Tensor):
                logits[row] = combined
            elif request.group is not None:
                request.group.fault = combined
    return logits[: len(requests)]


def copy_to_members(
    requests: Sequence[LogitsRequest], output: ModelRunnerOutput
) -> dict[LogitsRequest, list[int]]:
    """Give members the tokens of their requests in the result of a step, and requests their faults.

    Returns:
        The tokens of the members; empty for one without.
    """
    tokens: dict[LogitsRequest, list[int]] = {}
    for request in requests:
        if (group := request.group) is None:
            continue
        if group.fault is not None:
            output.faults[request.request_id] = group.fault
            output.sampled_token_ids.pop(request.request_id, None)
        sampled = output.sampled_token_ids.get(request.request_id, [])
        for member in members_in(request):
            tokens[member] = list(sampled)
            if sampled:
                output.sampled_token_ids[member.request_id] = tokens[member]
    return tokens
