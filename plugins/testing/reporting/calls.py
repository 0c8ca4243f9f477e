"""The resources that calls of a sink or publisher hold and take: time, threads, files, memory."""

from __future__ import annotations

import gc
import operator
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from hardpoint.plugins.component import Component
from hardpoint.testing.general.holdings import handles, more_than
from hardpoint.testing.pace import cost_of, own_seconds
from hardpoint.testing.snapshots import count_elements, settled
from hardpoint.testing.suite import Rule, Violation, short_repr

_CALLS = 20
_ROUNDS = 5
_FAR = 4  # times the limit: further calls of a round change nothing
_WAIT_SECONDS = 1.0  # for a thread of the component to end, or to catch up
_STILL_SECONDS = 0.5

READS_ONLY = Rule(
    "reads only: the inputs of a component are shared by all components",
    "copy a value before you change it",
)
MEMORY = Rule(
    "memory: nothing grows with the number of calls",
    "keep totals rather than the inputs, and bound every queue and buffer",
)
CLOSE = Rule(
    "close: it releases threads, sockets and files, once; later calls do no harm",
    "end in close the threads of the constructor, and remember the close: a second close and a "
    "late call return at once",
)


def call(rule: Rule, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method that must raise nothing; return its result.

    Raises:
        Violation: it raised.
    """
    try:
        return method(*arguments)
    except Exception as cause:
        name = method.__name__
        shown = ", ".join(map(short_repr, arguments))
        failure = f"{name}({shown}) raised {type(cause).__name__}: {cause}"
        is_write = "read-only" in str(cause) or "immutable type" in str(cause)
        raise (READS_ONLY if is_write else rule).violation(failure) from cause


def longest_call(method: Callable[[], None], limit: float) -> float:
    """Return the seconds of the longest of 20 calls, in the best of several rounds.

    They are budgets of a usual machine without other load.

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
    component: Component | SimpleNamespace,
    use: Callable[[int], list[weakref.ref[Any]]],
    calls: int,
    known_threads: Collection[threading.Thread],
) -> None:
    """Check that a component keeps no reference to its inputs.

    Only threads of the component are given time to catch up with its uses.

    Args:
        component: the component in use, or several under names.
        use: uses it once, with a number; returns references to its inputs.
        calls: number of uses after which sizes are compared with the sizes after twice as many.
        known_threads: those that ran before the component was made.

    Raises:
        Violation: it grows.
    """
    references: list[weakref.ref[Any]] = []
    sizes = []

    def size() -> tuple[int, int]:
        gc.collect()
        attributes = {n: v for n, v in vars(component).items() if n != "context"}
        return count_elements(attributes), sum(ref() is not None for ref in references)

    for number in range(2 * calls):
        references += use(number)
        if number == calls // 10:
            usual = size()  # what grows is larger at the end; what does not need not be waited for
        if number == calls - 1:
            sizes.append(_settled(size, usual, known_threads))
    attributes, referenced = sizes[0]
    enough = (attributes + calls // 2 - 1, referenced + calls // 2 - 1)
    sizes.append(_settled(size, enough, known_threads))
    parts = ("its attributes grew", "its references to inputs grew")
    for growth, first, second in zip(parts, *sizes, strict=True):
        if second - first >= calls // 2:
            raise MEMORY.violation(f"{growth} from {first} to {second} objects in {calls} calls")


@contextmanager
def releasing_all() -> Iterator[None]:
    """Check that the body leaves no thread, open file or child process behind.

    Raises:
        Violation: it does.
    """
    before = handles()
    yield
    end = time.monotonic() + _WAIT_SECONDS
    while left := more_than(before, handles()):
        if time.monotonic() > end:
            raise CLOSE.violation(f"after close there still are: {', '.join(sorted(left))}")
        gc.collect()
        time.sleep(0.01)


def _settled(
    size: Callable[[], tuple[int, int]],
    wanted: tuple[int, int],
    known_threads: Collection[threading.Thread],
) -> tuple[int, int]:
    """Return the size after threads have caught up, or one of at most `wanted`."""

    def is_smaller(now: tuple[int, int], smallest: tuple[int, int]) -> bool:
        return now < smallest

    def is_enough(smallest: tuple[int, int]) -> bool:
        return not any(map(operator.gt, smallest, wanted))

    return settled(size, is_smaller, known_threads, _STILL_SECONDS, _WAIT_SECONDS, is_enough)


def too_slow(name: str, seconds: float, budget_us: float) -> Violation:
    """Return the violation of a method that took longer than its budget."""
    return Violation(
        f"a call of {name} took {seconds * 1e6:.0f} microseconds, the budget is {budget_us:.0f}",
        "hand the data to a thread and return; the engine waits for every call. Or set "
        "budget_us_per_call",
    )
