"""Growth over many uses of a component: memory, threads, files, sockets, child processes."""

from __future__ import annotations

import functools
import threading
import time
import tracemalloc
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hardpoint.testing.snapshots import count_elements, settled
from hardpoint.testing.suite import Rule

from .holdings import grouped, handles, memory, more_than, traced

__all__ = ["RESOURCES", "check_growth"]

RESOURCES = Rule(
    "resources: memory, threads, files, sockets and child processes do not grow with the number "
    "of uses",
    "keep nothing of a use; bound caches, and close all handles of a use; if a cache is bounded by "
    "an option, give the suite a small one in `options`",
)

_FIRST_USES = 200
_FIRST_STEPS = 5
_STAGES = 4
_SETTLED_STAGES = 2
_HANDLES_PER_USE = 0.05
_MOST_SECONDS = 20.0
"""Time after which a stage ends, of a component with slow uses."""
_STILL_SECONDS = 1.0
"""Time in which no size falls, after which threads have caught up."""


def check_growth(
    component: Any,
    use: Callable[[int], object],
    uses: int,
    bytes_per_use: int,
    known_threads: Collection[threading.Thread],
) -> None:
    """Use a component many times, and check that nothing grows.

    Growth in `uses` uses has to continue in each of three further stages, so that a cache may fill
    up to 4 times as many entries. A violation is measured in two more stages, before and after
    which threads get time to catch up with the uses: in one of them, a table of the interpreter,
    such as that of its interned strings, may get its next size.

    Args:
        component: the component in use.
        use: uses it once, given the number of the use.
        uses: number of uses of a stage.
        bytes_per_use: memory that a use may leave, for caches of libraries.
        known_threads: threads of others.

    Raises:
        Violation: something grew.
    """
    with traced():
        number = _first_uses(use, min(_FIRST_USES, uses))
        before = _sizes(component)
        for _ in range(_STAGES):
            done = _stage(use, number, uses)
            number += done
            after = _sizes(component)
            if not _grown(before, after, done, bytes_per_use):
                return
            before = after
        trace = tracemalloc.take_snapshot()
        after = _settled(component, known_threads)
        for _ in range(_SETTLED_STAGES):
            before = after
            done = _stage(use, number, uses)
            number += done
            after = _settled(component, known_threads)
            grown = _grown(before, after, done, bytes_per_use)
            if not grown:
                return
        raise RESOURCES.violation(
            f"{_described(grown, before)} in {done} uses, and as much in each stage of "
            f"{done} before{_place(trace)}, expected no growth"
        )


def _first_uses(use: Callable[[int], object], uses: int) -> int:
    """Call `use` for the first times; this detects a leaked handle per use.

    Returns:
        The number of uses.
    """
    step = max(1, uses // _FIRST_STEPS)
    first = held = handles()
    grown: list[dict[str, int]] = []
    deadline = time.monotonic() + _MOST_SECONDS
    for number in range(_FIRST_STEPS * step):
        use(number)
        if time.monotonic() > deadline:
            return number + 1
        if number % step == step - 1:
            now = handles()
            grown.append(more_than(grouped(held), grouped(now)))
            held = now
    for name in set.intersection(*map(set, grown[1:])):
        if all(more[name] > step // 2 for more in grown[1:]):
            count = sum(more[name] for more in grown[1:])
            uses = step * (_FIRST_STEPS - 1)
            newest = next(iter(more_than(first, held)))
            raise RESOURCES.violation(
                f"there are {count} more {name} after {uses} uses, such as {newest}; expected none"
            )
    return _FIRST_STEPS * step


def _stage(use: Callable[[int], object], first: int, uses: int) -> int:
    deadline = time.monotonic() + _MOST_SECONDS
    for number in range(uses):
        use(first + number)
        if time.monotonic() > deadline:
            return number + 1
    return uses


def _settled(component: Any, known_threads: Collection[threading.Thread]) -> dict[str, int]:
    """Return the sizes after the threads of a component have caught up with its uses."""

    def is_smaller(now: dict[str, int], smallest: dict[str, int]) -> bool:
        return bool(_grown(now, smallest, 1, 1024))

    size = functools.partial(_sizes, component)
    return settled(size, is_smaller, known_threads, _STILL_SECONDS, _MOST_SECONDS)


def _sizes(component: Any) -> dict[str, int]:
    attributes = {
        f"elements of its attribute {name!r}": count_elements(value)
        for name, value in getattr(component, "__dict__", {}).items()
        if name != "context"
    }
    return {**attributes, **grouped(handles()), **memory()}


def _grown(
    before: Mapping[str, int], after: Mapping[str, int], uses: int, bytes_per_use: int
) -> dict[str, int]:
    grown = {}
    for name, more in more_than(before, after).items():
        if name.startswith("bytes"):
            limit = bytes_per_use * uses
        elif name.startswith("elements"):
            limit = uses // 2
        else:
            limit = max(2, int(_HANDLES_PER_USE * uses))
        if more >= limit:
            grown[name] = more
    return grown


def _described(grown: Mapping[str, int], before: Mapping[str, int]) -> str:
    parts = [f"{name} grew by {more} from {before.get(name, 0)}" for name, more in grown.items()]
    return ", ".join(parts)


def _place(trace: tracemalloc.Snapshot) -> str:
    changes = tracemalloc.take_snapshot().compare_to(trace, "lineno")
    lines = [
        c for c in changes if c.size_diff > 0 and "/tracemalloc" not in c.traceback[0].filename
    ]
    if not lines:
        return ""
    place = max(lines, key=lambda change: change.size_diff).traceback[0]
    return f" (allocated in line {place.lineno} of {place.filename.rpartition('/')[2]})"
