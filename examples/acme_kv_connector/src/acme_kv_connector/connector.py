"""The connector: its options, and the halves that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import KVConnector
from hardpoint.plugins.kv_connector import KVSchedulerContext, KVWorkerContext

from .jobs import Jobs
from .moving import FilesWorker
from .planning import FilesScheduler


class LayeredFiles(KVConnector):
    """Keeps a file per block and rank in a folder, and loads them layer by layer in a step."""

    contract = 1
    Metadata = Jobs

    class Options(plugins.Options):
        """Options, in `[plugin.layered_files]`.

        Attributes:
            path: folder of the files.
            threads: number of threads that read and write.
            max_unwritten: blocks that may wait to be written; further ones are not kept.
        """

        path: str
        threads: Annotated[int, Meta(ge=1, le=64)] = 2
        max_unwritten: Annotated[int, Meta(ge=1)] = 256

    options: Options

    def scheduler_half(self, context: KVSchedulerContext) -> FilesScheduler:
        """Return the half that plans."""
        return FilesScheduler(Path(self.options.path), context)

    def worker_half(self, context: KVWorkerContext) -> FilesWorker:
        """Return the half that reads and writes."""
        folder = Path(self.options.path)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        timeout = self.context.config.load_seconds
        options = self.options
        return FilesWorker(folder, context, options.threads, options.max_unwritten, timeout)
