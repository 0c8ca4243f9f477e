"""The conformance suite for component adapters; the built-in one passes it too."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from hardpoint.errors import PluginContractError
from hardpoint.host.registry.adapt import ComponentAdapters
from hardpoint.host.registry.loading import check_component
from hardpoint.plugins import ComponentAdapter
from hardpoint.plugins.component import Component, Source

from .component_suite import ComponentSuite
from .suite import Rule, checks, short_repr

MATCHES = Rule(
    "matches: each of `targets` matches, and no object that is for no adapter; nothing is raised",
    "compare base classes, names of methods and signatures, and return True or False",
)
COMPONENT = Rule(
    "component: an adapted object is a component that the loader accepts",
    "return a class that derives from AdaptedComponent and the interface of its kind",
)
SAME = Rule(
    "same: each process makes the same component of an object, which stays as it is",
    "keep no state between calls, and derive a new class instead of changing the object",
)
REFUSED = Rule(
    "refused: an object that nearly has a form is refused by a PluginContractError",
    "let matches return True for it, and name the missing member in adapt's error",
)
STAND_INS = Rule(
    "stand-ins: sys.modules is as before when their context ends, also by an exception",
    "remove each module in a finally clause",
)

_ABSENT = "no_such_module_of_any_engine"


class _Plain:
    """A class of no known form."""

    def run(self) -> None:
        """Do nothing."""


class ComponentAdapterSuite(ComponentSuite):
    """Base class of a test class, which sets `adapter` and `targets`.

    Attributes:
        adapter: the class under test.
        targets: objects that it adapts.
        refused: objects that match and that `adapt` refuses.
        modules: modules for which it has stand-ins.
    """

    kind = "component_adapters"
    adapter: ClassVar[type[ComponentAdapter]]
    targets: ClassVar[Sequence[Any]] = ()
    refused: ClassVar[Sequence[Any]] = ()
    modules: ClassVar[Sequence[str]] = ()

    def _component(self) -> type[Component]:
        return self.adapter

    def _check_construction(self) -> None:
        """Nothing builds an adapter."""

    @checks(MATCHES)
    def test_matches(self) -> None:
        """Each of `targets` and `refused` matches; numbers, modules and plain classes do not."""
        if not self.targets:
            raise MATCHES.violation("`targets` has no object", "set `targets`")
        for target in (*self.targets, *self.refused):
            if self._matches(target) is not True:
                raise MATCHES.violation(f"matches({short_repr(target)}, None) is not True")
        for target in (3, None, "text", object(), sys, _Plain):
            if self._matches(target) is not False:
                raise MATCHES.violation(f"matches({short_repr(target)}, None) is not False")

    @checks(COMPONENT)
    def test_component(self) -> None:
        """The loader accepts each adapted object, with the defaults of its options."""
        for target in self.targets:
            try:
                self._adapted(target)
            except PluginContractError as error:
                raise COMPONENT.violation(f"{short_repr(target)}: {error}") from error

    @checks(SAME)
    def test_same(self) -> None:
        """Two components of one object have the same attributes; the object has its own."""
        for target in self.targets:
            before = dict(vars(target)) if hasattr(target, "__dict__") else {}
            first, second = (_described(self._adapted(target)) for _ in "ab")
            if first != second:
                raise SAME.violation(
                    f"adapting {short_repr(target)} gave {short_repr(first)}, then "
                    f"{short_repr(second)}"
                )
            after = dict(vars(target)) if hasattr(target, "__dict__") else {}
            if changed := sorted(after.keys() ^ before.keys()):
                raise SAME.violation(f"it changed {', '.join(changed)} of {short_repr(target)}")

    @checks(REFUSED)
    def test_refused(self) -> None:
        """Each of `refused` raises a PluginContractError that names the plugin."""
        for target in self.refused:
            source = Source.of_module("near_miss", "elsewhere:NearMiss", "a test")
            try:
                self.adapter.adapt(target, source)
            except PluginContractError as error:
                if "near_miss" not in str(error):
                    raise REFUSED.violation(
                        f"the error for {short_repr(target)} does not name the plugin: {error}",
                        "begin the message with the source",
                    ) from error
            else:
                raise REFUSED.violation(f"adapt({short_repr(target)}) raised nothing")

    @checks(STAND_INS)
    def test_stand_ins(self) -> None:
        """The context of each of `modules` leaves nothing; other modules have none."""
        for module in self.modules:
            before = set(sys.modules)
            context = self.adapter.stand_ins(module)
            if context is None:
                raise STAND_INS.violation(f"stand_ins({module!r}) is None", "return a context")
            error = KeyError("of the imported code")
            try:
                with context:
                    raise error
            except KeyError:
                pass
            else:
                raise STAND_INS.violation("the context hides an exception", "raise it again")
            if left := sorted(set(sys.modules) - before):
                raise STAND_INS.violation(
                    f"sys.modules has {left[0]!r} after stand_ins({module!r})"
                )
        if self.adapter.stand_ins(_ABSENT) is not None:
            raise STAND_INS.violation(
                f"stand_ins({_ABSENT!r}) is not None", "return None for other modules"
            )

    def _adapted(self, target: Any) -> type[Component]:
        """Return the component of an object, as the loader makes and checks it.

        Raises:
            PluginContractError: the loader rejects it.
        """
        test_source = Source.of_module(self._name(), self._name(), "a test")
        source = Source.of_module("adapted", "elsewhere:adapted", "a test")
        adapters = ComponentAdapters(lambda: [(test_source, self.adapter)])
        component: type[Component] = adapters.adapt(target, source)
        for kind in adapters.kinds_of(component, source):
            check_component(component, kind, source)
        return component

    def _matches(self, target: Any) -> Any:
        try:
            return self.adapter.matches(target, None)
        except Exception as cause:
            raise MATCHES.violation(
                f"matches({short_repr(target)}, None) raised {type(cause).__name__}: {cause}"
            ) from cause


def _described(component: type[Component]) -> dict[str, str]:
    described = {
        name: short_repr(getattr(component, name))
        for name, value in inspect.getmembers(component)
        if isinstance(value, (bool, int, str, tuple)) and not name.startswith("_")
    }
    bases = ", ".join(f"{base.__module__}.{base.__qualname__}" for base in component.__mro__[1:])
    return {**described, "bases": bases, "options": short_repr(component.Options())}
