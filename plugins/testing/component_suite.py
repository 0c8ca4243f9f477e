"""The base of the suites for one component: building it as the loader does, its contract."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from hardpoint import typed
from hardpoint.errors import PluginContractError
from hardpoint.plugins import ConfigError, HardpointError, RequestError
from hardpoint.plugins.component import Component, Context
from hardpoint.plugins.component.base import MAX_STATE_BYTES

from .engine_access import (
    check_plugin_class,
    complete_context,
    plugin_name,
    prepare_request_arguments,
)
from .general.suite import GeneralSuite, InUse
from .suite import (
    ConformanceSuite,
    Rule,
    Violation,
    checks,
    exceptions_as_violations,
    reject_replaced_tests,
    short_repr,
)
from .threads import until

ClassT = TypeVar("ClassT")

OPTIONS = Rule("options: the options of the suite are valid", "set them as an operator would")


LIVE = Rule(
    "live changes: a second instance begins and ends next to the first, which goes on",
    "keep state in the instance, and end its threads in close(); or set `changes_live = False`",
)

_THREADS_END_S = 1.0


def first_device(cls: Any, name: str | None) -> torch.device:
    """Return the named device, or the first of a component's `devices` that this machine has.

    The test is skipped if there is none.
    """
    names = [name] if name else list(getattr(cls, "devices", ()))
    for name in names:
        if name == "cpu" or (name.startswith("cuda") and torch.cuda.is_available()):
            return torch.device(name)
    pytest.skip(f"this machine has no device of {', '.join(names) or '`devices`'}")


def class_under_test(suite: object, attribute: str, interface: type[ClassT]) -> type[ClassT]:
    """Return the class that a suite's attribute names; fail the test if it is not a class."""
    target = getattr(suite, attribute, None)
    if inspect.isclass(target) and issubclass(target, interface):
        return target
    pytest.fail(
        f"{type(suite).__qualname__}.{attribute}: expected the class under test, which derives "
        f"from {interface.__name__}, got {short_repr(target)}",
        pytrace=False,
    )


