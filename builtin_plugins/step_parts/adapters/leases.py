"""Which requests hold the slots of adapters, and which wait for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hardpoint.plugins import EngineCoreRequest, RequestError

_PATIENCE_SECONDS = 1.0
"""After this, later requests do not overtake a request that waits for a slot."""


class Leases:
    """Which content each slot has, and which requests hold it there.

    A slot is free once no request holds it; it keeps its content until another one needs it.
    """

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._slots: dict[int, str | None] = dict.fromkeys(range(count))  # longest unused first
        self._of: dict[str, str] = {}  # content of each request with a lease
        self._waiting: dict[str, float] = {}  # requests since when, in the order of their arrival

    def acquire(self, contents: Mapping[str, str]) -> str | None:
        """Give a request, or all of a group, leases; return why they wait, or None.

        No request of a group has a lease while another one waits, because two groups would wait
        for each other.

        Args:
            contents: the content of each request that has one, by its id.
        """
        name = next(iter(contents))
        self._waiting.setdefault(name, self._clock())
        oldest = next(iter(self._waiting))
        if name != oldest and self._clock() - self._waiting[oldest] > _PATIENCE_SECONDS:
            return "a request before it waits for a slot of its adapter (adapters.max_loras)"
        wanted = set(contents.values())
        held = wanted.union(self._of.values())
        slots = {has: slot for slot, has in self._slots.items() if has in wanted}
        free = [slot for slot, has in self._slots.items() if has not in held]
        missing = [content for content in dict.fromkeys(contents.values()) if content not in slots]
        if len(missing) > len(free):
            return _lack(len(wanted), len(self._slots) - len(free) - len(slots))
        for content, slot in (slots | dict(zip(missing, free, strict=False))).items():
            self._slots.pop(slot)
            self._slots[slot] = content
        del self._waiting[name]
        self._of |= contents
        return None

    def slot(self, content: str) -> int:
        """Return the slot of a content that a request holds."""
        return next(slot for slot, has in self._slots.items() if has == content)

    def release(self, request_id: str) -> None:
        """Forget a request."""
        self._of.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def has(self, content: str) -> bool:
        """Return whether a request holds a content."""
        return content in self._of.values()

    def is_holder(self, request_id: str) -> bool:
        """Return whether a request holds a slot."""
        return request_id in self._of

    def contents(self) -> Sequence[str]:
        """Return the contents that requests hold."""
        return list(dict.fromkeys(self._of.values()))

    def counts(self) -> Mapping[str, int]:
        """Return how many requests hold each content."""
        return Counter(self._of.values())


def _lack(num_wanted: int, num_others: int) -> str:
    slots = "a slot for its adapter" if num_wanted == 1 else f"slots for its {num_wanted} adapters"
    return f"{slots}: requests with {num_others} others run (adapters.max_loras)"


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
