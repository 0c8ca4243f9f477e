"""Base of all components: contract version, options and context."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

from hardpoint import typed

_NO_DISTRIBUTION = "no distribution"


@dataclass(frozen=True)
class Source:
    """Identity of a component and the setting that enabled it, for messages.

    Attributes:
        name: under which it is enabled.
        value: `package.module:Qual.Name`, or a module.
        origin: the configuration value that names it, "default" for built-in defaults.
    """

    name: str
    value: str
    distribution: str
    version: str
    origin: str

    @classmethod
    def of_module(cls, name: str, value: str, origin: str) -> Source:
        """Return the source of a component that no installed distribution offers."""
        return cls(name, value, _NO_DISTRIBUTION, "unversioned", origin)

    @property
    def package(self) -> str:
        """Distribution and version; the module if no distribution offers it."""
        if self.distribution == _NO_DISTRIBUTION:
            return f"module {self.value.partition(':')[0]}"
        return f"{self.distribution} {self.version}"

    def __str__(self) -> str:
        known = self.distribution != _NO_DISTRIBUTION
        place = f"{self.package}, {self.value}" if known else self.value
        plugin = f"plugin {self.name!r} ({place})"
        return f"{plugin}, asked for by {self.origin}" if self.origin != "default" else plugin


Progress = Callable[[str, int, int], None]
"""Progress callback `(what, done, total)` of long work; `done == total` ends it."""


def no_progress(activity: str, done: int, total: int) -> None:
    """Report no progress."""


ComponentT_co = TypeVar("ComponentT_co", bound="Component", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Context(Generic[ComponentT_co]):
    """Constructor argument of a component. Each kind adds fields; none is ever removed.

    The type parameter is the interface of the components that take it.

    Attributes:
        name: under which the configuration enables the component.
        options: the component's own `Options`, checked.
        source: its identity in messages; None if the context was made by hand.
        creator: the function behind `create`; None if the context was made by hand.
        reason: why another component, which the engine prefers, is not used; empty if there is
            none.
    """

    name: str
    options: Any
    source: Source | None = field(default=None, repr=False, compare=False)
    creator: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)
    reason: str = field(default="", repr=False, compare=False)

    def create(self, use: str) -> ComponentT_co:
        """Build another component of the same kind, which its creator owns and closes.

        It is loaded and checked as any other, and gets this context with its own name and the
        options of its own table, `[plugin.<name>]`.

        Args:
            use: entry-point name or FQCN, one of the results of `Component.wraps`.

        Raises:
            PluginError: it cannot be built, or `wraps` does not return it.
        """
        if self.creator is None:
            raise NotImplementedError(
                f"the context of {self.name!r} was made by hand and builds no component {use!r}; "
                f"pass creator, a function that returns one by its name"
            )
        return cast(ComponentT_co, self.creator(use))


class NoOptions(typed.Options):
    """The options of a component without any."""


MAX_STATE_BYTES = 4096
"""Maximum size of the JSON of `Component.dump_state`."""


class Component(ABC):
    """Base of every interface in the contract.

    Options of its own are a class `Options` in its body, derived from `hardpoint.plugins.Options`;
    with `options: Options` after it, a type checker knows the type of `self.options`.

    A component states `contract = 1`, or 2, in its own class body: the version of its kind's
    contract that it implements. Subclasses do not inherit it.
    """

    contract: ClassVar[int]
    Options: ClassVar[type[typed.Options]] = NoOptions

    def __init__(self, context: Context[Component]) -> None:
        """Store the context; `self.name` and `self.options` are its fields."""
        self.context = context
        self.name = context.name
        self.options = context.options

    @classmethod
    def wraps(cls, options: Any) -> Sequence[str]:  # noqa: ARG003
        """Return the components of its kind that an instance builds with `context.create`.

        They are found and checked at start. `Wrapper` does all that for one component.

        Args:
            options: the component's own `Options`, checked.

        Returns:
            Entry-point names or FQCNs.
        """
        return ()

    def dump_state(self) -> Mapping[str, Any]:
        """Return the state of the component, for `GET /plugins` and for reports of faults.

        Plain data of a few KB, without secrets and contents of requests; it takes no time. It is
        called between two steps, of a component of the frontend at any time.
        """
        return {}

    def close(self) -> None:  # noqa: B027 - optional on purpose
        """Release resources; called once, when the process closes."""
