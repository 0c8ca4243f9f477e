"""How the suites for schedulers and policies search, and how they fail."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import msgspec
import pytest
from hypothesis import strategies as st

from hardpoint.plugins import KINDS, Component, Context, HardpointError, PluginContractError, typed
from hardpoint.plugins.loading import Source, check_component, snake_case

from .scheduling_rules import BrokenRule
from .scheduling_scenarios import Scenario, crashes
from .searching import Search, describe
from .seeds import replay_line
from .violations import Violation, short

__all__ = ["SchedulingSuiteBase", "best_of"]


class SchedulingSuiteBase:
    """What the suites share.

    Attributes:
        options: what an operator would write under `[plugin.<name>]`.
        name: under which it is chosen; the class's in snake_case if None.
        examples: scales how many cases each rule is tried on; 10 for a thorough run.
        replay_seed: makes the searches of an earlier run again; None draws new ones. The
            environment variable HARDPOINT_SEED does the same from outside.
    """

    kind: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    name: ClassVar[str | None] = None
    examples: ClassVar[float] = 1.0
    replay_seed: ClassVar[int | None] = None

    def _component(self) -> type[Component]:
        raise NotImplementedError

    def _name(self) -> str:
        return self.name or snake_case(self._component().__name__)

    def _checked_options(self) -> Any:
        path = f"plugin.{self._name()}"
        return typed.convert(dict(self.options), self._component().Options, path=path)

    def _build(self, context_type: type[Context], **fields: Any) -> Any:
        """Return a new instance.

        Raises:
            Violation: it cannot be built.
        """
        cls = self._component()
        context = context_type(name=self._name(), options=self._checked_options(), **fields)
        try:
            component = cls(context)
        except HardpointError:
            raise
        except Exception as cause:
            raise Violation(
                f"its constructor raised {type(cause).__name__}: {cause}",
                "build from the context alone",
            ) from cause
        if getattr(component, "context", None) is not context:
            raise Violation("it has no context", "call super().__init__(context) in its __init__")
        return component

    def _check_contract(self) -> None:
        """The class is what a loader accepts, and its options travel."""
        cls = self._component()
        value = f"{cls.__module__}:{cls.__qualname__}"
        source = Source(self._name(), value, "under test", "0", "default")
        try:
            check_component(cls, KINDS[self.kind], source)
        except PluginContractError as error:
            raise Violation(str(error), "add what the message names") from None
        options = self._checked_options()
        try:
            arrived = pickle.loads(pickle.dumps(options))
        except Exception as cause:
            raise Violation(
                f"its options do not survive pickle: {type(cause).__name__}: {cause}",
                "let Options stand in a module or in a class of one",
            ) from cause
        plain = typed.convert(msgspec.to_builtins(options), cls.Options, path="")
        if not arrived == options == plain:
            raise Violation(
                f"its options {short(options)} come back as {short(arrived)} and {short(plain)}",
                "hold plain data only",
            )

    def _refuse_replaced_tests(self, suite: type) -> None:
        """Refuse a class that replaces a test: a suite that was bent proves nothing."""
        for name, test in inspect.getmembers(suite, inspect.isfunction):
            own = getattr(type(self), name)
            if name.startswith("test_") and own is not test and not _expected_to_fail(own):
                raise Violation(
                    f"{type(self).__name__} replaces {name}",
                    "give the additional test another name; to leave a rule out, override its "
                    "test with one that is marked pytest.mark.xfail(reason=...)",
                )

    def _once(self, rule: str, *checks: Callable[[], None]) -> None:
        for check in checks:
            try:
                with crashes():
                    check()
            except Violation as violation:
                self._fail(rule, violation)

    def _search(
        self,
        rule: str,
        examples: int,
        check: Callable[..., None],
        **strategies: st.SearchStrategy[Any],
    ) -> None:
        """Try a rule on drawn cases; fail with what an author needs to see it again."""
        search = Search(max(1, round(examples * self.examples)), self.replay_seed)
        found = search.run(_from_one_place(check), **strategies)
        if found is not None:
            case = f"\n  case:\n{_told(found.drawn)}\n  replay: {replay_line(found.seed)}"
            self._fail(rule, found.violation, case)

    def _fail(self, rule: str, violation: Violation, case: str = "") -> NoReturn:
        cls = self._component()
        words = violation.rule.words if isinstance(violation, BrokenRule) else rule
        pytest.fail(
            f"{cls.__module__}.{cls.__qualname__} breaks a rule.\n"
            f"  rule: {words}\n  saw: {violation.saw}\n  do: {violation.do}{case}",
            pytrace=False,
        )


def best_of(rounds: int, work: Callable[[], None]) -> float:
    """Return the least processor seconds that something took, of so many rounds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def _from_one_place(check: Callable[..., None]) -> Callable[..., None]:
    """Return a check whose violations all come from one line.

    hypothesis takes those of different lines for different bugs, and goes after all of them.
    """

    def checked(**drawn: Any) -> None:
        found = None
        try:
            check(**drawn)
        except Violation as violation:
            found = violation
        if found is not None:
            found.__cause__ = found.__context__ = None
            raise found.with_traceback(None)

    return checked


def _told(drawn: dict[str, Any]) -> str:
    scenarios = [value for value in drawn.values() if isinstance(value, Scenario)]
    if not scenarios:
        return describe(drawn)
    return "\n".join(f"    {line}" for line in scenarios[0].code().splitlines())


def _expected_to_fail(test: Any) -> bool:
    marks = getattr(test, "pytestmark", [])
    return any(mark.name in ("xfail", "skip") and mark.kwargs.get("reason") for mark in marks)
