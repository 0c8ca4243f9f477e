"""Modules that moved out of the contract; their old import paths work until version 0.3.

`hardpoint.plugins` registers them, since authors import them directly:
`from hardpoint.plugins.errors import PluginError` warns, and names the new module.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

__all__ = ["MOVED"]

MOVED = {
    "describing": ("hardpoint.typed.describing",),
    "errors": ("hardpoint.errors",),
    "hf_config": ("hardpoint.toolkit.hf_config",),
    "mlp": ("hardpoint.toolkit.layers",),
    "models": ("hardpoint.toolkit.layers", "hardpoint.toolkit.hf_config"),
    "msgspec_errors": ("hardpoint.typed.msgspec_errors",),
    "output_format": ("hardpoint.toolkit.parsing.format_parser",),
    "output_json": ("hardpoint.toolkit.parsing.json_text",),
    "read_only": ("hardpoint.typed.read_only",),
    "rotary": ("hardpoint.toolkit.layers",),
    "typed": ("hardpoint.typed",),
    "worker_calls": ("hardpoint.toolkit.workers.calls",),
}
"""By old name in `hardpoint.plugins`: the modules that have its names now."""


class _MovedModule(ModuleType):
    """A module whose names are elsewhere; reading one warns."""

    def __getattr__(self, name: str) -> Any:
        """Return a name of the new module.

        Raises:
            AttributeError: it has no such name.
        """
        if name.startswith("__"):  # of the import system and of inspection
            raise AttributeError(name)
        for target in MOVED[self.__name__.rpartition(".")[2]]:
            module = importlib.import_module(target)
            if hasattr(module, name):
                warnings.warn(
                    f"{self.__name__}.{name} moved to {target}.{name}; the old path works until "
                    f"hardpoint 0.3",
                    DeprecationWarning,
                    stacklevel=2,
                )
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def register(package: str) -> None:
    """Register the old modules of a package, where nothing has yet."""
    for name in MOVED:
        module = _MovedModule(f"{package}.{name}", "Moved; see hardpoint.plugins.moved.")
        sys.modules.setdefault(module.__name__, module)
        setattr(sys.modules[package], name, sys.modules[module.__name__])
