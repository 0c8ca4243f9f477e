"""The commands of the `hardpoint` program, as plugins add them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hardpoint.errors import PluginConflictError, PluginContractError
from hardpoint.host.registry.discovery import SelectedPlugin, discover
from hardpoint.host.registry.hooks import HookSet
from hardpoint.host.registry.loading import check_component, import_object
from hardpoint.host.registry.plugin_options import option_path, options_of
from hardpoint.host.registry.selection import Selection
from hardpoint.plugins import Command, EngineConfig
from hardpoint.plugins.component import Source
from hardpoint.plugins.config import ConfigSources

_COMMAND_NAME = re.compile(r"[A-Za-z0-9][\w-]*")


@dataclass(frozen=True)
class OwnedCommand:
    """A command and the plugin that adds it."""

    command: Command
    source: Source


OwnedCommands = dict[str, OwnedCommand]


def collect_commands(config: EngineConfig, config_sources: ConfigSources) -> OwnedCommands:
    """Ask each plugin of kind `hooks` for commands; other plugins are not imported.

    Raises:
        PluginError: a plugin's hook is at fault, or two plugins add one command.
    """
    commands: OwnedCommands = {}
    for chosen in Selection(config, config_sources, discover(config.plugins.foreign_groups)).run():
        if chosen.kind.interface is not None:
            continue
        for command in _commands_of(chosen, config, config_sources):
            if other := commands.get(command.name):
                raise PluginConflictError(
                    f"two plugins add the command {command.name!r}: "
                    f"{other.source} and {chosen.source}"
                )
            commands[command.name] = OwnedCommand(command, chosen.source)
    return commands


def _commands_of(
    chosen: SelectedPlugin, config: EngineConfig, config_sources: ConfigSources
) -> list[Command]:
    target = chosen.target if chosen.target is not None else import_object(chosen.source)
    check_component(target, chosen.kind, chosen.source)
    path = option_path(config, chosen)
    options = options_of(chosen, target, path, config, config_sources)
    hooks = HookSet()
    hooks.add(target, chosen.source, options)
    commands: list[Command] = []
    for result in hooks.call("cli_commands"):
        if not isinstance(result, Sequence) or not all(isinstance(c, Command) for c in result):
            raise PluginContractError(
                f"{chosen.source}: its hook cli_commands must return a list of "
                f"hardpoint.plugins.Command, got {result!r}"
            )
        for command in result:
            _check_command(command, chosen.source)
        commands += result
    return commands


def _check_command(command: Command, source: Source) -> None:
    for field, value in (("name", command.name), ("summary", command.summary)):
        if not isinstance(value, str):
            raise PluginContractError(
                f"{source}: the {field} of its command {command.name!r}: expected a string, "
                f"got {type(value).__name__}"
            )
    if not _COMMAND_NAME.fullmatch(command.name):
        raise PluginContractError(
            f"{source}: the name of its command: expected a letter or digit, then letters, digits, "
            f"'-' and '_', got {command.name!r}"
        )
