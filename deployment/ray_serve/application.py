"""The application for Ray Serve: an ingress bound to engines."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import msgspec
import ray
from ray import serve as ray_serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from hardpoint.command_plugins import collect_commands
from hardpoint.configuration.loading import load_config
from hardpoint.plugins import ConfigError, EngineConfig, HardpointError
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.server.commands import MakeApplication

from .autoscaling import WaitingPromptWork
from .engine import EngineReplica
from .ingress import Ingress, IngressSettings
from .options import RayServeOptions, options_of
from .router import EngineRouter

_log = logging.getLogger("hardpoint")

_COMMAND = "serve"
"""The command whose application it is."""

_MOST_CALLS = 1_000_000
"""In flight at a replica, for Serve: the limits of engines and of the HTTP application hold."""


def app(args: Mapping[str, Any]) -> ray_serve.Application:
    """Return an application, as `serve run hardpoint.ray_serve:app NAME=VALUE ...` asks for it.

    Args:
        args: `config`, the path of a configuration file; `model`; the rest are RayServeOptions.

    Raises:
        ConfigError: an argument, or the configuration, is wrong.
    """
    options = dict(args)
    path, model = options.pop("config", None), options.pop("model", None)
    config, sources = load_config(path, settings=[], model=model)
    owned = collect_commands(config, sources).get(_COMMAND)
    if owned is None or owned.command.application is None:
        raise ConfigError(
            "plugins: expected the command 'serve', which this application belongs to"
        )
    return bound(config, sources, owned.command.application, options_of(options, "app"))


def bound(
    config: EngineConfig,
    config_sources: ConfigSources,
    application: MakeApplication,
    options: RayServeOptions,
) -> ray_serve.Application:
    """Return the two deployments, bound to each other.

    Raises:
        ConfigError: the configuration sets the number of engines, or where they are, or it has a
            journal.
    """
    if config.parallel.data != 1:
        raise ConfigError(
            "parallel.data: expected 1 on Ray Serve, which runs min_engines to max_engines, "
            f"got {config.parallel.data}"
        )
    for name in ("ray", "join_address", "local"):
        if (value := getattr(config.parallel, name)) is not None:
            raise ConfigError(
                f"parallel.{name}: expected none on Ray Serve, which has all engines, got "
                f"{msgspec.to_builtins(value)!r}"
            )
    if (journal := config.engine.journal) is not None:
        raise ConfigError(
            "engine.journal: expected none on Ray Serve, because engines in its replicas do not "
            f"record, got {journal!r}"
        )
    settings = IngressSettings(
        config=msgspec.to_builtins(config),
        config_sources=dict(config_sources.by_path),
        application=application,
        drain_seconds=options.drain_seconds,
        log_level=logging.getLevelName(_log.getEffectiveLevel()),
    )
    return _ingress(options).bind(_engines(options).bind(), settings)


def _engines(options: RayServeOptions) -> ray_serve.Deployment:
    common = {
        "name": "engines",
        "max_ongoing_requests": _MOST_CALLS,
        "request_router_config": RequestRouterConfig(request_router_class=EngineRouter),
        "health_check_period_s": options.health_seconds,
        "logging_config": LoggingConfig(enable_access_log=False),  # a line per call
        "graceful_shutdown_timeout_s": options.drain_seconds + _MARGIN_S,
        "graceful_shutdown_wait_loop_s": _POLL_S,
        "ray_actor_options": {
            "num_cpus": options.engine_cpus,
            "num_gpus": options.engine_gpus,
            "resources": options.engine_resources,
            "runtime_env": options.runtime_env,
        },
    }
    if options.min_engines == options.max_engines:
        return ray_serve.deployment(EngineReplica).options(
            num_replicas=options.min_engines, **common
        )
    policy = AutoscalingPolicy(
        policy_function=WaitingPromptWork,
        policy_kwargs={"waiting_seconds": options.waiting_seconds},
    )
    scaling = AutoscalingConfig(
        min_replicas=options.min_engines,
        max_replicas=options.max_engines,
        upscale_delay_s=options.scale_up_seconds,
        downscale_delay_s=options.scale_down_seconds,
        look_back_period_s=options.look_back_seconds,
        policy=policy,
    )
    return ray_serve.deployment(EngineReplica).options(autoscaling_config=scaling, **common)


_MARGIN_S = 10.0  # for requests to leave an engine, after the time in which they may run on
_POLL_S = 0.5


def _ingress(options: RayServeOptions) -> ray_serve.Deployment:
    return ray_serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=_MOST_CALLS,
        health_check_period_s=options.health_seconds,
        logging_config=LoggingConfig(enable_access_log=False),  # `server.access_log` has more
        graceful_shutdown_timeout_s=options.drain_seconds + _MARGIN_S,
        ray_actor_options={
            "num_cpus": options.ingress_cpus,
            "resources": options.ingress_resources,
            "runtime_env": options.runtime_env,
        },
    )


def serve(
    config: EngineConfig,
    config_sources: ConfigSources,
    application: MakeApplication,
    ray_options: Mapping[str, Any],
    address: tuple[str, int],
    *,
    announces: bool = True,
) -> int:
    """Serve a model by Ray Serve until SIGINT or SIGTERM; return the exit code.

    Joins the cluster that RAY_ADDRESS names or that runs on this machine; without one, starts one
    here, and ends it as well. However it ends, the application is deleted.

    Args:
        application: makes the ASGI application.
        ray_options: RayServeOptions, by name.
        address: the host and port at which each node with a replica listens.
        announces: whether to print where it serves.

    Raises:
        ConfigError: an option or the configuration is wrong.
        HardpointError: Serve cannot start it.
        KeyboardInterrupt: a signal comes before it serves.
    """
    options = options_of(ray_options, "--ray")
    made = bound(config, config_sources, application, options)
    ended = threading.Event()
    ray.init(log_to_driver=announces, configure_logging=False)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(ray.shutdown)
        _on_signals(signal.default_int_handler)  # Ray's own handlers end the program at once
        ran_before = bool(ray_serve.status().proxies)
        if not ran_before:
            cleanup.callback(ray_serve.shutdown)
            ray_serve.start(http_options=dict(zip(("host", "port"), address, strict=True)))
        cleanup.callback(_delete, options.name)
        cleanup.callback(_on_signals, _ignore)
        try:
            ray_serve.run(made, name=options.name, route_prefix="/")
        except RuntimeError as error:  # Serve's only kind, with the reason as text
            raise HardpointError(f"Ray Serve: {error}") from error
        _on_signals(lambda *_: ended.set())
        if announces:
            where = "where Ray Serve of this cluster listens already"
            if not ran_before:
                where = f"at http://{address[0]}:{address[1]}"
            print(f"Serving {config.model} {where}", flush=True)
        ended.wait()
    return 0


def _delete(name: str) -> None:
    """Delete the application, and wait until its requests have ended or another signal comes."""
    ray_serve.delete(name, _blocking=False)  # else for a minute at most, whatever it drains for
    _log.info(
        "Ray Serve deletes the application %r: its requests may run for drain_seconds; another "
        "signal ends this wait",
        name,
    )
    _on_signals(signal.default_int_handler)
    try:
        while name in ray_serve.status().applications:
            time.sleep(_POLL_S)
    finally:
        _on_signals(_ignore)


def _ignore(*_: object) -> None:
    """Handle no signal."""


def _on_signals(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Call a handler for the signals that end the program."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
