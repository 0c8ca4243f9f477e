"""`hardpoint serve`: an engine behind HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from typing import Any

import msgspec

from hardpoint.plugins import Command, CommandContext, EngineConfig
from hardpoint.plugins.commands import ConfigSources
from hardpoint.plugins.server import AsyncGenerator, ServerConfig
from hardpoint.plugins.typed import convert

_OPTIONS = ("host", "port", "uds", "admin", "root_path", "keys_file")
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
    add("--admin", metavar="ADDRESS", help="unix:PATH or HOST:PORT of the admin routes")
    add("--root-path", metavar="PATH", help="prefix of the paths at a proxy")
    add("--keys-file", metavar="PATH", help="TOML file of the keys that requests need")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    from .serving import bind  # noqa: PLC0415 - its libraries take time, and only `serve` needs them

    config, sources = _config(options, *context.load_config())
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(contextlib.closing(bind(config.server)))
        engine = context.open_async(config, sources, config.server.restart)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(engine, context, bound))


async def _serve(engine: AsyncGenerator, context: CommandContext, bound: Any) -> int:
    from .assembly import assemble  # noqa: PLC0415 - as above
    from .serving import Serving  # noqa: PLC0415

    try:
        host, port = bound.getsockname()[:2]
        applications = assemble(engine, context.version, bound=host)
        if not context.quiet:
            print(f"Serving {applications.service.names[0]} at http://{host}:{port}", flush=True)
        return await Serving(applications, [bound]).run()
    finally:
        await engine.aclose()


def _config(
    options: argparse.Namespace, config: EngineConfig, sources: ConfigSources
) -> tuple[EngineConfig, ConfigSources]:
    """Return the configuration with the options of the command line."""
    given = {
        name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None
    }
    table = msgspec.structs.replace(config.server, **given)
    by_path = {**sources.by_path, **{f"server.{name}": "the command line" for name in given}}
    model = options.served_model or config.model
    if options.served_model is not None:
        by_path["model"] = "the command line"
    changes: dict[str, Any] = {"server": _checked(table), "model": model}
    if sources.of("stats.sinks") == "default":
        changes["stats"] = msgspec.structs.replace(config.stats, sinks=["prometheus"])
    if table.served_names and config.metrics.model_name is None:
        changes["metrics"] = msgspec.structs.replace(
            config.metrics, model_name=table.served_names[0]
        )
    return msgspec.structs.replace(config, **changes), ConfigSources(by_path)


def _checked(table: ServerConfig) -> ServerConfig:
    return convert(table, ServerConfig, path="server")


def _loop_factory() -> Any:
    try:
        import uvloop  # noqa: PLC0415 - not for every system
    except ImportError:
        return None
    return uvloop.new_event_loop


COMMAND = Command(
    name="serve",
    summary="serve a model over HTTP, with OpenAI's API",
    configure=_configure,
    run=_run,
)
