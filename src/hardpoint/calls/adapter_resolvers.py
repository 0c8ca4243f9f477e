"""The adapter resolvers, called in order; errors and timeouts name the resolver."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

from hardpoint.core.frontend.engine_parts import Companion, Opening
from hardpoint.errors import EngineClosedError, PluginFaultError
from hardpoint.host.boundary.activity import PluginCalls
from hardpoint.host.boundary.errors import close_all
from hardpoint.host.boundary.guard import UNWATCHED, guard
from hardpoint.plugins import AdapterResolver, AdapterResolverContext, LoRARequest
from hardpoint.plugins.component import Source

KIND = "adapter_resolvers"
_THREADS = 4  # of their own: one that hangs must not keep others from tokenizing


def guarded_resolver(resolver: AdapterResolver, source: Source) -> AdapterResolver:
    """Return a resolver with faults that name it."""
    return guard(resolver, KIND, calls=PluginCalls(UNWATCHED, KIND, source))


class AdapterResolvers(Companion):
    """The enabled adapter resolvers of a frontend."""

    def __init__(self, opening: Opening) -> None:
        """Build them, for an engine that is opened.

        Raises:
            PluginError, ConfigError: one cannot be built.
        """
        config, plugins = opening.config, opening.plugins
        self._seconds, self._is_closed = config.adapters.resolve_seconds, False
        self._threads = ThreadPoolExecutor(_THREADS, "adapter-resolver")
        self._resolvers: list[tuple[AdapterResolver, Source]] = []
        try:
            for entry in plugins.entries(KIND):
                made: AdapterResolver = plugins.create(
                    entry, AdapterResolverContext, model=config.model
                )
                self._resolvers.append((guarded_resolver(made, entry.source), entry.source))
        except BaseException:
            self.close()
            raise

    async def resolve(self, name: str) -> Path | LoRARequest | None:
        """Return the first answer of a resolver; None if none knows the name.

        Raises:
            RequestError: one refuses the name.
            PluginFaultError: one failed, or took longer than `adapters.resolve_seconds`.
            EngineClosedError: the engine was closed in the meantime.
        """
        for resolver, source in self._open():
            waiting = asyncio.wrap_future(self._ask(resolver, name))
            try:
                async with asyncio.timeout(self._seconds):
                    adapter = await waiting
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise _closed() from None
            except TimeoutError:
                raise self._late(source) from None
            if adapter is not None:
                return adapter
        return None

    def wait_for(self, name: str) -> Path | LoRARequest | None:
        """Resolve a name as `resolve`, and wait in the calling thread."""
        for resolver, source in self._open():
            try:
                adapter = self._ask(resolver, name).result(self._seconds)
            except CancelledError:
                raise _closed() from None
            except TimeoutError:
                raise self._late(source) from None
            if adapter is not None:
                return adapter
        return None

    def _open(self) -> Sequence[tuple[AdapterResolver, Source]]:
        if self._is_closed:
            raise _closed()
        return self._resolvers

    def _ask(self, resolver: AdapterResolver, name: str) -> Future[Path | LoRARequest | None]:
        try:
            return self._threads.submit(resolver.resolve, name)
        except RuntimeError:
            raise _closed() from None

    def _late(self, source: Source) -> PluginFaultError:
        return PluginFaultError(
            f"{source}: its resolve() took longer than adapters.resolve_seconds ({self._seconds:g})"
        )

    def close(self) -> None:
        """Close all of them; do not wait for a hanging one.

        Raises:
            PluginFaultError: one failed; all were closed.
        """
        resolvers, self._resolvers, self._is_closed = self._resolvers, [], True
        self._threads.shutdown(wait=False, cancel_futures=True)
        close_all([resolver for resolver, _ in resolvers])


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine is closed")
