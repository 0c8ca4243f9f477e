"""Options of the engines that Ray Serve runs: their number and resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import ConfigError
from hardpoint.typed import convert

Seconds = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class RayServeOptions(plugins.Options):
    """Options of the two deployments.

    Attributes:
        name: name of the application; its route prefix is the server's `root_path`.
        min_engines: engines that run however little there is to do.
        max_engines: the most engines; as many as `min_engines` are never scaled.
        waiting_seconds: prompt work that may wait for each engine, in seconds of its own work;
            where more waits, engines are added, and where less, removed.
        scale_up_seconds: how long more must wait before engines are added.
        scale_down_seconds: how long less must wait before engines are removed.
        look_back_seconds: how long what waits is averaged.
        drain_seconds: how long requests may run on at an engine that is removed; those that are
            left go on at others, with the same tokens.
        engine_cpus, engine_gpus: what an engine reserves of a node.
        engine_resources: resources of the cluster's own kinds that it reserves.
        ingress_cpus: what the HTTP application reserves.
        ingress_resources: as `engine_resources`.
        health_seconds: how often Serve asks each replica for its health.
        runtime_env: runtime environment of both, as Ray has it.
    """

    name: Annotated[str, Meta(min_length=1)] = "hardpoint"
    min_engines: Annotated[int, Meta(ge=1)] = 1
    max_engines: Annotated[int, Meta(ge=1)] = 1
    waiting_seconds: Seconds = 2.0
    scale_up_seconds: NotNegative = 10.0
    scale_down_seconds: NotNegative = 300.0
    look_back_seconds: Seconds = 10.0
    drain_seconds: Seconds = 60.0
    engine_cpus: NotNegative = 1.0
    engine_gpus: NotNegative = 0.0
    engine_resources: dict[str, Annotated[float, Meta(gt=0)]] = {}
    ingress_cpus: NotNegative = 1.0
    ingress_resources: dict[str, Annotated[float, Meta(gt=0)]] = {}
    health_seconds: Seconds = 5.0
    runtime_env: dict[str, Any] = {}


def options_of(arguments: Mapping[str, Any], origin: str) -> RayServeOptions:
    """Return options that are given as data, or as text.

    Args:
        arguments: by name.
        origin: what they are called in messages.

    Raises:
        ConfigError: one is unknown or wrong.
    """
    values = {name: _value(value) for name, value in arguments.items()}
    options = convert(values, RayServeOptions, path=origin)
    if options.max_engines < options.min_engines:
        raise ConfigError(
            f"{origin}.max_engines: expected {options.min_engines} or more, as min_engines, got "
            f"{options.max_engines}"
        )
    return options


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
