"""Components of other kinds that a step part drives: built, called and counted by the engine.

The contexts of the halves of a part have these, so that a part needs nothing of the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hardpoint.plugins.component.base import Component, Context, Source

R = TypeVar("R")


class ComponentCalls(Protocol):
    """Calls the methods of one component, which are timed and named while they run.

    Attributes:
        source: names the component in messages.
    """

    source: Source

    def run(self, method: str, function: Callable[..., R], *args: Any) -> R:
        """Call a method of the component; return its result."""


class FaultCounter(Protocol):
    """Counts the faults of the components that a part drives, for `LLM.plugins.health()`."""

    def reporter(
        self, source: Source, consequence: str
    ) -> Callable[[str, BaseException | None], None]:
        """Return a function that counts a fault of a component, given a message and its cause.

        It raises PluginFaultError if the component's faults end the engine (`plugins.on_error`).

        Args:
            source: source of the component.
            consequence: logged with its first fault.
        """

    def note(
        self, name: str, message: str, cause: BaseException | None = None, consequence: str = ...
    ) -> None:
        """Count a fault under a name; the first one of each name is logged."""

    def record(self, name: str, message: str, consequence: str = ...) -> None:
        """Count a fault that a worker half has reported.

        Raises:
            PluginFaultError: the component's faults end the engine.
        """


class ComponentFactory(Protocol):
    """Builds the components of other kinds that a part drives, and names them in messages."""

    def enabled(self, kind: str) -> Sequence[str]:
        """Return the names of the enabled components of a kind, in their order."""

    def find(self, kind: str, name: str) -> type[Component] | None:
        """Return the class of a component; None if it is not enabled."""

    def identity(self, kind: str, name: str) -> Any:
        """Return a value that other generations have for the same component with the same options.

        None if it is not enabled.
        """

    def check_name(self, kind: str, name: str, path: str) -> None:
        """Check that a name that a request gives belongs to one distribution.

        Args:
            kind: such as "grammars".
            name: name or FQCN of the component.
            path: field of the request that has the name.

        Raises:
            RequestError: several distributions offer it, and no setting chooses one.
        """

    def hint(self, kind: str, name: str) -> str:
        """Return, as the end of a message, a similar name, and how to get the component."""

    def options(self, kind: str, name: str) -> Any:
        """Return the options of an enabled component as plain data."""

    def call(self, kind: str, name: str, method: str, *args: Any) -> Any:
        """Call a class method of an enabled component; check its result as declared.

        Raises:
            PluginFaultError: it failed, or returned something else; the message names it.
            Exception: an exception that the method declares, such as NotImplementedError.
        """

    def calls(self, kind: str, name: str) -> ComponentCalls:
        """Return the caller of the methods of a component.

        Raises:
            PluginNotFoundError: it is not enabled.
        """

    def create(self, kind: str, name: str, context: type[Context[Any]], **fields: Any) -> Any:
        """Build an enabled component, which the caller owns and closes.

        Args:
            kind: such as "grammars".
            name: name of the component.
            context: class of its context.
            fields: fields of the context, besides name and options.

        Raises:
            PluginError: it is not enabled, or cannot be built.
        """

    def guarded(
        self,
        kind: str,
        name: str,
        context: type[Context[Any]],
        report: Callable[[str, BaseException | None], None],
        **fields: Any,
    ) -> Any:
        """Build an enabled component like `create`, with checks of the results of its methods.

        Where one does not, the declared default decides.

        Args:
            report: called with the message of each fault, and its cause or None.
        """

    def close(self, component: Component) -> None:
        """Close a component that `create` or `guarded` has built.

        Raises:
            PluginFaultError: it failed.
        """

    def source(self, kind: str, name: str) -> str:
        """Return how messages name a component.

        Raises:
            PluginNotFoundError: it is not enabled.
        """
