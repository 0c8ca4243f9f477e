"""Options of the plugin: where files and batches are kept, and their bounds."""

from __future__ import annotations

from typing import Annotated

from hardpoint import plugins
from hardpoint.plugins import Meta

_DAY = 24 * 60 * 60.0


class BatchRoutesOptions(plugins.Options):
    """Options of the plugin.

    Attributes:
        folder: where files and batches are kept, for the server's user alone; None has no
            routes.
        concurrency: requests of all batches that are answered at once.
        priority: priority of requests of batches, unless their key allows less; smaller is more
            important.
        file_bytes: size of a file.
        owner_bytes: size of all that is kept of a key: its files, inputs and answers of batches,
            and records. A batch whose answers have no room fails.
        owner_files: number of files of a key.
        requests: lines of a batch.
        open_batches: batches of a key that have not ended.
        owner_batches: batches of a key, ended ones too; the first that ended give way to new ones.
        seconds: how long files, and batches that have ended, are kept.
        window_seconds: how long a batch may take; what has no answer by then gets none.
    """

    folder: Annotated[str, Meta(min_length=1)] | None = None
    concurrency: Annotated[int, Meta(ge=1)] = 8
    priority: Annotated[int, Meta(ge=0, lt=2**31)] = 1000
    file_bytes: Annotated[int, Meta(ge=1)] = 200 << 20
    owner_bytes: Annotated[int, Meta(ge=1)] = 2 << 30
    owner_files: Annotated[int, Meta(ge=1)] = 1000
    requests: Annotated[int, Meta(ge=1)] = 50_000
    open_batches: Annotated[int, Meta(ge=1)] = 100
    owner_batches: Annotated[int, Meta(ge=1)] = 500
    seconds: Annotated[float, Meta(gt=0)] = 30 * _DAY
    window_seconds: Annotated[float, Meta(gt=0)] = _DAY
