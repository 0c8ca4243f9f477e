"""The tests that the suite of every kind has: resources, close."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from hardpoint.testing.pytest_hooks import examples_scale
from hardpoint.testing.suite import SETTINGS, ConformanceSuite, Rule, Search

from .growth import RESOURCES, check_growth
from .holdings import FileWatch, busy_thread, handles, more_than, settings
from .inputs import unchanged

__all__ = ["CLOSED", "IDLE", "SETTINGS", "GeneralSuite", "InUse"]

IDLE = Rule(
    "idle: a component computes only while it is called",
    "let a thread wait for an event or a queue, and not look again and again",
)
CLOSED = Rule(
    "close: nothing is left after close(), and a second close() does no harm",
    "end threads and child processes, close files and sockets, and remove temporary files in "
    "close(); remember that it was called",
)

_FEWEST_USES = 200
_BUSY_SECONDS = 2.0
_CLOSE_SECONDS = 1.0
_PROCESSES = ("thread ", "child process")


class Closable(Protocol):
    """An object that is closed."""

    def close(self) -> None:
        """Close it."""


class Use(Protocol):
    """Uses a component once."""

    def __call__(self, number: int, /) -> object:
        """Use it, with inputs that depend on the number."""


class InUse(NamedTuple):
    """A new component, and how it is used."""

    component: Closable
    use: Use


class GeneralSuite(ConformanceSuite):
    """Base class of suites for components that work without an engine.

    Attributes:
        num_uses: uses after which resources are compared.
        max_bytes_per_use: memory that a use may leave, for caches of libraries.
    """

    num_uses: ClassVar[int] = 1000
    max_bytes_per_use: ClassVar[int] = 32
    _is_counting: bool = False
    """Whether uses are counted, so that calls are neither timed nor compared."""

    def test_resources(self) -> None:
        """Over 1,000 uses, memory, threads, files, sockets and child processes do not grow; no
        thread computes while the component is idle, and process-wide settings stay unchanged.
        """
        self._run_checks(RESOURCES.text, self._check_growth_and_settings)

    def test_close(self) -> None:
        """After `close`, with and without a use before, no thread, child process, open file, socket
        and new file is left; a second `close` does no harm.
        """
        self._run_checks(CLOSED.text, self._check_closing)

    def _in_use(self) -> AbstractContextManager[InUse]:
        """Return the context in which a new component exists; the caller closes the component."""
        raise NotImplementedError

    def _check_growth_and_settings(self) -> None:
        known, before = set(threading.enumerate()), settings()
        with self._in_use() as (component, use):
            try:
                use(0)
                self._is_counting = True
                uses = round(self.num_uses * self.examples * examples_scale())
                uses = max(uses, min(_FEWEST_USES, self.num_uses))
                check_growth(component, use, uses, self.max_bytes_per_use, known)
                if name := busy_thread(known, _BUSY_SECONDS):
                    raise IDLE.violation(
                        f"the thread {name!r} ran all the time for {_BUSY_SECONDS:g} s in which "
                        f"nothing was asked, expected it to wait"
                    )
            finally:
                self._is_counting = False
                with suppress(Exception):  # test_close reports it
                    component.close()
        after = settings()
        for name, value in before.items():
            if after[name] != value:
                states = "" if "state" in name else f": it was {value}, and is {after[name]}"
                raise SETTINGS.violation(f"it changed {name}{states}")

    def _check_closing(self) -> None:
        with self._in_use() as (component, _):
            _close(component, "close() of an unused instance")
        for kinds in (_PROCESSES, ("",)):  # a library may keep files of its first use open
            watch, before = FileWatch(), handles()
            with watch.watching(), self._in_use() as (component, use):
                for number in range(3):
                    use(number)
                _close(component, "close()")
                _close(component, "a second close()")
            _check_released(before, kinds)
            if "" in kinds and (left := watch.left(self._is_expected_file)):
                raise CLOSED.violation(f"after close() there is the file {left[0]!r}")

    def _is_expected_file(self, path: str) -> bool:
        """Return whether the component may leave a file: an operator names it in its options."""
        named = _texts(msgspec.to_builtins(self._options_in_use()))
        return any(path.startswith(os.path.abspath(os.path.expanduser(text))) for text in named)

    def _options_in_use(self) -> Any:
        return dict(self.options)

    def _unchanged(self, rule: Rule, call: str, **inputs: Any) -> AbstractContextManager[None]:
        """Return the context of a call that must not mutate its inputs; see `unchanged`."""
        return nullcontext() if self._is_counting else unchanged(rule, call, **inputs)

    def _sampled(self, rule: Rule, strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
        """Return values of a strategy, at least one; fail the test if there are none.

        Raises:
            Violation: a value cannot be drawn.
        """
        values: list[Any] = []
        try:
            search = Search(count, self.replay_seed)
            failure = search.run(lambda value: values.append(value), value=strategy)
        except Unsatisfiable:
            self._fail(rule.text, self._nothing_drawn())
        if failure is not None:
            raise failure.violation
        return values


def _close(component: Closable, label: str) -> None:
    try:
        component.close()
    except Exception as cause:
        raise CLOSED.violation(f"{label} raised {type(cause).__name__}: {cause}") from cause


def _check_released(before: Mapping[str, int], kinds: tuple[str, ...]) -> None:
    """Wait until there are no more resources than before.

    Raises:
        Violation: there are.
    """
    deadline = time.monotonic() + _CLOSE_SECONDS
    while left := [name for name in more_than(before, handles()) if name.startswith(kinds)]:
        if time.monotonic() > deadline:
            raise CLOSED.violation(
                f"after close() there still are: {', '.join(sorted(left))}; expected none"
            )
        gc.collect()
        time.sleep(0.01)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and len(value) > 1:
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
