"""The plugin: which store a server has, and its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from hardpoint import plugins
from hardpoint.plugins import HookContext, Meta, hookimpl
from hardpoint.plugins.server import ResponseStore

_DAY = 24 * 60 * 60.0


class ResponseStores:
    """Keeps responses, so that `previous_response_id` goes on from them."""

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            use: where responses are kept; None keeps none.
            path: file of "sqlite", which is made where it is missing.
            seconds: how long a response is kept.
            max_bytes: size of all responses together; beyond it, the oldest go of the key that has
                most.
            max_response_bytes: size of one, with the conversation before it; a larger one is not
                kept, and its request ends with an error.
            retain_seconds: how long the keys and values of a stored response are to stay in the
                prefix cache, where the request has no `retain_seconds`.
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
