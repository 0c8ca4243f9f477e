"""Adapters that lie in one folder, each in a folder of its own name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import AdapterResolver, AdapterResolverContext, ConfigError, RequestError

CONFIG = "adapter_config.json"
"""File that makes a folder one of an adapter, as PEFT writes it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Folder(AdapterResolver):
    """Finds `NAME/adapter_config.json` in a folder.

    Names are of letters, digits, dots, underscores and hyphens, 128 at most, and begin with a
    letter or digit; any other one is unknown. Links are followed, and may not leave the folder.
    """

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            path: the folder.
        """

        path: Annotated[str, Meta(min_length=1)]

    options: Options

    def __init__(self, context: AdapterResolverContext) -> None:
        """Find the folder.

        Raises:
            ConfigError: it is not there.
        """
        super().__init__(context)
        self._root = Path(self.options.path).expanduser().resolve()
        if not self._root.is_dir():
            raise ConfigError(
                f"plugin.{self.name}.path: expected a folder of adapters, got {self.options.path!r}"
            )

    def resolve(self, name: str) -> Path | None:
        """Return the folder of an adapter.

        Raises:
            RequestError: it, or a file in it, is a link that leaves the folder of all adapters.
        """
        if not _NAME.fullmatch(name):
            return None
        folder = (self._root / name).resolve()
        if not (folder / CONFIG).is_file():
            return None
        if not all(self._has(path) for path in (folder, *folder.iterdir())):
            raise RequestError(
                f"model: expected an adapter within the server's folder of adapters, "
                f"got {name!r}, which has a link that leaves it"
            )
        return folder

    def _has(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self._root)
