"""Groups of requests in a batch: rows of members beside the rows of their requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from hardpoint.errors import PluginContractError
from hardpoint.plugins import EngineCoreRequest, LogitsRequest, ModelRunnerOutput
from hardpoint.plugins.sampling.rows import RowGroup

class PlannedRows(Protocol):
    """The input of a step.

    Attributes:
        requests: its requests.
        query_starts: first token of each, and the number of all tokens.
    """

    @property
    def requests(self) -> Sequence[LogitsRequest]: ...

    @property
    def query_starts(self) -> Any: ...


_NO_ARGUMENTS: Mapping[str, object] = {}


class RowGroups:
    """The groups of the requests in a batch; false without any."""

    def __init__(self) -> None:
        self._groups: dict[str, RowGroup] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def join(self, source: EngineCoreRequest) -> RowGroup | None:
        """Return the group of a request that is added to the batch; None of one without."""
        if not source.members and source.leader is None:
            return None
        leader = source.leader or source.request_id
        group = self._groups.setdefault(leader, RowGroup(leader))
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

    def remove(self, request_ids: Collection[str]) -> None:
        """Forget the groups of requests that left the batch; skip other requests."""
        for name in self._groups.keys() & request_ids:
            del self._groups[name]

    def rows_of_members(
        self,
        requests: Sequence[LogitsRequest],
        rows: Sequence[int],
        step: PlannedRows,
    ) -> list[int]:
        """Return the rows of the members of requests, as far from their ends as the given rows.

        Args:
            requests: request of each row.
            rows: token of the step with the logits of each.

        Raises:
            PluginContractError: the scheduler has planned a request without its members.
        """
        if not self._groups:
            return []
        names = [request.request_id for request in step.requests]
        ends = dict(zip(names, step.query_starts[1:].tolist(), strict=True))
        try:
            return [
                row + ends[member.request_id] - ends[request.request_id]
                for request, row in zip(requests, rows, strict=True)
                if request.group is not None
                for member in request.group.members
            ]
        except KeyError as missing:
            raise PluginContractError(
                f"the scheduler: a step samples requests, and lacks the last token of their member "
                f"{missing}; expected all members (Scheduler.keeps_groups)"
            ) from None


def is_member(request: LogitsRequest) -> bool:
    """Return whether a request is hidden behind another one."""
    return request.group is not None and request.group.leader != request.request_id


def with_members(
    requests: Sequence[LogitsRequest],
) -> tuple[list[LogitsRequest], list[int]]:
    """Return requests, then the members of each; and the index of the request of each."""
    pairs = [
        (member, index)
        for index, request in enumerate(requests)
        if request.group is not None
        for member in request.group.members
    ]
    members = [member for member, _ in pairs]
    return [*requests, *members], [*range(len(requests)), *(index for _, index in pairs)]


def copy_to_members(
    requests: Sequence[LogitsRequest], output: ModelRunnerOutput
) -> dict[str, list[int]]:
    """Give members the tokens and faults of their requests in the result of a step.

    Returns:
        The tokens by the id of the member.
    """
    tokens: dict[str, list[int]] = {}
    for request in requests:
        for member in request.group.members if request.group is not None else ():
            if (fault := output.faults.get(request.request_id)) is not None:
                output.faults[member.request_id] = fault
            elif (sampled := output.sampled_token_ids.get(request.request_id)) is not None:
                tokens[member.request_id] = output.sampled_token_ids[member.request_id] = sampled
    return tokens
