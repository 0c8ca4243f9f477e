"""vLLM's base classes of KV connectors."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from hardpoint_vllm.objects import NamedFields

BASE = "KVConnectorBase_V1"


class KVConnectorRole(enum.Enum):
    """The process of a connector: of the scheduler, or of a worker."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - as vLLM's
    """Metadata of a step, from the scheduler's side to the worker's."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 - as vLLM's
    """Metadata that a worker sends at the start."""


class KVConnectorWorkerMetadata(ABC):
    """Metadata of a step, from a worker's side to the scheduler's."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return the metadata of both."""


class SupportsHMA(ABC):
    """Mark of connectors for models with several groups of layers."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record the end of a request."""


class KVConnectorBase_V1(ABC):  # noqa: N801 - as vLLM's
    """vLLM's base class of KV connectors."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None):
        """Keep the configuration."""
        self._connector_metadata: Any = None
        self._vllm_config, self._role = vllm_config, role
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config

    @property
    def role(self) -> KVConnectorRole:
        """The process of the connector."""
        return self._role

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Set the metadata of a step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Drop the metadata of a step."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def has_connector_metadata(self) -> bool:
        """Return whether a step has metadata."""
        return self._connector_metadata is not None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:  # noqa: B027 - as vLLM's
        """Take the KV cache by layer."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:  # noqa: B027 - as vLLM's
        """Save blocks of preempted requests."""

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of a step."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the loads of a layer."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save a layer."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Wait for the saves of a step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Return the requests that were sent and received."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded."""
        return set()

    def get_handshake_metadata(self) -> Any:
        """Return the metadata for the scheduler's side."""
        return None

    def build_connector_worker_meta(self) -> Any:
        """Return the metadata of a step for the scheduler's side."""
        return None

    def shutdown(self) -> None:
        """Release resources."""
        return

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether between steps."""

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks of a request."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the metadata of a step."""

    def on_new_request(self, request: Any) -> None:  # noqa: ARG002 - as vLLM's
        """Record a new request."""
        return

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ARG002 - as vLLM's
        """Take the result of a step."""
        return

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:  # noqa: ARG002 - as vLLM's
        """Take the metadata of all workers."""
        return

    def request_finished(
        self,
        request: Any,  # noqa: ARG002 - as vLLM's
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record the end of a request; return whether its blocks are kept, and its parameters."""
        return False, None

    def take_events(self) -> Iterable[Any]:
        """Return the events of the connector's cache."""
        return ()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003
        """Return the layout of the KV cache that the connector needs."""
        return None


class ForwardContext(NamedFields):
    """vLLM's context of a forward pass."""


class KVConnectorOutput(NamedFields):
    """vLLM's result of a step on the worker's side."""


def align_to_block_size(num_tokens: int, block_size: int) -> int:
    """Return the tokens of whole blocks before the last token."""
    return (num_tokens - 1) // block_size * block_size


_BASES = {
    "KVConnectorBase_V1": KVConnectorBase_V1,
    "KVConnectorHandshakeMetadata": KVConnectorHandshakeMetadata,
    "KVConnectorMetadata": KVConnectorMetadata,
    "KVConnectorRole": KVConnectorRole,
    "KVConnectorWorkerMetadata": KVConnectorWorkerMetadata,
    "SupportsHMA": SupportsHMA,
}
_ATTENTION = {"AttentionMetadata": NamedFields}
MODULES: Mapping[str, Mapping[str, Any]] = {
    "vllm.attention": {},
    "vllm.attention.backends": {},
    "vllm.attention.backends.abstract": _ATTENTION,
    "vllm.distributed": {},
    "vllm.distributed.kv_transfer": {},
    "vllm.distributed.kv_transfer.kv_connector": {},
    "vllm.distributed.kv_transfer.kv_connector.v1": _BASES,
    "vllm.distributed.kv_transfer.kv_connector.v1.base": _BASES,
    "vllm.forward_context": {"ForwardContext": ForwardContext},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.attention": {},
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLACommonMetadata": type("MLACommonMetadata", (), {}),
    },
    "vllm.utils.hashing": {},
    "vllm.v1.attention": {},
    "vllm.v1.attention.backend": _ATTENTION,
    "vllm.v1.core": {},
    "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks": NamedFields},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.output": {"SchedulerOutput": NamedFields},
    "vllm.v1.kv_cache_interface": {"KVCacheConfig": NamedFields},
    "vllm.v1.outputs": {"KVConnectorOutput": KVConnectorOutput},
    "vllm.v1.request": {"Request": NamedFields},
}
"""Names by module, where vLLM is not installed."""
