"""The built-in commands, as a plugin of kind `hooks`."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import Command, hookimpl

from . import chat, completion, config, embed, generate, models
from .bench import command as bench
from .hub import pull
from .plugins import command as plugins
from .records import journal, trace
from .remote import engine, keys
from .setup import info
from .simulation import calibrate, simulate

contract = 1


@hookimpl
def cli_commands() -> Sequence[Command]:
    """Return the commands of these modules."""
    return [
        generate.COMMAND,
        chat.COMMAND,
        embed.COMMAND,
        trace.COMMAND,
        pull.COMMAND,
        models.COMMAND,
        plugins.COMMAND,
        config.COMMAND,
        info.COMMAND,
        engine.COMMAND,
        keys.COMMAND,
        bench.COMMAND,
        simulate.COMMAND,
        calibrate.COMMAND,
        journal.REPLAY,
        journal.JOURNAL,
        completion.COMMAND,
    ]
