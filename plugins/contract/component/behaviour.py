"""Declarations of the results of interface methods and of the reaction to wrong results.

The guard around plugins, the conformance suites and the reference read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any, TypeVar

from hardpoint.errors import shown

F = TypeVar("F", bound=Callable[..., Any])
Ids = TypeVar("Ids", bound=Collection[int])
LONG = 500  # characters of a quoted value
_MARK = "__behaviour__"


class UnusableError(Exception):
    """A method returned a value that cannot be used; the text follows its name in a message."""


def unusable(value: Any, problem: str, limit: int = 60) -> UnusableError:
    """Return the error of a value, cut to a limit; `problem` is the rest of the sentence."""
    return UnusableError(f"returned {shown(value, limit)}{problem}")


@dataclass(frozen=True)
class Returned:
    """The values that a method must return.

    Attributes:
        text: description of the values.
        check: returns the value to use, given the value that the method returned, its arguments,
            and the caller's original arguments. Raises UnusableError or another exception.
    """

    text: str
    check: Callable[[Any, Sequence[Any], Sequence[Any]], Any]


@dataclass(frozen=True)
class Default:
    """Replacement of the result of a method that failed.

    Attributes:
        text: description of the replacement.
        decide: returns the value, given the arguments of the caller.
    """

    text: str
    decide: Callable[..., Any]


@dataclass(frozen=True)
class Behaviour:
    """The valid results of a method and the reaction to a fault; every fault is counted.

    Attributes:
        returned: None for a method with an unused result.
        otherwise: decides instead; None if the call fails with an error that names the plugin.
        raises: exceptions that are meant for the caller.
        refuses: name of the component in messages; a fault rejects the request then. Empty if the
            error names the plugin as any other fault does.
        once: whether each component is asked once, and the result kept.
    """

    returned: Returned | None
    otherwise: Default | None
    raises: tuple[type[Exception], ...] = ()
    refuses: str = ""
    once: bool = False

    def __str__(self) -> str:
        """Return both as sentences."""
        if self.returned is None:
            return "If it raises, the fault is counted, and nothing else follows."
        if self.otherwise is None:
            outcome = "request is refused" if self.refuses else "call fails"
            return (
                f"Must return {self.returned.text}. If it returns anything else, or raises an "
                f"exception not stated here, the {outcome} with an error that names the plugin."
            )
        return (
            f"Must return {self.returned.text}. If it raises or returns anything else, the fault "
            f"is counted and {self.otherwise.text}."
        )


def returns(
    returned: Returned,
    *,
    otherwise: Default | None = None,
    raises: tuple[type[Exception], ...] = (),
    refuses: str = "",
    once: bool = False,
) -> Callable[[F], F]:
    """Declare the valid results of a method and the reaction to a fault; see `Behaviour`."""

    def declare(method: F) -> F:
        setattr(method, _MARK, Behaviour(returned, otherwise, raises, refuses, once))
        return method

    return declare


def notifies(method: F) -> F:
    """Declare that a method's result is not used, and that nothing depends on it."""
    setattr(method, _MARK, Behaviour(None, NOTHING))
    return method


def declared_of(method: Any) -> Behaviour | None:
    """Return the declaration of a function, method or property; None if it has no declaration."""
    function = getattr(method, "fget", None) or getattr(method, "__func__", method)
    declared = getattr(function, _MARK, None)
    return declared if isinstance(declared, Behaviour) else None


def behaviour_of(cls: type, method: str) -> Behaviour | None:
    """Return an interface's declaration of a method, also if a class derives from it."""
    declared = (declared_of(vars(base).get(method)) for base in cls.__mro__)
    return next(filter(None, declared), None)


