"""The base of the suites for one component: building it as the loader does, its contract."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import msgspec

from hardpoint.plugins import HardpointError, typed
from hardpoint.plugins.component import Context
from hardpoint.plugins.errors import PluginContractError

from .engine_access import check_plugin_class, plugin_name
from .suite import ConformanceSuite, Violation, exceptions_as_violations, short_repr


class ComponentSuite(ConformanceSuite):
    """Base class of the suites for a class that derives from `Component`.

    Attributes:
        kind: the plugin kind.
    """

    kind: ClassVar[str]

    def _exception_guard(self) -> AbstractContextManager[None]:
        return exceptions_as_violations()

    def _name(self) -> str:
        return self.name or plugin_name(self._component())

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
        """Check that the loader accepts the class, and that its options survive pickling."""
        cls = self._component()
        try:
            check_plugin_class(cls, self.kind, self._name())
        except PluginContractError as error:
            raise Violation(str(error), "add what the message names") from None
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
