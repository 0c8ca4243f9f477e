"""What every component of every kind shares: a contract version, options and a context."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from . import typed

__all__ = ["Component", "Context", "Progress"]

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) during long work; `done == total` ends it."""


ComponentT_co = TypeVar("ComponentT_co", bound="Component", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Context(Generic[ComponentT_co]):
    """What a component is built with. Each kind adds fields; none is ever removed.

    The type parameter is the interface whose components are built with it.

    Attributes:
        name: the name under which the configuration enabled the component.
        options: the component's own `Options`, already checked.
    """

    name: str
    options: Any


class Component(ABC):
    """Base of every interface in the contract.

    A component states `contract = 1` in its own class body: the version of its kind's contract
    that it was written for. A subclass does not inherit the statement.
    """

    contract: ClassVar[int]

    class Options(typed.Options):
        """No options; override with a subclass of `hardpoint.plugins.Options`."""

    def __init__(self, context: Context[Component]) -> None:
        """Keep the context; `self.name` and `self.options` are short for its fields."""
        self.context = context
        self.name = context.name
        self.options = context.options

    def close(self) -> None:  # noqa: B027 - optional on purpose
        """Release what the component holds; called once, when its process closes."""
