"""Options of the plugin: directory, limits and priority of batches."""

from __future__ import annotations

from typing import Annotated

from hardpoint import plugins
from hardpoint.plugins import Meta

_DAY = 24 * 60 * 60.0


class BatchRoutesOptions(plugins.Options):
    """Options of the plugin.

    Attributes:
        folder: directory of files and batches, readable by the server's user alone; None adds no
            routes.
        concurrency: maximum number of concurrent requests of all batches.
        priority: priority of requests of batches, unless their key allows less; smaller is more
            important.
        file_bytes: maximum size of a file.
        owner_bytes: maximum size of all files, inputs, outputs and records of a key. A batch
            without room for its outputs fails.
        owner_files: maximum number of files of a key.
        requests: maximum number of lines of a batch.
        open_batches: maximum number of unfinished batches of a key.
        owner_batches: maximum number of batches of a key; new batches replace the oldest finished
            ones.
        seconds: time that files and finished batches are kept.
        window_seconds: time limit of a batch; requests that are not finished by then expire.
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
