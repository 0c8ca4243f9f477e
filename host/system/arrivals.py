"""How often each rank of a group has come to a call of all of them, as seen by another process.

A rank that hangs outside of such calls has come to fewer than those that wait for it there.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hardpoint.plugins.parallel import Communicator

_CALLS = ("all_reduce", "all_gather", "all_to_all", "broadcast")
_BYTES = 8
_PREFIX = "arrivals-"


def count_arrivals(communicator: Communicator) -> None:
    """Count the calls of a communicator in a file of its placement's folder, for `Arrivals`."""
    context = communicator.context
    path = Path(context.placement.folder) / f"{_PREFIX}{context.group}-{context.rank}"
    path.write_bytes(bytes(_BYTES))
    count = _open(path)
    for name in _CALLS:
        setattr(communicator, name, _counted(getattr(communicator, name), count))


def _open(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("Q")


def _counted(call: Callable[..., Any], count: memoryview) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return call(*arguments)

    return counted


class Arrivals:
    """The calls of the ranks that have met in a folder, which may be removed."""

    def __init__(self, folder: Path) -> None:
        self._groups: defaultdict[str, dict[int, memoryview]] = defaultdict(dict)
        for path in folder.glob(f"{_PREFIX}*"):
            group, _, rank = path.name.removeprefix(_PREFIX).rpartition("-")
            self._groups[group][int(rank)] = _open(path)

    def late(self) -> set[int]:
        """Return the ranks that others wait for: they have come to fewer calls."""
        late = set[int]()
        for counts in self._groups.values():
            largest = max(count[0] for count in counts.values())
            late |= {rank for rank, count in counts.items() if count[0] < largest}
        return late
