"""Modules and names that moved out of the contract; old import paths work until version 0.3.

`hardpoint.plugins` registers them, since authors import them directly:
`from hardpoint.plugins.errors import PluginError` warns, and names the new module.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_SERVER = "hardpoint.builtin_plugins.server.config"

MOVED = {
    "describing": ("hardpoint.typed.describing",),
    "errors": ("hardpoint.errors",),
    "hf_config": ("hardpoint.toolkit.hf_config",),
    "kinds": ("hardpoint.registry.kinds",),
    "mlp": ("hardpoint.toolkit.layers",),
    "models": ("hardpoint.toolkit.layers", "hardpoint.toolkit.hf_config"),
    "msgspec_errors": ("hardpoint.typed.msgspec_errors",),
    "output_format": ("hardpoint.toolkit.parsing.format_parser",),
    "output_json": ("hardpoint.toolkit.parsing.json_text",),
    "read_only": ("hardpoint.typed.read_only",),
    "rotary": ("hardpoint.toolkit.layers",),
    "server_config": (_SERVER,),
    "typed": ("hardpoint.typed",),
    "worker_calls": ("hardpoint.toolkit.workers.calls",),
}
"""By old name in `hardpoint.plugins`: the modules that have its names now."""

MOVED_NAMES = {
    "config": {
        **dict.fromkeys(("ServerConfig", "ServerLimits"), _SERVER),
        "PluginUse": "hardpoint.plugins.config_tables",
    },
    "server": dict.fromkeys(("ServerConfig", "ServerLimits"), _SERVER),
    "model": {
        "AttentionBackend": "hardpoint.plugins.attention",
        "AttentionContext": "hardpoint.plugins.attention",
        "LoaderContext": "hardpoint.plugins.loader",
        "ModelFiles": "hardpoint.plugins.loader",
        "WeightFormat": "hardpoint.plugins.loader",
        "WeightLoader": "hardpoint.plugins.loader",
    },
    "": {
        "ServerConfig": _SERVER,
        "is_replayable": "hardpoint.plugins.component",
    },
    "executor": {
        "are_out_of_step": "hardpoint.toolkit.workers.joining",
        "failed_rank": "hardpoint.toolkit.workers.joining",
        "first_error_or": "hardpoint.toolkit.workers.joining",
        "is_joint": "hardpoint.toolkit.workers.joining",
        "join_outputs": "hardpoint.toolkit.workers.joining",
        "results_of": "hardpoint.toolkit.workers.joining",
        "worker_method": "hardpoint.toolkit.workers.joining",
    },
}
"""By module of `hardpoint.plugins`, "" for itself: names that left it, and their modules now."""


class _MovedModule(ModuleType):
    """A module whose names are elsewhere; reading one warns."""

    def __getattr__(self, name: str) -> Any:
        """Return a name of the new module.

        Raises:
            AttributeError: it has no such name.
        """
        targets = MOVED[self.__name__.rpartition(".")[2]]
        # Names with two underscores are of the import system and of inspection.
        return _forwarded(self.__name__, name, () if name.startswith("__") else targets)


class _NamesMoved:
    """The `__getattr__` of a module that stays; reading a name that left it warns."""

    def __init__(self, module: str, targets: Mapping[str, str]) -> None:
        """Forward the names of a module, by its full name, to their modules."""
        self._module = module
        self._targets = targets

    def __call__(self, name: str) -> Any:
        """Return a name of another module.

        Raises:
            AttributeError: it is not a name that moved.
        """
        targets = (self._targets[name],) if name in self._targets else ()
        return _forwarded(self._module, name, targets)


def _forwarded(old: str, name: str, targets: tuple[str, ...]) -> Any:
    """Return a name of the first module that has it, and warn the caller's caller.

    Args:
        old: full name of the module that was asked.
        name: name in it.
        targets: full names of the modules that may have it now.

    Raises:
        AttributeError: none has it.
    """
    for target in targets:
        module = importlib.import_module(target)
        if hasattr(module, name):
            warnings.warn(
                f"{old}.{name} moved to {target}.{name}; the old path works until hardpoint 0.3",
                DeprecationWarning,
                stacklevel=3,
            )
            return getattr(module, name)
    raise AttributeError(f"module {old!r} has no attribute {name!r}")


def register(package: str) -> None:
    """Register the old modules of a package, where nothing has yet, and the names that moved."""
    for name in MOVED:
        old = _MovedModule(f"{package}.{name}", "Moved; see hardpoint.plugins.moved.")
        sys.modules.setdefault(old.__name__, old)
        setattr(sys.modules[package], name, sys.modules[old.__name__])
    for name, targets in MOVED_NAMES.items():
        module = importlib.import_module(f"{package}.{name}" if name else package)
        # Not in its source: type checkers would take the module to have every name.
        vars(module)["__getattr__"] = _NamesMoved(module.__name__, targets)
