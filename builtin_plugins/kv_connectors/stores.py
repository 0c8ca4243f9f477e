"""The connector that drives KV stores."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import KVConnector
from hardpoint.plugins.kv_connector import KVSchedulerContext, KVWorkerContext

from .jobs import Answers, Jobs
from .moving import StoresWorker
from .planning import StoresScheduler

_Count = Annotated[int, Meta(ge=1, le=1024)]
_Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class StoresOptions(plugins.Options):
    """Options, in `[plugin.stores]`.

    Attributes:
        threads: that load.
        save_threads: that store.
        save_bytes: of host memory for blocks that are about to be stored; when it is full, blocks
            are not stored.
        save_wait_seconds: maximum time for which a step waits for room there.
        write: blocks are stored in all stores at once ("through"), or in those after the nearest
            when there is nothing else to store ("behind").
        layer_groups: parts that the layers are stored in, so that a step may begin before all of
            them are loaded; a divisor of the number of layers.
        load_in_step: load what another engine offers within the step that needs it, a group of
            layers after the other, instead of before.
        timeout_seconds: of each call of a store.
        breaker_failures: failed calls in a row, after which a store is left out.
        breaker_seconds: for how long.
    """

    threads: _Count = 4
    save_threads: _Count = 2
    save_bytes: Annotated[int, Meta(ge=1)] = 256 << 20
    save_wait_seconds: Annotated[float, Meta(ge=0, le=10)] = 0.0
    write: Literal["through", "behind"] = "through"
    layer_groups: _Count = 1
    load_in_step: bool = False
    timeout_seconds: _Seconds = 5.0
    breaker_failures: _Count = 5
    breaker_seconds: _Seconds = 10.0


class StoresConnector(KVConnector):
    """Keeps the blocks of prompts and outputs in `kv_connector.stores`, and loads them from there.

    The scheduler half only plans, and the worker halves call the stores in threads, so that no
    step waits for a store.
    """

    contract = 1
    Options = StoresOptions
    options: StoresOptions
    Metadata = Jobs
    Message = Answers

    def scheduler_half(self, context: KVSchedulerContext) -> StoresScheduler:
        """Return the half that plans."""
        return StoresScheduler(self.context, context, loads_in_step=self.options.load_in_step)

    def worker_half(self, context: KVWorkerContext) -> StoresWorker:
        """Return the half that moves blocks."""
        return StoresWorker(self.context, context, self.options)
