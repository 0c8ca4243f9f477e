"""The adapters of requests with members, which run at the same time."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.plugins import EngineCoreRequest, RequestError


class GroupAdapters:
    """Contents of the adapters of each request with members, and of its members."""

    def __init__(self, max_loras: int) -> None:
        """`max_loras` is the number of slots."""
        self._max_loras = max_loras
        self._contents: dict[str, dict[str, str]] = {}  # by the id of the request with members
        self._leaders: dict[str, str] = {}  # key in `_contents` of each request

    def add(self, request: EngineCoreRequest, content: str) -> None:
        """Add the adapter of a request, if it is of a group.

        Raises:
            RequestError: its group has more adapters than slots.
        """
        if not request.members and request.leader is None:
            return
        leader = request.leader or request.request_id
        group = self._contents.get(leader, {})
        if (count := len({*group.values(), content})) > self._max_loras:
            raise RequestError(
                f"members: expected at most {self._max_loras} adapters in a group "
                f"(adapters.max_loras), got {count}"
            )
        self._contents.setdefault(leader, group)[request.request_id] = content
        self._leaders[request.request_id] = leader

    def remove(self, request_id: str) -> None:
        """Forget a request, of a group or not."""
        if (leader := self._leaders.pop(request_id, None)) is not None:
            del self._contents[leader][request_id]
            if not self._contents[leader]:
                del self._contents[leader]

    def of(self, request_id: str) -> Mapping[str, str] | None:
        """Return the contents of a request's group by request id; None if it is of none."""
        leader = self._leaders.get(request_id)
        return None if leader is None else self._contents[leader]

    def with_content(self, content: str) -> set[str]:
        """Return the contents of all groups that have a content, and itself."""
        groups = [group.values() for group in self._contents.values() if content in group.values()]
        return {content}.union(*groups)
