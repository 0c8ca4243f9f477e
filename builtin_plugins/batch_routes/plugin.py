"""The plugin: its routes, and the work that answers batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hardpoint.plugins import HookContext, hookimpl
from hardpoint.plugins.server import Background, ServerContext

from .options import BatchRoutesOptions

if TYPE_CHECKING:
    from hardpoint.plugins.server.extension import ServerExtension


class BatchRoutes:
    """Adds `/v1/files` and `/v1/batches`; requests of users have priority over batches."""

    contract = 1

    Options = BatchRoutesOptions

    def __init__(self, context: HookContext) -> None:
        self._options: BatchRoutesOptions = context.options

    @hookimpl
    def server_extensions(self, server: ServerContext) -> Sequence[ServerExtension]:
        """Return the routes, and the work that answers batches.

        Raises:
            ConfigError: the folder cannot be used.
        """
        if self._options.folder is None:
            return []
        from .batch_route import BatchRoute  # noqa: PLC0415 - for servers alone
        from .file_route import FileRoute  # noqa: PLC0415 - as above
        from .folder import BatchFolder  # noqa: PLC0415 - as above
        from .runner import BatchRunner  # noqa: PLC0415 - as above

        folder = BatchFolder(self._options.folder)
        runner = BatchRunner(server, folder, self._options)
        return [
            *FileRoute(server, folder, self._options).routes(),
            *BatchRoute(server, folder, self._options, runner.wake).routes(),
            Background(run=runner.run),
        ]
