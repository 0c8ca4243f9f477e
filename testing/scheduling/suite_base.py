"""How the suites for schedulers and policies search, and how they fail."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import msgspec
from hypothesis import strategies as st

from hardpoint.plugins import HardpointError, typed
from hardpoint.plugins.component import Component, Context
from hardpoint.plugins.errors import PluginContractError
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.manifest import Source
from hardpoint.registry.loading import check_component, snake_case
from hardpoint.testing.scheduling.checks.names import BrokenRule
from hardpoint.testing.suite import Search, Violation, describe, fail, replayed, short

from .scenarios import Scenario, crashes


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

    def _build(self, context_type: type[Context[Any]], **fields: Any) -> Any:
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
        found = search.run(check, **strategies)
        if found is not None:
            self._fail(rule, found.violation, replayed(found, _told(found.drawn)))

    def _fail(self, rule: str, violation: Violation, case: str = "") -> NoReturn:
        words = violation.rule.words if isinstance(violation, BrokenRule) else rule
        fail(self._component(), words, violation, case)


def best_of(rounds: int, work: Callable[[], None]) -> float:
    """Return the least processor seconds that something took, of so many rounds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def _told(drawn: dict[str, Any]) -> str:
    scenarios = [value for value in drawn.values() if isinstance(value, Scenario)]
    if not scenarios:
        return describe(drawn)
    return "\n".join(f"    {line}" for line in scenarios[0].code().splitlines())
