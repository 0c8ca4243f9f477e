"""The plugin: which store a server has, and its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from hardpoint import plugins
from hardpoint.plugins import HookContext, Meta, hookimpl
from hardpoint.plugins.server import ResponseStore

_DAY = 24 * 60 * 60.0


class ResponseStores:
    """Stores responses for `previous_response_id`."""

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            use: the store; None stores nothing.
            path: file of "sqlite", created if missing.
            seconds: time that a response is stored.
            max_bytes: maximum size of all responses; beyond it, the oldest responses of the key
                with the most bytes are deleted.
            max_response_bytes: maximum size of a response with its conversation; a larger one is
                not stored, and its request ends with an error.
            retain_seconds: `retain_seconds` of requests that have none.
        """

        use: Literal["memory", "sqlite"] | None = None
        path: Annotated[str, Meta(min_length=1)] | None = None
        seconds: Annotated[float, Meta(gt=0)] = 30 * _DAY
        max_bytes: Annotated[int, Meta(ge=1)] = 1 << 28
        max_response_bytes: Annotated[int, Meta(ge=1)] = 1 << 24
        retain_seconds: Annotated[float, Meta(gt=0)] | None = None

        def __post_init__(self) -> None:
            """Check that there is a path where one is needed.

            Raises:
                ValueError: there is none, or an unused one.
            """
            if (self.path is None) == (self.use == "sqlite"):
                wanted = "the path of a file" if self.use == "sqlite" else "none"
                raise ValueError(f"path: expected {wanted} with use = {self.use!r}")

    def __init__(self, context: HookContext) -> None:
        self._options: ResponseStores.Options = context.options

    @hookimpl
    def server_extensions(self) -> Sequence[ResponseStore]:
        """Return the store, if there is one."""
        options = self._options
        if options.use is None:
            return []
        from .bounds import Bounds  # noqa: PLC0415 - for servers alone

        bounds = Bounds(options.seconds, options.max_bytes, options.max_response_bytes)
        if options.path is None:
            from .memory import MemoryResponseStore  # noqa: PLC0415 - as above

            store: MemoryResponseStore | SQLiteStore = MemoryResponseStore(bounds)
        else:
            from .sqlite import SQLiteStore  # noqa: PLC0415 - as above

            store = SQLiteStore(options.path, bounds)
        return [
            ResponseStore(
                put=store.put,
                get=store.get,
                delete=store.delete,
                is_shared=store.is_shared,
                retain_seconds=options.retain_seconds,
            )
        ]
