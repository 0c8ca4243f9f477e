"""The HTTP server, as a plugin of kind `hooks` that adds the command `serve`."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import Command, hookimpl

from .command import COMMAND

contract = 1


@hookimpl
def cli_commands() -> Sequence[Command]:
    """Return `serve`."""
    return [COMMAND]
