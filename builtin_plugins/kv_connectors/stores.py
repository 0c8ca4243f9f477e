"""The connector that drives KV stores."""

from __future__ import annotations

from hardpoint.plugins import ConfigError, KVConnector
from hardpoint.plugins.kv_connector import (
    KVConnectorContext,
    KVSchedulerContext,
    KVWorkerContext,
)

from .jobs import Jobs, WorkerMessage
from .moving import StoresWorker
from .options import StoresOptions
from .planning import StoresScheduler


class StoresConnector(KVConnector):
    """Keeps the blocks of prompts and outputs in `kv_connector.stores`, and loads them from there.

    The scheduler half only plans, and the worker halves call the stores in threads, so that no
    step waits for a store.
    """

    contract = 1
    Options = StoresOptions
    options: StoresOptions
    Metadata = Jobs
    Message = WorkerMessage

    def __init__(self, context: KVConnectorContext) -> None:
        """Build the connector.

        Raises:
            ConfigError: there are no stores.
        """
        super().__init__(context)
        if not context.config.stores:
            raise ConfigError(
                'kv_connector.stores: expected at least one store, as in stores = ["memory"], '
                f"for {context.config.use!r} to drive, got none; leave out use"
            )

    def scheduler_half(self, context: KVSchedulerContext) -> StoresScheduler:
        """Return the half that plans."""
        return StoresScheduler(self.context, context, loads_in_step=self.options.load_in_step)

    def worker_half(self, context: KVWorkerContext) -> StoresWorker:
        """Return the half that moves blocks."""
        return StoresWorker(self.context, context, self.options)