class ComponentSuite(ConformanceSuite):
    """Base class of the suites for a class that derives from `Component`.

    Attributes:
        kind: the plugin kind.
        arguments: for kinds that take them: a strategy for arguments of requests, as instances or
            plain data; None draws none. Arguments that `prepare` rejects by a ValueError are left
            out.
        options_from: where an author sets options, for messages.
    """

    kind: ClassVar[str]
    options_from: ClassVar[str] = "the suite's `options`"
    arguments: ClassVar[st.SearchStrategy[Any] | None] = None

    @contextmanager
    def _exception_guard(self) -> Iterator[None]:
        with exceptions_as_violations():
            try:
                yield
            except ConfigError as error:
                if not str(error).startswith(f"plugin.{self._name()}"):
                    raise
                fix = f"set {self.options_from} as an operator would"
                raise OPTIONS.violation(str(error), fix) from error

    @checks("contract: the loader can check and build the class")
    def test_contract(self) -> None:
        """The class states its contract and can be built; its options survive pickling."""
        ours = (c for c in type(self).__mro__ if c.__module__.startswith("hardpoint.testing."))
        reject_replaced_tests(type(self), next(ours))
        self._check_contract()
        self._check_construction()

    def _name(self) -> str:
        return self.name or plugin_name(self._component())

    def _checked_options(self, more: Mapping[str, Any] | None = None) -> Any:
        path, values = f"plugin.{self._name()}", {**self.options, **(more or {})}
        return typed.convert(values, self._component().Options, path=path, str_keys=True)

    def _build(self, context_type: type[Context[Any]], **fields: Any) -> Any:
        """Return a new instance.

        Args:
            fields: fields of the context; `options` default to `_checked_options`.

        Raises:
            Violation: it cannot be built.
        """
        cls = self._component()
        if "options" not in fields:
            fields["options"] = self._checked_options()
        made = context_type(name=self._name(), **fields)
        context = complete_context(made, self.kind, cls)
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

    def _make(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _check_construction(self) -> None:
        self._make().close()

    def _drawn_arguments(self, vocab_size: int) -> st.SearchStrategy[Any]:
        strategy: st.SearchStrategy[Any] = st.just({})
        if self.arguments is not None:
            is_named = getattr(self._component(), "named_only", False)
            strategy = self.arguments if is_named else strategy | self.arguments
        return strategy.map(lambda drawn: self._prepared(drawn, vocab_size))

    def _prepared(self, values: Any, vocab_size: int) -> Any:
        """Return the prepared arguments of a component for the arguments of a request.

        Raises:
            Violation: they do not fit its Arguments, or its `prepare` fails.
        """
        name, options = self._name(), self._checked_options()
        try:
            return prepare_request_arguments(self._component(), name, options, values, vocab_size)
        except RequestError as error:
            assume(not isinstance(error.__cause__, ValueError))
            raise Violation(
                f"{short_repr(values)} is refused: {error}",
                "let the strategy `arguments` draw only values that Arguments accepts, and let "
                "prepare refuse a request by a ValueError and return an instance of Prepared if "
                "there is one",
            ) from None

    def _check_contract(self) -> None:
        cls = self._component()
        try:
            check_plugin_class(cls, self.kind, self._name())
        except PluginContractError as error:
            raise Violation(str(error), "add the members in the message") from None
        options = self._checked_options()
        try:
            unpickled = pickle.loads(pickle.dumps(options))
        except Exception as cause:
            raise Violation(
                f"its options do not survive pickle: {type(cause).__name__}: {cause}",
                "define Options in a module, or in a class of a module",
            ) from cause
        converted = typed.convert(msgspec.to_builtins(options), cls.Options, path="")
        if not unpickled == options == converted:
            raise Violation(
                f"its options {short_repr(options)} come back as {short_repr(unpickled)} from "
                f"pickle and as {short_repr(converted)} from plain data",
                "let Options hold plain data only",
            )


class GeneralComponentSuite(GeneralSuite, ComponentSuite):
    """Base class of the suites of components that are built and used without an engine."""

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        component = self._make()
        yield InUse(component, functools.partial(self._use_once, component))

    def _use_once(self, component: Any, number: int) -> object:
        """Use a component once, as the engine does, with inputs that depend on the number."""
        raise NotImplementedError

    def _options_in_use(self) -> Any:
        return self._checked_options()


class LiveComponentSuite(ComponentSuite):
    """Base class of the suites of kinds with hot reconfiguration."""

    @checks(LIVE)
    def test_live_change(self) -> None:
        """A second instance is built and closed next to the first, as a live change does: nothing
        of module and class changes, no thread of the first ends, and none is left at the end.
        """
        cls = self._component()
        if not getattr(cls, "changes_live", True):
            pytest.skip("the class does not set `changes_live = True`: it changes with a restart")
        check_live_change(cls, self._make)


def check_live_change(cls: type, make: Callable[[], Any]) -> None:
    """Check that an instance can be built and closed next to another one.

    Args:
        cls: class of the component.
        make: returns a new instance, or a context that has and closes it.

    Raises:
        Violation: the instances share something.
    """
    at_start = set(threading.enumerate())
    first = make()
    begun, held = set(threading.enumerate()) - at_start, _held(cls)
    make().close()
    for name, before in held.items():
        if (after := _held(cls).get(name)) != before:
            raise LIVE.violation(f"{name} was {before}, and {after} once a second one had ended")
    if ended := [thread.name for thread in begun if not thread.is_alive()]:
        raise LIVE.violation(f"the end of a second one ended the thread {ended[0]!r} of the first")
    if isinstance(first, Component):
        check_state(first)
    first.close()

    def left() -> list[str]:
        return [
            thread.name for thread in set(threading.enumerate()) - at_start if thread.is_alive()
        ]

    if not until(lambda: not left(), _THREADS_END_S):
        raise LIVE.violation(f"the thread {left()[0]!r} runs on after close()")


def check_state(component: Component) -> None:
    """Check the result of `dump_state`.

    Raises:
        Violation: it is not plain data, or too much.
    """
    state = component.dump_state()
    try:
        size = len(msgspec.json.encode(state)) if isinstance(state, Mapping) else None
    except Exception as cause:
        raise LIVE.violation(f"dump_state() cannot be JSON: {cause}", "return plain data") from None
    if size is None or size > MAX_STATE_BYTES:
        raise LIVE.violation(
            f"dump_state() returned {short_repr(state)}",
            f"return a mapping of at most {MAX_STATE_BYTES} bytes as JSON",
        )


def _held(cls: type) -> dict[str, str]:
    classes = [base for base in cls.__mro__ if not base.__module__.startswith(_CONTRACT)]
    spaces: dict[str, Mapping[str, Any]] = {
        f"{base.__module__}.{base.__qualname__}": vars(base) for base in classes
    }
    spaces |= {name: vars(sys.modules[name]) for name in {base.__module__ for base in classes}}
    return {
        f"{space}.{name}": _described(value)
        for space, values in spaces.items()
        for name, value in values.items()
        if not name.startswith("__")
    }


_CONTRACT = ("hardpoint.plugins", "builtins", "abc", "typing")
_CONTAINERS = (dict, list, set, deque)


def _described(value: Any) -> str:
    if isinstance(value, _CONTAINERS):
        return f"a {type(value).__name__} of {len(value)}"
    return short_repr(value) if isinstance(value, (int, str, bytes)) else f"object {id(value)}"
