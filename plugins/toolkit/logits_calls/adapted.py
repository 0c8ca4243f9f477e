"""Base of logits processors that run an external one: its options, arguments and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hardpoint import typed
from hardpoint.plugins.component import AdaptedComponent, Source
from hardpoint.plugins.params import SamplingParams
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.plugins.sampling.phases import Phase


@dataclass(frozen=True)
class ExternalProcessor:
    """The class, function or object of another engine that an adapted processor runs.

    Attributes:
        target: the imported class, function or object.
        source: name, distribution and origin, for messages.
    """

    target: Any
    source: Source

    @property
    def name(self) -> str:
        """The name under which it is enabled."""
        return self.source.name


class AdapterOptions(typed.Options):
    """Options of every adapted processor.

    Attributes:
        every_request: whether requests use it without naming it under `plugin_args`.
        phase: the phase in which it runs; the default depends on the external form.
    """

    every_request: bool = False
    phase: Literal["mask", "bias", "penalty", "temperature", "truncate", "force"] | None = None


class AdaptedProcessor(AdaptedComponent, LogitsPlugin):
    """Base of the logits processors that run an external one.

    Attributes:
        external: the processor that it runs.
        every_request: as the option.
    """

    external: ClassVar[ExternalProcessor]
    every_request: ClassVar[bool] = False

    class Options(AdapterOptions):
        """Options that every adapted processor has."""

    @classmethod
    def of(cls, external: ExternalProcessor, **attributes: Any) -> type[AdaptedProcessor]:
        """Return the component that runs an external processor."""
        described = {"external": external, "__doc__": inspect.getdoc(external.target)}
        return cls._derived(described | attributes)

    @classmethod
    def configured(cls, options: Any) -> type[AdaptedProcessor]:
        """Return the component with options applied.

        Raises:
            ConfigError: the options do not fit the external processor.
        """
        phase = cls.phase if options.phase is None else Phase[options.phase.upper()]
        return cls._derived(
            {"every_request": options.every_request, "phase": phase, "__doc__": cls.__doc__}
        )

    @classmethod
    def uses(cls, params: SamplingParams) -> bool:  # noqa: ARG003
        """Return whether requests use it without naming it."""
        return cls.every_request

    @classmethod
    def _derived(cls, attributes: Mapping[str, Any]) -> type[AdaptedProcessor]:
        return type(
            cls.__name__, (cls,), {"contract": 1, "__module__": cls.__module__, **attributes}
        )


def parameter_names(call: Callable[..., Any]) -> list[str]:
    """Return the names of a callable's parameters, which must all be plain positional ones.

    Raises:
        TypeError: one is variadic, has a default or is keyword-only, or there is no signature.
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:
        raise TypeError(f"{_name(call)}: its signature cannot be read by inspect") from None
    for parameter in parameters:
        wrong = None
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            wrong = "is variadic"
        elif parameter.kind is parameter.KEYWORD_ONLY:
            wrong = "is keyword-only"
        elif parameter.default is not parameter.empty:
            wrong = "has a default"
        if wrong:
            raise TypeError(f"{signature_text(call)}: {parameter.name!r} {wrong}")
    return [parameter.name for parameter in parameters]


def signature_text(call: Callable[..., Any]) -> str:
    """Return a callable's name and parameters, as `cut(ids, logits, scale=1.0)`."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:
        return f"{_name(call)}(?)"
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return f"{_name(call)}{inspect.Signature(plain)}"


def _name(call: Any) -> str:
    return str(getattr(call, "__name__", type(call).__name__))