def fitting(text: str, fits: Callable[[Any], bool]) -> Returned:
    """Return the declaration of values for which a function is true, described by `text`."""

    def check(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Any:  # noqa: ARG001
        if not fits(value):
            raise UnusableError(f"gave {shown(value)}, expected {text}")
        return value

    return Returned(text, check)


def instance(expected: type[Any]) -> Returned:
    """Return the declaration of instances of a class."""

    def check(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Any:  # noqa: ARG001
        if not isinstance(value, expected):
            name = type(value).__name__
            raise UnusableError(f"returned {name}, expected {expected.__name__}")
        return value

    return Returned(f"a `{expected.__name__}`", check)


def equals_itself(value: Any) -> bool:
    """Return whether a value is equal to itself; NaN is not, nor is a sequence with NaN."""
    if isinstance(value, tuple | list):  # these compare identical members as equal
        return all(map(equals_itself, value))
    return bool(value == value)


def _ordered(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Any:  # noqa: ARG001
    try:
        bool(value < value)
        is_equal = equals_itself(value)
    except BaseException as error:
        raise unusable(value, ", which has no order") from error
    if not is_equal:
        raise unusable(value, ", which is not equal to itself")
    return value


def _hashable(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Hashable:  # noqa: ARG001
    problem = ", expected something hashable that is equal to itself"
    try:
        hash(value)
        is_equal = equals_itself(value)
    except BaseException:
        raise unusable(value, problem) from None
    if not is_equal:
        raise unusable(value, problem)
    return value  # type: ignore[no-any-return]


def _none_or_text(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> str | None:  # noqa: ARG001
    if value is None:
        return None
    if isinstance(value, str) and (text := str.__str__(value)):  # a subclass may do anything
        return text
    raise unusable(value, ", expected None or the reason as a string that is not empty")


def _one_of_first(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Any:
    for request, original in zip(args[0], originals[0], strict=True):
        if value is request:
            return original
    raise unusable(value, ", which is not running")


def _text(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> str:  # noqa: ARG001
    if not isinstance(value, str):
        raise TypeError(f"expected a str, got {type(value).__name__}")
    value.encode()
    return value


def _some_text(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> str:  # noqa: ARG001
    if not isinstance(value, str):
        raise unusable(value, ", expected text", LONG)
    return value


def _none_or_some_text(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> str | None:
    return None if value is None else _some_text(value, args, originals)


def _token_ids(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> list[int]:  # noqa: ARG001
    try:
        ids = list(value)
        if set(map(type, ids)) != {int}:
            ids = [int(index(token)) for token in ids]
    except BaseException as error:
        raise unusable(value, ", expected token ids", LONG) from error
    return ids


def within(ids: Ids, limit: int) -> Ids:
    """Return token ids, each of them under a limit.

    Raises:
        UnusableError: one is not.
    """
    if ids and not (min(ids) >= 0 and max(ids) < limit):
        wrong = next(token for token in ids if not 0 <= token < limit)
        raise unusable(wrong, f", expected token ids from 0 to {limit - 1}", LONG)
    return ids


def _number(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> int:  # noqa: ARG001
    if type(value) is not int or value < 1:
        raise unusable(value, ", expected a number of tokens", LONG)
    return value


def _piece(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> str | None:  # noqa: ARG001
    if value is not None and not isinstance(value, str):
        raise unusable(value, ", expected text or None", LONG)
    return value


def _stream(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Any:  # noqa: ARG001
    if not callable(getattr(value, "step", None)):
        raise unusable(value, ", which has no step()", LONG)
    return value


def _block_ids(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> list[int]:  # noqa: ARG001
    # One more than wanted shows that there are too many, even in an endless iterator.
    return [index(block) for block in islice(value, args[0] + 1)]


ORDERED = Returned("a value that has an order (`<`) and is equal to itself", _ordered)
HASHABLE = Returned("something hashable that is equal to itself", _hashable)
NONE_OR_TEXT = Returned("None, or text that is not empty", _none_or_text)
ONE_OF_FIRST = Returned("a member of its first argument", _one_of_first)
TEXT = Returned("text", _text)
SOME_TEXT = Returned("text", _some_text)
NONE_OR_SOME_TEXT = Returned("text or None", _none_or_some_text)
TOKEN_IDS = Returned("token ids of the model", _token_ids)
PIECE = Returned("text or None", _piece)
NUMBER_OF_TOKENS = Returned("a whole number >= 1", _number)
DECODE_STREAM = Returned("an object with the method `step`", _stream)
BLOCK_IDS = Returned("`count` different candidates", _block_ids)

NOTHING = Default("nothing else follows", lambda *_: None)
"""Also for a method that may return None."""
EQUAL = Default("all are equal", lambda *_: 0.0)
ARRIVAL_ORDER = Default("the order of arrival decides", lambda request, *_: request.arrival_time)
COMMON_GROUP = Default("the request waits in the common group, None", lambda *_: None)
ADMITTED = Default("the request is admitted", lambda *_: None)
LAST_OF_FIRST = Default("its last member is taken", lambda members, *_: members[-1])
NO_TEXT = Default("it has no text", lambda *_: "")
RELEASE_ORDER = Default("blocks released first are evicted", lambda *_: None)
