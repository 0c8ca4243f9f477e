"""Component adapters: run classes and functions that were written for another engine."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from .base import Component, Source

__all__ = ["AdaptedComponent", "ComponentAdapter"]


class AdaptedComponent:
    """Base of the classes that a component adapter returns, next to the interface of their kind.

    Attributes:
        adapter: the external form, for people: "vLLM V1 class".
    """

    adapter: ClassVar[str]

    @classmethod
    def configured(cls, options: Any) -> type[AdaptedComponent]:  # noqa: ARG003
        """Return the class to use with options; a subclass where class attributes depend on them.

        Args:
            options: an instance of the class's `Options`.

        Raises:
            ConfigError: they do not fit the external object.
        """
        return cls


class ComponentAdapter(Component):
    """Makes components of objects that derive from no interface of Hardpoint.

    The loader calls enabled adapters in their order: the built-in ones, then the adapters in
    `plugins.enable`. The first adapter that matches an object makes the component, in each process
    that loads it. An adapter is never built: its methods are class methods, and it has no options.
    `[plugin.NAME]` of an adapted component has the options of the returned class.
    """

    @classmethod
    @abstractmethod
    def matches(cls, target: Any, kind: str | None) -> bool:
        """Return whether the adapter is for an object. Nothing is raised.

        An object that the adapter can explain, but not run, matches too: `adapt` raises.

        Args:
            target: a class, function or object of a module; no component and no hooks.
            kind: the kind of component that the configuration needs; None if any will do.
        """

    @classmethod
    @abstractmethod
    def adapt(cls, target: Any, source: Source) -> type[Component]:
        """Return the component of an object that matches, the same in each process.

        Args:
            target: the object, which stays as it is.
            source: its name, distribution and origin, for messages.

        Returns:
            A class derived from `AdaptedComponent` and the interface of its kind.

        Raises:
            PluginContractError: it has no form that can be adapted; the message gives the reason.
        """

    @classmethod
    def stand_ins(cls, module: str) -> AbstractContextManager[None] | None:  # noqa: ARG003
        """Return a context in which code that imports a missing module can be imported.

        `sys.modules` is as before at the end of the context.

        Args:
            module: the name of the module that was not found.

        Returns:
            None if the adapter has no stand-in for the module.
        """
        return None
