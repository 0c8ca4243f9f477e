"""What all adapters share: who stands behind one, its options and arguments, the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hardpoint.plugins import typed
from hardpoint.plugins.logits import LogitsPlugin, Phase
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.params import SamplingParams


@dataclass(frozen=True)
class Foreign:
    """What an adapter stands for.

    Attributes:
        target: the imported class, function or object.
        source: who it is, for messages.
    """

    target: Any
    source: Source

    @property
    def name(self) -> str:
        """The name under which it is on."""
        return self.source.name


class ForeignOptions(typed.Options):
    """Options of every adapter.

    Attributes:
        every_request: requests use it also without naming it under `plugin_args`.
        phase: when it runs; none is the adapter's own choice.
    """

    every_request: bool = False
    phase: Literal["mask", "bias", "penalty", "temperature", "truncate", "force"] | None = None


class ForeignArguments(typed.Arguments):
    """Arguments of one request.

    Attributes:
        extra_args: what the foreign code reads as `params.extra_args`.
    """

    extra_args: dict[str, Any] = {}


class Adapter(LogitsPlugin):
    """A component made for something foreign.

    Attributes:
        adapter: its name, for people.
        foreign: what it stands for.
        every_request: as the option.
    """

    adapter: ClassVar[str]
    foreign: ClassVar[Foreign]
    every_request: ClassVar[bool] = False

    class Options(ForeignOptions):
        """Options that every adapter has."""

    @classmethod
    def of(cls, foreign: Foreign, **attributes: Any) -> type[Adapter]:
        """Return the component for something foreign."""
        described = {"foreign": foreign, "__doc__": inspect.getdoc(foreign.target)}
        return cls._derived(described | attributes)

    @classmethod
    def configured(cls, options: Any) -> type[Adapter]:
        """Return the component as its operator wants it.

        Raises:
            ConfigError: the options do not fit what it stands for.
        """
        phase = cls.phase if options.phase is None else Phase[options.phase.upper()]
        return cls._derived(
            {"every_request": options.every_request, "phase": phase, "__doc__": cls.__doc__}
        )

    @classmethod
    def uses(cls, params: SamplingParams) -> bool:  # noqa: ARG003
        """Whether requests use it unasked."""
        return cls.every_request

    @classmethod
    def _derived(cls, attributes: Mapping[str, Any]) -> type[Adapter]:
        return type(
            cls.__name__, (cls,), {"contract": 1, "__module__": cls.__module__, **attributes}
        )


class ForeignParams:
    """Sampling parameters as foreign code reads them: ours, and what only others have.

    Attributes:
        extra_args: what the request gave to this plugin; None if that is nothing.
    """

    def __init__(
        self,
        params: SamplingParams,
        extra_args: Mapping[str, Any],
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        """`stop_token_ids` is every token id that ends the request, where that is known."""
        self._params = params
        self.extra_args = dict(extra_args) or None
        if stop_token_ids is not None:
            self.all_stop_token_ids = set(stop_token_ids)

    @property
    def stop(self) -> list[str]:
        """The stop strings, always as a list."""
        return self._params.stop_strings

    def __getattr__(self, name: str) -> Any:
        """Return a field of SamplingParams."""
        if name.startswith("_") or not hasattr(self._params, name):
            raise AttributeError(
                f"these sampling parameters have no {name!r}; arguments of a plugin's own are in "
                f"extra_args"
            )
        return getattr(self._params, name)


def parameter_names(call: Callable[..., Any]) -> list[str]:
    """Return the names of a callable's parameters, all of which must be plain positional ones.

    Raises:
        TypeError: one is variadic, has a default or is keyword-only, or Python cannot tell.
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:
        raise TypeError(f"the parameters of {_name(call)} cannot be told") from None
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
