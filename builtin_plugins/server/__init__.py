"""The HTTP server, as a plugin of kind `hooks` that adds the command `serve`."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import Command, hookimpl

from .command import COMMAND
from .config import ServerConfig

contract = 1
config_table = ("server", ServerConfig)


@hookimpl
def cli_commands() -> Sequence[Command]:
    """Return `serve`."""
    return [COMMAND]
