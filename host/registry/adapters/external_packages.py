"""Packages of this project that are installed on their own, for messages about missing plugins."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from hardpoint.plugins.component import Component


@dataclass(frozen=True)
class ExternalPackage:
    """A package outside of the distribution `hardpoint`.

    Attributes:
        distribution: its name.
        folder: its path in a clone of the repository.
        components: `kind/name` of its plugins.
        engine: the other engine with the classes that it adapts.
        module: the top-level module of that engine.
    """

    distribution: str
    folder: str
    components: tuple[str, ...]
    engine: str = ""
    module: str = ""

    @property
    def install_hint(self) -> str:
        """How to install and enable it."""
        names = ", ".join(f'"{component.partition("/")[2]}"' for component in self.components)
        enable = f"add {names} to plugins.enable"
        if _is_installed(self.distribution):
            return f"{enable} ({self.distribution} is installed)"
        return (
            f"install the package {self.distribution} (pip install ./{self.folder} in a clone of "
            f"Hardpoint's repository) and {enable}"
        )


EXTERNAL_PACKAGES = (
    ExternalPackage("hardpoint-xgrammar", "examples/hardpoint_xgrammar", ("grammars/xgrammar",)),
    ExternalPackage(
        "hardpoint-vllm",
        "examples/hardpoint_vllm",
        ("component_adapters/vllm",),
        engine="vLLM",
        module="vllm",
    ),
)


def component_hint(name: str, kind: str | None = None) -> str:
    """Return, as the end of a message, the package with a plugin that is not installed.

    Args:
        name: name of the plugin, or `kind/name`.
        kind: kind of the plugin; None is any kind.
    """
    for package in EXTERNAL_PACKAGES:
        for component in package.components:
            own_kind, _, own_name = component.partition("/")
            if name in (own_name, component) and kind in (None, own_kind):
                return f"; {package.install_hint}"
    return ""


def module_hint(module: str | None) -> str:
    """Return, as the end of a message, the package for code that imports a missing module."""
    for package in EXTERNAL_PACKAGES:
        if module and package.module == module.partition(".")[0]:
            return f"; {_advice(package)}"
    return ""


def object_hint(target: Any, kind: str | None = None) -> str:
    """Return, as the end of a message, the package that may run an object which no plugin runs.

    Args:
        kind: the kind that is needed; None is any.
    """
    bases = target.__mro__ if inspect.isclass(target) else ()
    if Component in bases:
        return ""
    modules = {base.__module__.partition(".")[0] for base in bases}
    names = {name for base in bases[:-1] for name in vars(base)}
    may_be_foreign = bool({"apply", "__call__"} & names) if bases else callable(target)
    for package in EXTERNAL_PACKAGES:
        if package.module and package.module in modules:
            return f"; {_advice(package)}"
        if package.module and may_be_foreign and kind in (None, "logits_processors"):
            return f"; if it is a logits processor for {package.engine}, {package.install_hint}"
    return ""


def _advice(package: ExternalPackage) -> str:
    return (
        f"of {package.engine}'s classes, processors, parsers, stat loggers and connectors run: "
        f"{package.install_hint}; docs/migrate-from-vllm.md names the kinds that replace the others"
    )


def _is_installed(distribution: str) -> bool:
    try:
        importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return False
    return True
