"""What a method of an interface must return, and what follows where it does not: stated with it.

The guard around plugins, the conformance suites and the reference read it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any, TypeVar

from hardpoint.errors import shown

__all__ = [
    "Behaviour",
    "Default",
    "Returned",
    "UnusableError",
    "behaviour_of",
    "notifies",
    "returns",
]

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__behaviour__"


class UnusableError(Exception):
    """A method returned what cannot be used; the text is what follows its name in a message."""

    def __init__(self, value: Any, problem: str) -> None:
        """`value` is what it returned, `problem` the rest of the sentence."""
        super().__init__(f"returned {shown(value, limit=60)}{problem}")


@dataclass(frozen=True)
class Returned:
    """What a method must return.

    Attributes:
        text: what it is.
        check: returns the value to use, given the value that the method returned, the arguments
            that it got, and those of its caller. Raises UnusableError, or what the value raises.
    """

    text: str
    check: Callable[[Any, Sequence[Any], Sequence[Any]], Any]


@dataclass(frozen=True)
class Default:
    """What decides in place of a method that failed.

    Attributes:
        text: what it is.
        decide: returns the value, given the arguments of the caller.
    """

    text: str
    decide: Callable[..., Any]


@dataclass(frozen=True)
class Behaviour:
    """What a method returns, and what follows where it fails; a fault is counted in any case.

    Attributes:
        returned: None for a method whose result is not used.
        otherwise: decides in its place.
    """

    returned: Returned | None
    otherwise: Default

    def __str__(self) -> str:
        """Return both as sentences."""
        if self.returned is None:
            return "If it raises, the fault is counted, and nothing else follows."
        return (
            f"Must return {self.returned.text}. If it raises or returns anything else, the fault "
            f"is counted and {self.otherwise.text}."
        )


def returns(returned: Returned, *, otherwise: Default) -> Callable[[F], F]:
    """Declare what a method returns, and what decides where it fails."""

    def declare(method: F) -> F:
        setattr(method, _MARK, Behaviour(returned, otherwise))
        return method

    return declare


def notifies(method: F) -> F:
    """Declare that a method's result is not used, and that nothing depends on it."""
    setattr(method, _MARK, Behaviour(None, NOTHING))
    return method


def declared_of(method: Any) -> Behaviour | None:
    """Return what is declared of one function; None for any other one."""
    declared = getattr(method, _MARK, None)
    return declared if isinstance(declared, Behaviour) else None


def behaviour_of(cls: type, method: str) -> Behaviour | None:
    """Return what an interface declares of a method, also if a class derives from it."""
    declared = (declared_of(vars(base).get(method)) for base in cls.__mro__)
    return next(filter(None, declared), None)


def equals_itself(value: Any) -> bool:
    """Return whether a value is equal to itself; NaN is not, nor is a sequence with NaN."""
    if isinstance(value, tuple | list):  # these compare identical members as equal
        return all(map(equals_itself, value))
    return bool(value == value)


def _ordered(value: Any, handed: Sequence[Any], given: Sequence[Any]) -> Any:  # noqa: ARG001
    try:
        bool(value < value)
        is_equal = equals_itself(value)
    except BaseException as error:
        raise UnusableError(value, ", which has no order") from error
    if not is_equal:
        raise UnusableError(value, ", which is not equal to itself")
    return value


def _hashable(value: Any, handed: Sequence[Any], given: Sequence[Any]) -> Hashable:  # noqa: ARG001
    problem = ", expected something hashable that is equal to itself"
    try:
        hash(value)
        is_equal = equals_itself(value)
    except BaseException:
        raise UnusableError(value, problem) from None
    if not is_equal:
        raise UnusableError(value, problem)
    return value  # type: ignore[no-any-return]


def _none_or_text(value: Any, handed: Sequence[Any], given: Sequence[Any]) -> str | None:  # noqa: ARG001
    if value is None:
        return None
    if isinstance(value, str) and (text := str.__str__(value)):  # a subclass may do anything
        return text
    raise UnusableError(value, ", expected None or the reason as a string that is not empty")


def _one_of_first(value: Any, handed: Sequence[Any], given: Sequence[Any]) -> Any:
    for one, original in zip(handed[0], given[0], strict=True):
        if value is one:
            return original
    raise UnusableError(value, ", which is not running")


def _text(value: Any, handed: Sequence[Any], given: Sequence[Any]) -> str:  # noqa: ARG001
    if not isinstance(value, str):
        raise TypeError(f"expected a str, got {type(value).__name__}")
    value.encode()
    return value


def _block_ids(value: Any, handed: Sequence[Any], given: Sequence[Any]) -> list[int]:  # noqa: ARG001
    # One more than wanted shows that there are too many, even in an endless iterator.
    return [index(block) for block in islice(value, handed[0] + 1)]


ORDERED = Returned("a value that has an order (`<`) and is equal to itself", _ordered)
HASHABLE = Returned("something hashable that is equal to itself", _hashable)
NONE_OR_TEXT = Returned("None, or text that is not empty", _none_or_text)
ONE_OF_FIRST = Returned("a member of its first argument", _one_of_first)
TEXT = Returned("text", _text)
BLOCK_IDS = Returned("`count` different candidates", _block_ids)

NOTHING = Default("nothing else follows", lambda *_: None)
"""Also for a method whose result may be None."""
EQUAL = Default("all are equal", lambda *_: 0.0)
ARRIVAL_ORDER = Default("the order of arrival decides", lambda request, *_: request.arrival_time)
COMMON_GROUP = Default("the request waits in the common group, None", lambda *_: None)
ADMITTED = Default("the request is admitted", lambda *_: None)
LAST_OF_FIRST = Default("its last member is taken", lambda members, *_: members[-1])
NO_TEXT = Default("it has no text", lambda *_: "")
RELEASE_ORDER = Default("those released first are evicted", lambda *_: None)
