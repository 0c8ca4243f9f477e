"""The answers of the routes, and the records that are kept."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

import msgspec

from hardpoint.builtin_plugins.server.batches.lines import LineError
from hardpoint.plugins.server import Client

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class FileObject(msgspec.Struct, kw_only=True):
    """A file, in OpenAI's form.

    Attributes:
        bytes: its size.
        expires_at: when it is deleted, in seconds since the epoch.
    """

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileRecord(msgspec.Struct, kw_only=True):
    """A file as it is kept; `order` is when it came, in nanoseconds."""

    file: FileObject
    order: int


class RequestCounts(msgspec.Struct):
    """Numbers of requests of a batch: total, completed and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchErrors(msgspec.Struct):
    """The errors of the lines of a batch."""

    data: list[LineError]
    object: str = "list"


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch, in OpenAI's form; times are in seconds since the epoch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    object: str = "batch"

    @property
    def ended_at(self) -> int | None:
        """When it ended; None if it has not."""
        times = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        return next((at for at in times if at is not None), None)


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch as it is kept.

    Attributes:
        order: when it came, in nanoseconds.
        client: who asked for it.
        outcome: how it ends, once it is finalizing.
        output_seconds: how long its output is kept.
    """

    batch: BatchObject
    order: int
    client: Client
    output_seconds: float
    outcome: Status = "completed"


class Page(msgspec.Struct):
    """A page of a list."""

    data: list[Any]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class Deleted(msgspec.Struct):
    """The answer to the deletion of a file."""

    id: str
    object: str = "file"
    deleted: bool = True


def new_name(prefix: str) -> str:
    """Return an id that no one can guess."""
    return f"{prefix}{secrets.token_hex(16)}"


def now() -> int:
    """Return the time, in seconds since the epoch."""
    return int(time.time())
