"""The component of a connector of vLLM, and the methods that have no counterpart."""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any, ClassVar, Literal

from hardpoint import typed
from hardpoint.errors import PluginContractError
from hardpoint.plugins import KVConnector
from hardpoint.plugins.component import AdaptedComponent, Source
from hardpoint.plugins.kv_connector import KVSchedulerContext, KVWorkerContext
from hardpoint_vllm.objects import NamedFields
from hardpoint_vllm.origin import is_overridden, vllm_base

from .bases import BASE, KVConnectorRole
from .encoding import Encoding
from .scheduler_half import SchedulerSide
from .worker_half import WorkerSide

_log = logging.getLogger("hardpoint.vllm")

_REFUSED = {
    "bind_gpu_block_pool": "the block pool is not shared with connectors",
    "register_cross_layers_kv_cache": "each layer has memory of its own",
    "set_host_xfer_buffer_ops": "blocks are views of the device's memory",
    "get_finished_count": "a transfer has ended when it has in all ranks",
    "has_pending_push_work": "steps without tokens run while a load or lookup is pending",
    "request_finished_all_groups": "models have one group of layers",
    "set_xfer_handshake_metadata_pp_aware": "the metadata of workers is by rank",
}
"""Methods without a counterpart that change the results of others, and why."""
_UNUSED = (
    "take_events",
    "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats",
    "build_prom_metrics",
    "reset_cache",
)
"""Methods without a counterpart that change no result."""


class ConnectorOptions(typed.Options):
    """Options of an adapted connector.

    Attributes:
        extra_config: values of `kv_connector_extra_config`.
        kv_role: vLLM's role of the engine.
    """

    extra_config: dict[str, Any] = {}
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"


def is_connector(target: Any) -> bool:
    """Return whether a class derives from vLLM's base class of KV connectors."""
    return vllm_base(target, (BASE,)) == BASE


def adapt_connector(target: type, source: Source) -> type[AdaptedConnector]:
    """Return the component of a class for which `is_connector` is true.

    Raises:
        PluginContractError: the class lacks a method, or overrides one without a counterpart.
    """
    if unfinished := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginContractError(f"{source}: it lacks {', '.join(unfinished)}")
    for method, reason in _REFUSED.items():
        if is_overridden(target, method):
            raise PluginContractError(
                f"{source}: its {method} has no counterpart: {reason}; the interface of "
                f"kv_connectors is in docs/write-a-kv-connector.md"
            )
    attributes = {"contract": 1, "target": target, "__doc__": inspect.getdoc(target)}
    return type(target.__name__, (AdaptedConnector,), {**attributes, "__module__": __name__})


class AdaptedConnector(AdaptedComponent, KVConnector):
    """Runs a connector of vLLM, one for the scheduler and one in each worker."""

    contract = 1
    adapter = "vLLM KV connector V1"
    target: ClassVar[Any]

    class Options(ConnectorOptions):
        """Options of every adapted connector."""

    def scheduler_half(self, context: KVSchedulerContext) -> SchedulerSide:
        """Return the scheduler's side.

        Raises:
            PluginContractError: the connector aggregates metadata of several ranks.
        """
        if context.world_size > 1 and is_overridden(self.target, "build_connector_worker_meta"):
            raise PluginContractError(
                f"{self.context.source}: its build_connector_worker_meta runs with one rank, got "
                f"{context.world_size}"
            )
        for method in _UNUSED:
            if is_overridden(self.target, method):
                _log.warning("%s: its %s is not called", self.context.source, method)
        target = self._open(KVConnectorRole.SCHEDULER, context.block_size, context.world_size, 0)
        return SchedulerSide(target, self._encoding(), context)

    def worker_half(self, context: KVWorkerContext) -> WorkerSide:
        """Return the worker's side of a rank."""
        size = context.identity.block_size
        target = self._open(KVConnectorRole.WORKER, size, context.world_size, context.rank)
        return WorkerSide(target, self._encoding(), context)

    def _encoding(self) -> Encoding:
        return Encoding(self.target.__module__)

    def _open(self, role: KVConnectorRole, block_size: int, world_size: int, rank: int) -> Any:
        options = self.context.options
        extra = dict(options.extra_config)
        transfer = NamedFields(
            "kv_transfer_config",
            kv_connector=self.target.__name__,
            kv_role=options.kv_role,
            kv_connector_extra_config=extra,
            get_from_extra_config=extra.get,
            is_kv_producer=options.kv_role != "kv_consumer",
            is_kv_consumer=options.kv_role != "kv_producer",
            is_kv_transfer_instance=True,
        )
        config = NamedFields(
            "vllm_config",
            kv_transfer_config=transfer,
            cache_config=NamedFields("cache_config", block_size=block_size),
            parallel_config=NamedFields("parallel_config", world_size=world_size, rank=rank),
        )
        if is_overridden(self.target, "get_required_kvcache_layout"):
            layout = self.target.get_required_kvcache_layout(config)
            if layout is not None:
                raise PluginContractError(
                    f"{self.context.source}: get_required_kvcache_layout: expected None, got "
                    f"{layout!r}; the attention backend chooses the layout of blocks"
                )
        arguments = [config, _role(role), NamedFields("kv_cache_config")]
        try:
            inspect.signature(self.target).bind(*arguments)
        except TypeError:
            arguments.pop()  # before vLLM 0.11
        return self.target(*arguments)


def _role(role: KVConnectorRole) -> Any:
    """Return the role; of vLLM's own enumeration if vLLM is installed and imported."""
    installed = sys.modules.get("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return role if installed is None else installed.KVConnectorRole[role.name]
