"""KV transfer as a step part: drives the connector that the configuration names."""

from __future__ import annotations

import functools
import logging

from hardpoint.errors import HardpointError, PluginFaultError, shown
from hardpoint.plugins import EngineCoreRequest, KVConnector, StepPart
from hardpoint.plugins.kv_connector import (
    KVConnectorContext,
    KVConnectorScheduler,
    KVSchedulerContext,
)
from hardpoint.plugins.step_part import EngineHalfContext, RequestFilter
from hardpoint.plugins.worker_half import WorkerHalfContext

from .engine_half import TransferPlanner
from .worker_half import TransferWorker

_log = logging.getLogger("hardpoint")

_CALL_LOST = "the engine goes on, and only this call is lost"


class KVTransfer(StepPart):
    """Blocks of the KV cache that a connector loads and saves; drives the `kv_connectors` kind.

    Faults of the connector cost the blocks to load, which are computed; faults of the part itself
    end the engine.
    """

    contract = 1
    fault_scope = "engine"

    @property
    def moves_blocks(self) -> str | None:
        """The setting that names a connector; None if there is none."""
        use = self.context.config.kv_connector.use
        return None if use is None else f"kv_connector.use: {use!r}"

    def engine_half(self, context: EngineHalfContext) -> TransferPlanner | _WithoutConnector:
        """Return the half that plans; without a connector, a half that warns of its parameters.

        Raises:
            PluginError: the connector cannot be built.
        """
        if self.moves_blocks is None:
            return _WithoutConnector()
        components = context.components
        (name,) = components.enabled("kv_connectors")
        calls = components.calls("kv_connectors", name)
        config = self.context.config.kv_connector
        plugin: KVConnector = components.create(
            "kv_connectors", name, KVConnectorContext, config=config
        )
        try:
            half = plugin.scheduler_half(
                KVSchedulerContext(
                    block_size=context.block_size,
                    block_hashes=context.block_hashes,
                    clock=context.clock,
                    world_size=context.world_size,
                    report_fault=functools.partial(
                        context.faults.note, name, consequence=_CALL_LOST
                    ),
                )
            )
            if not isinstance(half, KVConnectorScheduler):
                raise PluginFaultError(
                    f"{calls.source}: its scheduler_half() gave {shown(half)}, expected a "
                    f"KVConnectorScheduler"
                )
        except BaseException as cause:
            components.close(plugin)
            if isinstance(cause, HardpointError):
                raise
            described = context.describe_fault(cause)
            raise PluginFaultError(
                f"{calls.source}: its scheduler_half() failed: {described}"
            ) from cause
        return TransferPlanner(self.name, plugin, half, calls, context)

    def worker_half(self, context: WorkerHalfContext) -> TransferWorker | None:
        """Return the half that moves blocks; None without a connector."""
        if self.moves_blocks is None:
            return None
        return TransferWorker(self.context.config, context)


class _WithoutConnector(RequestFilter):
    """Warns of requests with parameters for a connector."""

    for_fields = ("kv_transfer_params",)

    def check(self, request: EngineCoreRequest) -> None:
        _log.warning(
            "request %s has kv_transfer_params, which are ignored: this engine has no KV "
            "connector, and computes all of it",
            request.request_id,
        )
