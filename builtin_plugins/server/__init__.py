"""The HTTP server, as a plugin of kind `hooks` that adds the commands `serve` and `scale`."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import Command, hookimpl

from . import command
from .config import ServerConfig
from .operations import scale_command

contract = 1
config_table = ("server", ServerConfig)


@hookimpl
def cli_commands() -> Sequence[Command]:
    """Return `serve` and `scale`."""
    return [command.COMMAND, scale_command.COMMAND]
