"""Arguments of requests for components: who takes them, their conversion and preparation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from hardpoint import typed
from hardpoint.errors import PluginContractError, PluginFaultError
from hardpoint.plugins import PrepareContext, RequestError, SamplingParams
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.model.attention import AttentionBackend
from hardpoint.plugins.output_parser import OutputParser
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.plugins.sampling.phases import Phase
from hardpoint.plugins.sampling.sampler import Sampler
from hardpoint.plugins.scheduling.policy import SchedulingPolicy
from hardpoint.plugins.step_part import StepPart
from hardpoint.plugins.text.arguments import ComponentWithArguments
from hardpoint.typed import prepared_type

from .blame import faults_as, raise_as, text_of

DEFAULTS = SamplingParams()
LOGITS = "logits_processors"

_NAMED_ONLY = "; or add `named_only = True` to the class: then requests that give arguments use it"
_UNPREPARED = ComponentWithArguments.prepare.__func__  # type: ignore[attr-defined]


def argument_key(kind: str, name: str) -> str:
    """Return the key of a component in `EngineCoreRequest.plugin_args`; no two have the same.

    It is the name of a logits processor, and `kind/name` of any other component.
    """
    return name if kind == LOGITS else f"{kind}/{name}"


def takes_arguments(cls: type[ComponentWithArguments]) -> bool:
    """Return whether a component takes arguments, or prepares some itself."""
    has_own = cls.Arguments is not ComponentWithArguments.Arguments
    return has_own or cls.named_only or prepares(cls)


def prepares(cls: Any) -> bool:
    """Return whether a component has a `prepare` of its own."""
    return bool(cls.prepare.__func__ is not _UNPREPARED)


def skips_greedy(processor: LogitsPlugin | type[LogitsPlugin]) -> bool:
    """Return whether a logits processor does not run for greedy requests."""
    return processor.argmax_invariant or processor.phase is Phase.TEMPERATURE


def check_arguments(target: type[ComponentWithArguments], source: Source) -> None:
    """Check the types of a component's arguments.

    Raises:
        PluginContractError: one does not fit the others, or lacks a default that it needs.
    """
    prepared = getattr(target, "Prepared", target.Arguments)
    if not (inspect.isclass(prepared) and issubclass(prepared, target.Arguments)):
        raise PluginContractError(f"{source}: its Prepared must derive from its Arguments")
    if prepared is not target.Arguments and not prepares(target):
        raise PluginContractError(
            f"{source}: it has Prepared but no prepare that returns it; add prepare"
        )
    always_used = issubclass(target, AttentionBackend | Sampler | SchedulingPolicy | OutputParser)
    if issubclass(target, LogitsPlugin) or (target.named_only and not always_used):
        return
    for field in msgspec.structs.fields(prepared):
        if field.required:
            raise PluginContractError(
                f"{source}: every request uses it, also without arguments, so its "
                f"{prepared.__name__}.{field.name} needs a default"
                f"{_NAMED_ONLY if issubclass(target, StepPart) else ''}"
            )


def convert_arguments(
    source: Source, type_: type[typed.Arguments], values: Any, path: str
) -> typed.Arguments:
    """Return arguments as the type of a component, checked.

    Args:
        type_: its `Arguments` or `Prepared`.
        values: plain data or an instance.
        path: path of the arguments, for messages.

    Raises:
        RequestError: they do not fit, or the component's own check failed.
    """
    try:
        return typed.convert(values, type_, path=path, error=RequestError, str_keys=True)
    except BaseException as cause:
        raise_as(RequestError, f"{source}: its Arguments", cause, (RequestError,))


def prepare_arguments(
    source: Source, cls: Any, arguments: typed.Arguments, context: PrepareContext, path: str
) -> typed.Arguments:
    """Return the result of a component's `prepare` for a request's arguments.

    Args:
        arguments: converted.
        path: path of the arguments, for messages.

    Raises:
        RequestError: it refused the request, failed, or returned something else.
        PluginFaultError: a component that it called failed.
    """
    try:
        prepared: typed.Arguments = cls.prepare(arguments, context)
    except (RequestError, PluginFaultError):  # of the tokenizer, for example
        raise
    except ValueError as error:
        raise RequestError(f"{path}: {text_of(error)}") from error
    except BaseException as cause:
        raise_as(RequestError, f"{source}: its prepare", cause)
    expected: type[typed.Arguments] = prepared_type(cls)
    if not isinstance(prepared, expected):
        raise RequestError(
            f"{source}: its prepare returned {type(prepared).__name__}, "
            f"expected its {expected.__name__}"
        )
    return prepared


def given_fields(type_: type[typed.Arguments], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of prepared arguments that a caller may have given.

    Args:
        type_: the `Arguments` of the component.
        plain: as they travel, without fields that only `prepare` fills, and without defaults.
    """
    fields = msgspec.structs.fields(type_)
    return {
        field.name: plain[field.name]
        for field in fields
        if field.name in plain and plain[field.name] != _plain_default(field)
    }


def _plain_default(field: msgspec.structs.FieldInfo) -> Any:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return default if default is msgspec.NODEFAULT else msgspec.to_builtins(default, str_keys=False)


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
        skips_greedy: whether greedy requests use it only if they name it in `plugin_args`.
    """

    entry: PluginEntry
    cls: Any
    options: Any
    key: str
    fields: frozenset[str]
    uses: bool | None
    skips_greedy: bool = False

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

    def arguments(self, params: SamplingParams, args: Given | None) -> tuple[typed.Arguments, str]:
        """Return the checked arguments of a request that uses it, and where they stand.

        Raises:
            RequestError: they are wrong, or given twice.
        """
        fields = self.set_fields(params)
        if args is not None:
            if fields and params.plugin_args:
                raise RequestError(f"{args.path}: given twice, here and by {', '.join(fields)}")
            value, path, place = args.value, args.path, args.path
        elif fields:
            names = self.cls.Arguments.__struct_fields__
            value, path = {name: fields[name] for name in fields if name in names}, ""
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
