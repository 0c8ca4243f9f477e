"""The module paths of vLLM with names that this package has."""

from __future__ import annotations

import difflib
import importlib.abc
import importlib.machinery
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from .names import COUNTERPARTS
from .names import PATHS as PATHS

PACKAGE = "hardpoint.vllm"


def names_of(path: str) -> dict[str, str]:
    """Return the names that a module of vLLM has here, each with the module that defines it."""
    modules = PATHS.get(path, {})
    return {name: module for module, names in modules.items() for name in names}


class _Loader(importlib.abc.Loader):
    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        del spec  # a plain module will do
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self._path == "envs":
            from . import environment  # noqa: PLC0415

            module.__getattr__ = environment.value_of  # type: ignore[method-assign]
            vars(module)["is_set"] = environment.is_set
            vars(module)["environment_variables"] = environment.READERS
            return
        sources = names_of(self._path)
        others = _plugin_modules().get(f"vllm.{self._path}", {})
        vars(module).update({name: value for name, value in others.items() if name not in sources})

        def get(name: str) -> Any:
            if (source := sources.get(name)) is not None:
                return getattr(import_module(f"{PACKAGE}.{source}".rstrip(".")), name)
            if has_module(path := f"{self._path}.{name}"):
                return import_module(f"{PACKAGE}.{path}")
            raise AttributeError(missing(path))

        module.__getattr__ = get  # type: ignore[method-assign]
        module.__all__ = [*sources, *others]  # type: ignore[attr-defined]


class PathFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `PATHS`; the error of others names the nearest thing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of vLLM's path.

        `from MODULE import NAME` looks for a module of that name, too. The error has no `name`,
        because Python drops an error with that module's name for its own, shorter one.

        Raises:
            ModuleNotFoundError: vLLM may have it, and this package does not.
        """
        del path, target  # the name is enough
        prefix = PACKAGE + "."
        if not fullname.startswith(prefix):
            return None
        name = fullname.removeprefix(prefix)
        if not has_module(name):
            if name.rpartition(".")[2].startswith("__"):
                return None
            raise ModuleNotFoundError(missing(name))
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(name), is_package=True)
        spec.submodule_search_locations = []
        return spec


def has_module(path: str) -> bool:
    """Return whether a module of vLLM's path is here: a file, or made of the tables."""
    if path in PATHS or f"vllm.{path}" in _plugin_modules():
        return True
    return path in ("inputs", "outputs")


def _plugin_modules() -> Mapping[str, Mapping[str, Any]]:
    """Return the names that modules of vLLM have for authors of plugins, by module."""
    from hardpoint_vllm.stand_ins import MODULES  # noqa: PLC0415

    return MODULES


def missing(name: str) -> str:
    """Return the error for a name of vLLM that is not here, with the nearest thing."""
    return f"hardpoint.vllm has no counterpart of vllm.{name} ({_nearest(name)})"


def _nearest(name: str) -> str:
    """Return the counterpart: the name in another module, a similar name, or a page."""
    parent, _, last = name.rpartition(".")
    homes = [path for path in PATHS if last in names_of(path)]
    if homes and not any(f".{path}".endswith(f".{last}") for path in PATHS):
        return f"{last} is in {f'{PACKAGE}.{homes[0]}'.rstrip('.')}"
    near = difflib.get_close_matches(last[:64], names_of(parent), 1, 0.88)
    starts = [path for path in COUNTERPARTS if f"{name}.".startswith(f"{path}.")]
    hint = COUNTERPARTS[max(starts, key=len)] if starts else "docs/migrate-from-vllm.md"
    return f"did you mean {near[0]}? {hint}" if near else hint
