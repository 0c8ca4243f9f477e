"""The names of a new package: their rules, and names derived from them."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hardpoint.plugins import RequestError
from hardpoint.typed import Strict

if TYPE_CHECKING:
    from hardpoint.plugins.server.commands import ComponentInfo


_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_LONGEST = 64
_TAKEN = ("hardpoint", "src", "tests")


class PackageSpec(Strict):
    """The table `[tool.hardpoint.template]` of a package's pyproject.toml: inputs of its rendering.

    Attributes:
        version: version of the templates.
        kind: kind of the plugin.
        name: name of the distribution.
    """

    version: int
    kind: str
    name: str

    @property
    def module(self) -> str:
        """Name of the module, and of the plugin."""
        return re.sub(r"[-_.]+", "_", self.name).lower()

    @property
    def class_name(self) -> str:
        """Name of the class."""
        return "".join(part[:1].upper() + part[1:] for part in self.module.split("_"))

    def places(self) -> dict[str, str]:
        """Return the values of the placeholders of a template, by name."""
        return {
            "VERSION": str(self.version),
            "KIND": self.kind,
            "NAME": self.name,
            "MODULE": self.module,
            "CLASS": self.class_name,
        }


def check_kind(kind: str, kinds: Sequence[str]) -> None:
    """Raise if there is no template of a kind."""
    if kind not in kinds:
        raise RequestError(f"KIND: expected one of {', '.join(kinds)}, got {kind!r}")


def check_form(spec: PackageSpec, where: str) -> None:
    """Raise if a name, which comes from `where`, fits no package, module or class."""
    name = spec.name
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise RequestError(
            f"{where}: expected at most {_LONGEST} letters, digits, '-', '_' and '.', the first "
            f"one a letter, the last one a letter or digit, got {name!r}"
        )
    for kind, identifier in (("module", spec.module), ("class", spec.class_name)):
        if keyword.iskeyword(identifier):
            raise RequestError(
                f"{where}: expected another name than {name!r}: a package cannot have the {kind} "
                f"{identifier!r}, which is a word of Python"
            )


def check_name(spec: PackageSpec, components: Iterable[ComponentInfo]) -> None:
    """Raise if a name cannot be the name of a package, a module and a plugin.

    Args:
        spec: inputs with the name.
        components: the plugins that are installed.

    Raises:
        RequestError: it cannot, with the reason.
    """
    check_form(spec, "NAME")
    name, module = spec.name, spec.module
    if module in sys.stdlib_module_names or module in _TAKEN:
        raise RequestError(
            f"NAME: expected another name than {name!r}: a package cannot have the module "
            f"{module!r}, which Python, Hardpoint or the package itself has"
        )
    for info in components:
        if info.name.lower() == module:
            raise RequestError(
                f"NAME: expected another name than {name!r}: {info.kind}/{info.name} of "
                f"{info.package} is a plugin of that name"
            )
    installed = importlib.util.find_spec(module)
    if installed is not None and installed.origin is not None:
        raise RequestError(
            f"NAME: expected another name than {name!r}: the module {module!r} is installed, "
            f"at {installed.origin}"
        )
