"""The taps of a request: which they are, with which arguments, and where they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from hardpoint.errors import PluginFaultError
from hardpoint.plugins import (
    ActivationTap,
    EngineCoreRequest,
    FrontendHalf,
    ReasoningMarkers,
    RequestError,
    TapSite,
)
from hardpoint.plugins.model import ModelConfig
from hardpoint.typed import prepared_type

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.components import ComponentFactory

KIND = "activation_taps"


@dataclass(frozen=True)
class NamedTap:
    """A tap that a request names.

    Attributes:
        name: name of the component.
        cls: class of the component.
    """

    name: str
    cls: type[ActivationTap]

    @property
    def reads(self) -> bool:
        """Whether it gives numbers to the caller."""
        return self.cls.read is not ActivationTap.read

    @property
    def writes(self) -> bool:
        """Whether it changes hidden states, or which layers compute them."""
        is_plain = self.cls.change is ActivationTap.change
        return not is_plain or self.cls.exits is not ActivationTap.exits


@dataclass(frozen=True)
class Tap(NamedTap):
    """A tap that a request uses.

    Attributes:
        arguments: the arguments of the request.
        sites: where it is called for the request.
    """

    arguments: Any
    sites: Sequence[TapSite]


class Taps:
    """Finds the taps of requests."""

    def __init__(self, components: ComponentFactory, model_config: ModelConfig | None) -> None:
        """Look taps up in `components`; `model_config` has the number of layers."""
        self.components = components
        self._num_layers = None if model_config is None else _num_layers(model_config.hf)

    def named(self, arguments: Mapping[str, Any]) -> list[NamedTap]:
        """Return the taps that `plugin_args` name, in their order."""
        enabled = self.components.enabled(KIND) if arguments else ()
        names = [name for name in enabled if name in arguments or f"{KIND}/{name}" in arguments]
        find = self.components.find
        return [NamedTap(name, cast(type[ActivationTap], find(KIND, name))) for name in names]

    def are_used(self, request: EngineCoreRequest) -> bool:
        """Return whether a request has arguments for a tap."""
        arguments = request.plugin_args
        return bool(arguments) and any(
            f"{KIND}/{name}" in arguments for name in self.components.enabled(KIND)
        )

    def of(self, request: EngineCoreRequest) -> list[Tap]:
        """Return the taps of a request, in their order.

        Raises:
            RequestError: one is to be called where the model has no layer, or names no place.
        """
        arguments_by_key = {
            key: value for key, value in request.plugin_args.items() if key.startswith(KIND)
        }
        taps = []
        for tap in self.named(arguments_by_key):
            type_ = prepared_type(tap.cls)
            arguments = msgspec.convert(arguments_by_key[f"{KIND}/{tap.name}"], type_)
            try:
                sites = self.components.call(KIND, tap.name, "sites", arguments)
            except PluginFaultError as fault:
                raise RequestError(str(fault)) from fault
            self._check(tap.name, sites)
            taps.append(Tap(tap.name, tap.cls, arguments, sites))
        return taps

    def _check(self, name: str, sites: Sequence[TapSite]) -> None:
        for site in sites:
            if self._num_layers is not None and site.layer >= self._num_layers:
                raise RequestError(
                    f"plugin_args.{name}: expected layers in 0..{self._num_layers - 1}, which the "
                    f"model has, got {site.layer}"
                )


class TappedRequests(FrontendHalf):
    """Checks requests with taps, and includes the readings in their outputs."""

    for_parameters = ("plugin_args",)

    def __init__(self, part: str, taps: Taps) -> None:
        self._part, self._taps = part, taps

    def prepare(
        self,
        request: EngineCoreRequest,
        reasoning: ReasoningMarkers | None,  # noqa: ARG002
    ) -> None:
        """Complete a request that names taps which read; the engine checks arguments and sites.

        Raises:
            RequestError: the request pools.
        """
        named = self._taps.named(request.params.plugin_args)
        if not named:
            return
        if request.pooling_params is not None:
            raise RequestError(
                f"plugin_args.{named[0].name}: expected none, because the request pools, and "
                f"{KIND} are for requests that generate"
            )
        changed: dict[str, Any] = {}
        reading = [tap for tap in named if tap.reads]
        if reading and self._part not in (include := request.params.include):
            changed["include"] = [*include, self._part]
        if any(tap.cls.needs_all for tap in reading):
            changed["skip_reading_prefix_cache"] = True
        if changed:
            request.params = msgspec.structs.replace(request.params, **changed)


def _num_layers(hf: Mapping[str, Any]) -> int | None:
    text = hf.get("text_config")
    for config in (text if isinstance(text, Mapping) else {}, hf):
        if type(count := config.get("num_hidden_layers")) is int:
            return count
    return None
