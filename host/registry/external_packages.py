"""Packages of this project that are installed on their own, for messages about missing plugins."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExternalPackage:
    """A package outside of the distribution `hardpoint`.

    Attributes:
        distribution: its name.
        folder: its path in a clone of the repository.
        components: `kind/name` of its plugins.
        modules: top-level modules of other engines whose classes it adapts.
    """

    distribution: str
    folder: str
    components: tuple[str, ...]
    modules: tuple[str, ...] = ()

    @property
    def install_hint(self) -> str:
        """How to install and enable it, as the end of a message."""
        names = ", ".join(f'"{component.partition("/")[2]}"' for component in self.components)
        return (
            f"install the package {self.distribution} (pip install ./{self.folder} in a clone of "
            f"Hardpoint's repository) and add {names} to plugins.enable"
        )


EXTERNAL_PACKAGES = (
    ExternalPackage("hardpoint-xgrammar", "examples/hardpoint_xgrammar", ("grammars/xgrammar",)),
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
