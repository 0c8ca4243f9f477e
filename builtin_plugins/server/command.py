"""`hardpoint serve`: an engine behind HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.plugins import Command, CommandContext, ConfigError, EngineConfig
from hardpoint.plugins.commands import ConfigSources
from hardpoint.plugins.server import AsyncGenerator
from hardpoint.toolkit.reloading import open_watcher
from hardpoint.typed import convert

from .config import ServerConfig

if TYPE_CHECKING:
    from hardpoint.plugins.component.manifest import Manifest
    from hardpoint.toolkit.reloading.reloader import ReplacePlugins
    from hardpoint.toolkit.reloading.watcher import PluginWatcher

    from .access.keys import Stores
    from .operations.addresses import BoundAddress
    from .operations.loop_watch import Outliving
    from .operations.notify import ServiceManager

_SIGNAL_CODE = 128
_MAX_WAITING = 2048
"""Requests that wait in the engine, where the configuration sets no limit."""

_PACED = "hardpoint.simulation:PacedExecutor"

_OPTIONS = ("host", "port", "uds", "workers", "admin", "root_path", "keys_file", "allowed_hosts")
"""Options that are fields of the table `server`."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a model over HTTP, with OpenAI's API: /v1/chat/completions and others. "
        "Everything else is set in the table [server] of the configuration."
    )
    add = parser.add_argument
    add("served_model", nargs="?", metavar="MODEL", help="the same as --model")
    add("--host", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, help="port to listen on; 0 is any (default: 8000)")
    add("--uds", metavar="PATH", help="Unix socket to listen on instead")
    add("--workers", type=int, metavar="N", help="processes that answer requests (default: 1)")
    add("--admin", metavar="ADDRESS", help="unix:PATH or HOST:PORT of the admin routes")
    add(
        "--allowed-hosts",
        metavar="NAME,NAME",
        type=lambda text: [name.strip() for name in text.split(",")],
        help="host names that requests may use, in place of the default ones; * is any",
    )
    add("--root-path", metavar="PATH", help="prefix of the paths at a proxy")
    add("--keys-file", metavar="PATH", help="TOML file of the keys that requests need")
    add(
        "--pace",
        metavar="FILE",
        help="let each step take the time that `hardpoint calibrate` has measured, as with --model "
        "scripted; `calibrated` is calibrated.json",
    )
    add("--reload-plugins", action="store_true", help="replace plugins whose files are saved")
    add("--on", choices=["ray"], help="let Ray Serve run application and engines")
    add(
        "--ray",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of --on ray, such as max_engines=4",
    )
    add(
        "--from-vllm",
        metavar="FLAGS",
        help="print the configuration that flags of `vllm serve` mean, and serve it",
    )
    add(
        "--api-key",
        metavar="KEY",
        help="a key that requests need; better in HARDPOINT_API_KEY, for lists of processes show "
        "options",
    )


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    # Their libraries take time, and only `serve` needs them.
    from .access.keys import single_key, stores_of  # noqa: PLC0415
    from .access.tls import check_tls  # noqa: PLC0415
    from .operations.addresses import bind, bind_admin  # noqa: PLC0415
    from .operations.loop_watch import Outliving  # noqa: PLC0415
    from .operations.notify import ServiceManager  # noqa: PLC0415
    from .serving import loop_factory  # noqa: PLC0415

    manager = ServiceManager.of_environment(os.environ)
    model = {"model": options.served_model} if options.served_model else {}
    loaded = context.load_config(*_settings_of_vllm(options), **model)
    config, sources = _config(options, *loaded)
    settings = config.table(ServerConfig)
    if options.on == "ray":
        if options.reload_plugins:
            raise ConfigError("--reload-plugins: expected a server without --on ray")
        return _serve_on_ray(options, context, config, sources)
    if options.ray:
        raise ConfigError("--ray: expected --on ray as well, for these are options of it")
    if context.quiet:
        settings = msgspec.structs.replace(settings, access_log="off")
        config = msgspec.structs.replace(config, server=settings)
    if options.reload_plugins and settings.workers > 1:
        raise ConfigError(
            f"--reload-plugins: expected one worker (server.workers), got {settings.workers}"
        )
    single = single_key(options.api_key)
    keys = stores_of(settings, single)
    check_tls(settings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        stack.enter_context(_reloaded_by_sighup(keys))
        users = stack.enter_context(contextlib.closing(bind(settings)))
        admin = bind_admin(settings)
        if admin is not None:
            stack.enter_context(contextlib.closing(admin))
        if settings.workers > 1:
            return _run_workers(config, sources, context, users, admin, keys, single, manager)
        watcher = open_watcher() if options.reload_plugins else None
        if watcher is not None:
            stack.callback(watcher.close)
        engine = context.open_async(config, sources, settings.restart)
        outliving = Outliving[int]()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            served = _serve(engine, context, users, admin, keys, outliving, manager, watcher)
            return outliving.run(runner, served)


def _settings_of_vllm(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the settings that flags of `vllm serve` mean, if any, after printing them.

    Raises:
        ConfigError: a flag has no counterpart, or the package is not installed.
    """
    if options.from_vllm is None:
        return ()
    try:
        from hardpoint.vllm.serve import (  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415
            read_flags,
        )
    except ModuleNotFoundError as cause:
        if cause.name not in ("hardpoint.vllm", "hardpoint.vllm.serve"):
            raise
        raise ConfigError(
            "--from-vllm: expected the package hardpoint-vllm to be installed; from a clone: "
            "pip install ./examples/hardpoint_vllm"
        ) from None
    flags = read_flags(options.from_vllm)
    for note in flags.notes:
        print(f"# {note}")
    print(flags.toml, flush=True)
    if options.api_key is None:
        options.api_key = flags.api_key
    return tuple(flags.settings)


def _run_workers(
    config: EngineConfig,
    sources: ConfigSources,
    context: CommandContext,
    users: BoundAddress,
    admin: BoundAddress | None,
    keys: Stores,
    single: str | None,
    manager: ServiceManager,
) -> int:
    from .serving import loop_factory  # noqa: PLC0415 - as above
    from .workers.processes import Supervisor  # noqa: PLC0415

    workers = context.open_workers(config, sources, config.table(ServerConfig).restart)

    async def run() -> int:
        try:
            supervisor = Supervisor(workers, context, users, admin, keys, single, manager)
            return await supervisor.run()
        finally:
            await workers.aclose()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run())


def _serve_on_ray(
    options: argparse.Namespace,
    context: CommandContext,
    config: EngineConfig,
    sources: ConfigSources,
) -> int:
    from .access.keys import single_key  # noqa: PLC0415
    from .operations.on_ray import check_for_ray, named_values  # noqa: PLC0415

    settings = config.table(ServerConfig)
    check_for_ray(settings)
    make = partial(application, key=single_key(options.api_key))
    values = named_values(options.ray)
    return context.serve_on_ray(config, sources, make, values, (settings.host, settings.port))


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    def end(number: int, frame: Any) -> None:  # noqa: ARG001
        raise SystemExit(_SIGNAL_CODE + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _reloaded_by_sighup(keys: Stores) -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, lambda number, frame: keys.reload())  # noqa: ARG005
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


async def _serve(
    engine: AsyncGenerator,
    context: CommandContext,
    users: BoundAddress,
    admin: BoundAddress | None,
    keys: Stores,
    outliving: Outliving[int],
    manager: ServiceManager,
    watcher: PluginWatcher | None,
) -> int:
    from .access.keys import installed  # noqa: PLC0415
    from .assembly import assemble  # noqa: PLC0415 - as above
    from .serving import Serving, announce, begin_outliving  # noqa: PLC0415

    try:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)
        applications = assemble(
            engine,
            context.version,
            bound=users.host,
            authenticators=[] if keys.users is None else [installed(keys.users)],
            admin=admin,
            admin_authenticators=[] if keys.admin is None else [installed(keys.admin)],
        )

        if watcher is not None:
            watcher.start(lambda: engine.plugins.manifest, _replacing(engine))
        task: Any = asyncio.current_task()

        def begin() -> None:
            begin_outliving(outliving, task, engine, applications)
            if not context.quiet:
                announce(applications.service, users, admin)

        return await Serving(applications, users, admin, manager).run(announce=begin)
    finally:
        if watcher is not None:  # a change that it waits for needs the loop
            await asyncio.to_thread(watcher.close)
        await engine.aclose()


def _replacing(engine: AsyncGenerator) -> ReplacePlugins:
    """Return the function with which another thread replaces plugins of an engine."""
    loop = asyncio.get_running_loop()

    def replace(uses: Mapping[str, str], origin: str) -> Manifest:
        change = engine.plugins.change(replace=dict(uses), origin=origin)
        return asyncio.run_coroutine_threadsafe(change, loop).result()

    return replace


def application(engine: AsyncGenerator, version: str, *, key: str | None = None) -> Any:
    """Return the application for users, for somebody else to listen for.

    Args:
        engine: the engine.
        version: version of Hardpoint.
        key: a key that requests need, besides those of `server.keys_file`.

    Raises:
        ConfigError, PluginError: as for `hardpoint serve`.
    """
    from .access.keys import KeyStore, installed  # noqa: PLC0415
    from .assembly import assemble  # noqa: PLC0415

    settings = engine.config.table(ServerConfig)
    path = settings.keys_file
    authenticators = [installed(KeyStore(path, key))] if path or key else []
    made = assemble(engine, version, bound=settings.host, authenticators=authenticators)
    return made.users


def _config(
    options: argparse.Namespace, config: EngineConfig, sources: ConfigSources
) -> tuple[EngineConfig, ConfigSources]:
    settings = {
        name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None
    }
    table = msgspec.structs.replace(config.table(ServerConfig), **settings)
    by_path = {**sources.by_path, **{f"server.{name}": "the command line" for name in settings}}
    changes: dict[str, Any] = {"server": _checked(table)}
    if sources.of("stats.sinks") == "default":
        changes["stats"] = msgspec.structs.replace(config.stats, sinks=["prometheus"])
    if sources.of("scheduler.max_waiting") == "default":
        changes["scheduler"] = msgspec.structs.replace(config.scheduler, max_waiting=_MAX_WAITING)
    if table.served_names and config.metrics.model_name is None:
        changes["metrics"] = msgspec.structs.replace(
            config.metrics, model_name=table.served_names[0]
        )
    if options.pace is not None:
        changes |= _paced(config, options.pace)
        by_path["executor.use"] = "--pace"
    return msgspec.structs.replace(config, **changes), ConfigSources(by_path)


def _paced(config: EngineConfig, file: str) -> dict[str, Any]:
    cost = "calibrated.json" if file == "calibrated" else file
    if not Path(cost).is_file():
        raise ConfigError(
            f"--pace: there is no file {cost!r}; `hardpoint calibrate MODEL --output {cost}` makes "
            "one"
        )
    options = {"cost": str(Path(cost).resolve()), "wraps": config.executor.use}
    return {
        "executor": msgspec.structs.replace(config.executor, use=_PACED),
        "plugin": {**config.plugin, "paced_executor": options},
    }


def _checked(table: ServerConfig) -> ServerConfig:
    return convert(table, ServerConfig, path="server")


COMMAND = Command(
    name="serve",
    summary="serve a model over HTTP, with OpenAI's API",
    configure=_configure,
    run=_run,
    application=application,
)
