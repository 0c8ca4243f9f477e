"""The resources that calls of a sink or publisher hold and take: time, threads, files, memory."""

from __future__ import annotations

import gc
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from hardpoint.plugins.component import Component
from hardpoint.testing.pace import cost_of, own_seconds
from hardpoint.testing.snapshots import count_elements, settled
from hardpoint.testing.suite import Rule, Violation, short_repr

_CALLS = 20
_ROUNDS = 5
_FAR = 4  # times the limit: further calls of a round change nothing
_WAIT_SECONDS = 1.0  # for a thread of the component to end, or to catch up
_STILL_SECONDS = 0.5

READS_ONLY = Rule(
    "reads only: what a component gets belongs to all that get it",
    "copy what you want to change",
)
MEMORY = Rule(
    "memory: nothing grows with the number of calls",
    "keep totals rather than what was given, and bound every queue and buffer",
)
CLOSE = Rule(
    "close: it releases threads, sockets and files, once; later calls do no harm",
    "let close end what the constructor began, and remember that it did: a second close and a "
    "late call return at once",
)


def call(rule: Rule, method: Callable[..., Any], *given: Any) -> Any:
    """Call a method that must raise nothing; return its result.

    Raises:
        Violation: it raised.
    """
    try:
        return method(*given)
    except Exception as cause:
        name = method.__name__
        shown = ", ".join(map(short_repr, given))
        what = f"{name}({shown}) raised {type(cause).__name__}: {cause}"
        is_write = "read-only" in str(cause) or "immutable type" in str(cause)
        raise (READS_ONLY if is_write else rule).violation(what) from cause


def longest_call(method: Callable[[], None], limit: float) -> float:
    """Return the seconds of the longest of 20 calls, in the best of several rounds.

    They are those of a usual machine that does nothing else.

    Args:
        method: called with nothing.
        limit: a round that stays below it is good enough.
    """

    def measure() -> float:
        longest = 0.0
        for _ in range(_CALLS):
            started = own_seconds()
            method()
            longest = max(longest, own_seconds() - started)
            if longest > _FAR * limit:
                break
        return longest

    return cost_of(measure, limit, rounds=_ROUNDS)


def check_growth(
    component: Component | SimpleNamespace, use: Callable[[int], list[weakref.ref[Any]]], calls: int
) -> None:
    """Check that a component keeps nothing of what it is given.

    Args:
        component: the one that is used, or several under names.
        use: uses it once, with a number; returns references to what was given.
        calls: number of uses after which sizes are compared with those after twice as many.

    Raises:
        Violation: it grows.
    """
    given: list[weakref.ref[Any]] = []
    sizes = []

    def size() -> tuple[int, int]:
        gc.collect()
        attributes = {n: v for n, v in vars(component).items() if n != "context"}
        return count_elements(attributes), sum(ref() is not None for ref in given)

    for number in range(2 * calls):
        given += use(number)
        if number == calls // 10:
            usual = size()  # what grows is larger at the end; what does not need not be waited for
        if number == calls - 1:
            sizes.append(_settled(size, usual))
    attributes, kept = sizes[0]
    sizes.append(_settled(size, (attributes + calls // 2 - 1, kept + calls // 2 - 1)))
    parts = ("its attributes grew", "what it was given and still refers to grew")
    for what, first, second in zip(parts, *sizes, strict=True):
        if second - first >= calls // 2:
            raise MEMORY.violation(f"{what} from {first} to {second} objects in {calls} calls")


@contextmanager
def releasing_all() -> Iterator[None]:
    """Check that the body leaves no thread and no open file behind.

    Raises:
        Violation: it does.
    """
    before = _held()
    yield
    end = time.monotonic() + _WAIT_SECONDS
    while left := {name: n for name, n in _held().items() if n > before.get(name, 0)}:
        if time.monotonic() > end:
            raise CLOSE.violation(f"after close there still are: {', '.join(sorted(left))}")
        gc.collect()
        time.sleep(0.01)


def _settled(size: Callable[[], tuple[int, int]], wanted: tuple[int, int]) -> tuple[int, int]:
    """Return the size after threads have caught up, or one of at most `wanted`."""

    def is_smaller(now: tuple[int, int], smallest: tuple[int, int]) -> bool:
        return now < smallest

    def is_enough(smallest: tuple[int, int]) -> bool:
        return not any(map(operator.gt, smallest, wanted))

    return settled(size, is_smaller, is_enough, _STILL_SECONDS, _WAIT_SECONDS)


def _held() -> dict[str, int]:
    """Return the resources of this process, by description: its threads and open files."""
    held: dict[str, int] = {}
    names = [f"thread {thread.name!r}" for thread in threading.enumerate()]
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            for number in os.listdir(folder):
                with suppress(OSError):  # the one that listed them
                    names.append(os.readlink(f"{folder}/{number}"))
            break
    for name in names:
        kind = name.partition(":[")[0]  # sockets and pipes have a number each
        held[kind] = held.get(kind, 0) + 1
    return held


def too_slow(name: str, seconds: float, budget_us: float) -> Violation:
    """Return the violation of a method that took longer than its budget."""
    return Violation(
        f"a call of {name} took {seconds * 1e6:.0f} microseconds, the budget is {budget_us:.0f}",
        "hand the data to a thread and return; the engine waits for every call. Or set "
        "budget_us_per_call",
    )
