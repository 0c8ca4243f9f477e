"""The components that take arguments of requests, and one request's arguments for one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hardpoint import typed
from hardpoint.host.registry.blame import faults_as
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.registry.request_arguments import (
    argument_key,
    convert_arguments,
    prepares,
    takes_arguments,
)
from hardpoint.plugins import RequestError, SamplingParams
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.plugins.text.arguments import ComponentWithArguments
from hardpoint.typed import prepared_type

DEFAULTS = SamplingParams()
LOGITS = "logits_processors"


class Given(NamedTuple):
    """The arguments that a request gives for a component, and their path."""

    path: str
    value: Any


@dataclass(frozen=True)
class ArgumentTaker:
    """A component that takes arguments.

    Attributes:
        key: key of its arguments in `EngineCoreRequest.plugin_args`.
        fields: fields of SamplingParams that are its own.
        uses: whether requests without arguments use it; None if the class decides by request. Of a
            component that every request uses: whether its `prepare` makes arguments for them.
    """

    entry: PluginEntry
    cls: Any
    options: Any
    key: str
    fields: frozenset[str]
    uses: bool | None

    @cached_property
    def source(self) -> Source:
        """Identity of the component, for messages."""
        return self.entry.source

    @property
    def is_processor(self) -> bool:
        """Whether it is a logits processor."""
        return self.entry.kind == LOGITS

    def is_asked_for(self, params: SamplingParams) -> bool:
        """Return whether its class decides that a request without arguments uses it.

        Raises:
            RequestError: the class failed.
        """
        with faults_as(RequestError, f"{self.source}: its uses"):
            return bool(self.cls.uses(params))

    def arguments(self, params: SamplingParams, given: Given | None) -> tuple[typed.Arguments, str]:
        """Return the checked arguments of a request that uses it, and where they stand.

        Raises:
            RequestError: they are wrong, or given twice.
        """
        fields = self.set_fields(params)
        if given is not None:
            if fields and params.plugin_args:
                raise RequestError(f"{given.path}: given twice, here and by {', '.join(fields)}")
            value, path, place = given.value, given.path, given.path
        elif fields:
            own = self.cls.Arguments.__struct_fields__
            value, path = {name: fields[name] for name in fields if name in own}, ""
            place = "/".join(fields)
        else:
            value, path = {}, f"plugin_args.{self.key}"
            place = path
        return convert_arguments(self.source, self.cls.Arguments, value, path), place

    def checked(self, plain: Any) -> typed.Arguments:
        """Return resolved arguments as the component's type.

        Raises:
            RequestError: they are wrong.
        """
        path = f"plugin_args.{self.key}"
        return convert_arguments(self.source, prepared_type(self.cls), plain, path)

    def set_fields(self, params: SamplingParams) -> dict[str, Any]:
        """Return the component's own fields that a request sets."""
        return {
            field: getattr(params, field)
            for field in getattr(self.cls, "params_fields", ())
            if getattr(params, field) != getattr(DEFAULTS, field)
        }


def processor_taker(plugins: PluginSet, entry: PluginEntry) -> ArgumentTaker:
    """Return a logits processor as one that takes arguments."""
    cls: type[LogitsPlugin] = plugins.target(entry)
    default = getattr(cls.uses, "__func__", None) is vars(LogitsPlugin)["uses"].__func__
    return ArgumentTaker(
        entry,
        cls,
        plugins.options(entry),
        argument_key(entry.kind, entry.name),
        frozenset(cls.params_fields),
        cls.uses(DEFAULTS) if default else None,
    )


def takers_of(plugins: PluginSet, entries: Iterable[PluginEntry]) -> list[ArgumentTaker]:
    """Return those components that take arguments, of kinds other than logits processors."""
    targets: list[tuple[PluginEntry, type[ComponentWithArguments]]] = [
        (entry, plugins.target(entry)) for entry in entries
    ]
    return [
        ArgumentTaker(
            entry,
            cls,
            plugins.options(entry),
            argument_key(entry.kind, entry.name),
            frozenset(),
            prepares(cls) and not cls.named_only,
        )
        for entry, cls in targets
        if takes_arguments(cls)
    ]
