"""Base of all components: contract version, options and context."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from . import typed

__all__ = ["Component", "Context", "Progress"]

Progress = Callable[[str, int, int], None]
"""Progress callback `(what, done, total)` of long work; `done == total` ends it."""


ComponentT_co = TypeVar("ComponentT_co", bound="Component", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Context(Generic[ComponentT_co]):
    """Constructor argument of a component. Each kind adds fields; none is ever removed.

    The type parameter is the interface of the components that take it.

    Attributes:
        name: under which the configuration enables the component.
        options: the component's own `Options`, checked.
    """

    name: str
    options: Any


class NoOptions(typed.Options):
    """The options of a component without any."""


class Component(ABC):
    """Base of every interface in the contract.

    Options of its own are a class `Options` in its body, derived from `hardpoint.plugins.Options`;
    with `options: Options` after it, a type checker knows what `self.options` is.

    A component states `contract = 1` in its own class body: the version of its kind's contract
    that it implements. Subclasses do not inherit it.
    """

    contract: ClassVar[int]
    Options: ClassVar[type[typed.Options]] = NoOptions

    def __init__(self, context: Context[Component]) -> None:
        """Store the context; `self.name` and `self.options` are its fields."""
        self.context = context
        self.name = context.name
        self.options = context.options

    def close(self) -> None:  # noqa: B027 - optional on purpose
        """Release resources; called once, when the process closes."""
