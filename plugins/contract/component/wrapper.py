"""Wrappers: components that delegate to another one of their kind, except where they override."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, get_origin

from hardpoint import typed

from .base import Component, Context

__all__ = ["Wrapper"]

ComponentT = TypeVar("ComponentT", bound=Component)

_OWN = {"Arguments", "close", "overridden", "prepare", "record", "replayable", "wraps"}
"""Members of interfaces that a wrapper defines itself: members about its identity."""


class Wrapper(Component, Generic[ComponentT]):
    """Base of a component that wraps another of its kind, named before the kind's interface.

    `class Logged(Wrapper[Executor], Executor)` delegates to the executor in `self.wrapped`: each
    method, property and attribute of the interface that the class does not override is from the
    wrapped component, also through `super()`. Class attributes and class methods that are looked up
    on the class itself, such as `AttentionBackend.devices`, have to be stated again.

    The operator chooses the wrapped component with the option `wraps`. The wrapper owns it: a
    class that overrides `close` calls `super().close()`.

    Attributes:
        wrapped: the component that is wrapped.
    """

    class Options(typed.Options):
        """Options of a wrapper; derive from it, and give `wraps` a default.

        Attributes:
            wraps: entry-point name or FQCN of the wrapped component.
        """

        wraps: str

    wrapped: ComponentT

    def __class_getitem__(cls, interface: Any) -> type[Any]:
        """Return the base class of the wrappers of an interface's components."""
        if cls is not Wrapper or isinstance(interface, TypeVar):
            return super().__class_getitem__(interface)  # type: ignore[misc, no-any-return]
        interface = get_origin(interface) or interface  # of a generic one, with its parameters
        members = {name: _Forwarded(name, member) for name, member in _members(interface)}
        return type(f"Wrapper[{interface.__name__}]", (cls,), {"__module__": __name__, **members})

    def __init_subclass__(cls, **more: Any) -> None:
        """Reject a class that would not be a wrapper, because its bases are in the wrong order."""
        super().__init_subclass__(**more)
        for base in cls.__mro__[1:]:
            # Not issubclass: while a class is made, ABC would ask the caches of its bases.
            if Wrapper in base.__mro__:
                break
            if Component in base.__mro__:
                raise TypeError(
                    f"class {cls.__name__}: expected the base Wrapper[{base.__name__}] before "
                    f"{base.__name__}"
                )

    def __init__(self, context: Context[ComponentT]) -> None:
        """Build the wrapped component."""
        # First, because `__init__` of an interface may read the wrapped component's attributes.
        self.wrapped = context.create(context.options.wraps)
        super().__init__(context)

    @classmethod
    def wraps(cls, options: Any) -> Sequence[str]:
        """Return the wrapped component."""
        return (options.wraps,)

    def close(self) -> None:
        """Close the wrapped component."""
        self.wrapped.close()


class _Forwarded:
    """A member of an interface that is the wrapped component's."""

    def __init__(self, name: str, member: Any) -> None:
        self._name, self._member = name, member
        is_data = isinstance(member, type) or not (callable(member) or hasattr(member, "__get__"))
        self._of_class = member if is_data else self
        self.__doc__ = getattr(member, "__doc__", None)

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is not None:
            return getattr(wrapper.wrapped, self._name)
        is_abstract = getattr(self._member, "__isabstractmethod__", False)
        if isinstance(self._member, classmethod) and not is_abstract:  # nothing is wrapped yet
            return self._member.__get__(None, owner)
        return self._of_class


def _members(interface: type[Component]) -> Iterator[tuple[str, Any]]:
    """Yield the public members of an interface without the members of every component."""
    for base in reversed(interface.__mro__):
        if base not in Component.__mro__:
            for name, member in vars(base).items():
                if not name.startswith("_") and name not in _OWN:
                    yield name, member
