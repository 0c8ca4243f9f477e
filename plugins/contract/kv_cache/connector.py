"""KV connectors: load and save blocks of the KV cache outside of it.

A connector has two halves. The scheduler half, in the engine, decides how much of a request can be
loaded and which blocks to load and save; the worker half, in each worker, moves the bytes. Messages
to the worker half go with the plan of a step, and messages to the scheduler half come back with the
step's result, both as plain data.

To keep blocks in a further place, a `KVStore` suffices in most cases, and is much less code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hardpoint.errors import RequestError
from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.config.tables import KVConnectorConfig
from hardpoint.plugins.requests.params import EngineCoreRequest
from hardpoint.plugins.requests.plan import BlockIds, SchedulerOutput
from hardpoint.plugins.requests.request import Request
from hardpoint.plugins.requests.stats import KVTierStats

from .block_identity import BlockIdentity
from .events import KVEvent
from .store import KVStore

if TYPE_CHECKING:
    import torch

__all__ = [
    "FinishedTransfers",
    "KVConnector",
    "KVConnectorContext",
    "KVConnectorScheduler",
    "KVConnectorWorker",
    "KVSchedulerContext",
    "KVWorkerContext",
]


class KVConnectorScheduler(ABC):
    """The scheduler half of a KV connector; all methods are called by the engine's thread.

    None may block. If one raises, the request is computed as without the connector, and the fault
    is counted. A request with a load or lookup that takes longer than `kv_connector.load_seconds`
    continues without it; late results are ignored.
    """

    def check_request(self, request: EngineCoreRequest) -> None:
        """Check a new request, its `kv_transfer_params` for example.

        Raises:
            RequestError: it is rejected, with this message. By default if it has
                `kv_transfer_params`.
        """
        if request.kv_transfer_params is not None:
            raise RequestError(
                f"kv_transfer_params: the KV connector {type(self).__name__} takes none"
            )

    def request_refused(self, request_id: str) -> None:  # noqa: B027 - optional
        """Forget a request that `check_request` has accepted: the engine did not take it."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded after the computed ones.

        Args:
            request: about to be admitted.
            num_computed_tokens: leading tokens that the local cache has, whole blocks.

        Returns:
            The number of tokens (None: not known yet, ask again), and whether they are loaded
            asynchronously, between steps: the request waits until
            `KVConnectorWorker.get_finished` names it. If not, they are loaded in the step in which
            it is scheduled.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Record the blocks allocated for a request, also if nothing is to be loaded.

        Args:
            request: request that was admitted, or is about to wait for its load.
            block_ids: its whole block table.
            num_external_tokens: number of matched tokens that are to be loaded.
        """

    @abstractmethod
    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        """Return the work of the worker halves in a step, and clear it; None is nothing.

        It is converted to msgpack and, in the worker, to `KVConnector.Metadata`.
        """

    @abstractmethod
    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Record the end of a request.

        Returns:
            Whether its blocks must be kept until `KVConnectorWorker.get_finished` reports them
            as saved, at most `kv_connector.lease_seconds`, and the `kv_transfer_params` of its
            last output.
        """

    def load_ended(self, request_id: str, failed: bool) -> None:  # noqa: B027 - optional
        """Record that an asynchronous load has ended: in all ranks, or given up."""

    def receive(self, rank: int, message: Any) -> None:  # noqa: B027 - optional
        """Process a message of `KVConnectorWorker.take_message` from a rank."""

    def set_handshakes(self, handshakes: Sequence[Any]) -> None:  # noqa: B027 - optional
        """Receive the result of `KVConnectorWorker.handshake` of each rank.

        It is called before the first step, and again when the worker halves were built again, after
        a sleep that released the model, possibly with other weights. Loads and lookups of the
        earlier halves are over then.
        """

    def plan_lost(self, metadata: Any) -> None:  # noqa: B027 - optional
        """Undo the result of `build_connector_meta` for a step that failed.

        Workers may have begun the step or not, and their reports with its result are lost. All
        asynchronous loads are canceled, also loads of earlier steps, and `load_ended` follows. The
        requests that were to get tokens are recomputed.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Release resources."""


class FinishedTransfers(NamedTuple):
    """Transfers of a rank that have ended since the last step, by request id.

    Attributes:
        loaded: asynchronous loads, failed ones included: no block of theirs is written any more.
        saved: ended requests with blocks that are not read any more.
    """

    loaded: Iterable[str] = ()
    saved: Iterable[str] = ()


class KVConnectorWorker(ABC):
    """The worker half of a KV connector, one per rank.

    All methods are called by the thread that runs the model. If a method that loads raises, all
    pending loads are canceled, their tokens are computed, and the fault is counted.
    It may write to blocks that it has to load, until it has named the request in
    `get_finished` or its load was cancelled; whatever else it writes there is read by requests.

    If a load of a step fails, results of this step must not be saved, of no request, because
    others may share the blocks. A rank does not know that it has failed in another one. So the
    scheduler half plans no saves, from a step that loads until each request that loads in it has a
    further token, or the result of that step is known otherwise.
    """

    wants_layers: bool = True
    """Whether a step calls `wait_for_layer_load` and `save_kv_layer`, read after `start_load_kv`.

    If not, a step of few tokens may be repeated without running Python.
    """

    @abstractmethod
    def register_kv_caches(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take the KV cache, before the first step, and again whenever it was allocated again.

        Args:
            caches: per layer of this rank, views of its memory, uint8 [num_blocks, bytes], which
                together are all bytes of each block (`AttentionBackend.block_views`).
        """

    def release_kv_caches(self) -> None:  # noqa: B027 - optional
        """Drop all references to the KV cache, because its memory is released.

        All loads have failed.
        """

    @abstractmethod
    def start_load_kv(self, metadata: Any) -> None:
        """Begin a step, which may have no tokens: start its loads, between steps and in it.

        Args:
            metadata: result of `build_connector_meta` for the step, converted to
                `KVConnector.Metadata`; None if that was None.
        """

    def wait_for_layer_load(self, layer: int) -> None:  # noqa: B027 - optional
        """Return once the blocks that this step reads have been loaded in a layer."""

    def save_kv_layer(self, layer: int) -> None:  # noqa: B027 - optional
        """Save the blocks that this step completes in a layer, which has just been computed."""

    def wait_for_save(self) -> None:  # noqa: B027 - optional
        """Return once this step's blocks may be overwritten; called after the last layer."""

    @abstractmethod
    def get_finished(self, ended: frozenset[str]) -> FinishedTransfers:
        """Return the transfers that have ended since the last step.

        Args:
            ended: ids of requests that have ended since then.
        """

    def load_errors(self) -> Iterable[int]:
        """Return the ids of blocks that failed to load since the last step, to compute them.

        It is called after `get_finished`, and includes all loads that `get_finished` has named.
        """
        return ()

    def cancel_loads(self, request_ids: Sequence[str]) -> None:  # noqa: B027 - optional
        """Give up asynchronous loads: no block of theirs is written when this returns.

        It is called after `start_load_kv`. A half that raises here is closed, and left out.
        """

    def take_message(self) -> Any:
        """Return plain data for `KVConnectorScheduler.receive`, once; None is nothing."""
        return None

    def handshake(self) -> Any:
        """Return plain data for `KVConnectorScheduler.set_handshakes`, before the first step."""
        return None

    def evicted(self, store: str, keys: Sequence[bytes]) -> None:  # noqa: B027 - optional
        """Take the keys of blocks that a store does not keep any more; called by any thread."""

    def stats(self) -> Mapping[str, KVTierStats] | None:
        """Return totals per tier since the start; None if they are the same as last time."""
        return None

    def close(self) -> None:  # noqa: B027 - optional
        """Finish saving and release resources; the KV cache is still there."""


@dataclass(frozen=True, kw_only=True)
class KVSchedulerContext:
    """Inputs of the scheduler half.

    Attributes:
        block_size: tokens per block.
        block_hashes: `block_hashes(request, n)` returns the hashes of at least the first n blocks
            of a request, which its known tokens must fill. They are chained, and include its salt.
        clock: returns the engine's time, in seconds.
        world_size: number of ranks, each with a worker half.
        report_fault: counts a fault in `LLM.plugins.health()`; called with its description.
    """

    block_size: int
    block_hashes: Callable[[Request, int], Sequence[bytes]]
    clock: Callable[[], float]
    world_size: int = 1
    report_fault: Callable[[str], None] = lambda _message: None


OpenStores = Callable[[Sequence[int], float], Sequence[KVStore]]
"""Opens the configured stores, nearest first; see `KVWorkerContext.open_stores`."""


@dataclass(frozen=True, kw_only=True)
class KVWorkerContext:
    """Inputs of the worker half of a rank.

    Attributes:
        identity: inputs of the bytes of its blocks, besides tokens.
        rank: rank of the worker.
        world_size: number of ranks.
        device: device of the KV cache.
        open_stores: `open_stores(sizes, timeout_seconds)` builds the stores of
            `kv_connector.stores`, for buffers with these sizes, which the worker half closes. It
            gives up their calls after this time.
        report_fault: `report_fault(name, message)` counts a fault of a component, its own or that
            of a store, in `LLM.plugins.health()`. For any thread.
        publish: publishes a KV event with the next step's result; None if there are no publishers.
            For any thread.
    """

    identity: BlockIdentity
    device: torch.device
    rank: int = 0
    world_size: int = 1
    open_stores: OpenStores = lambda _sizes, _timeout_seconds: ()
    report_fault: Callable[[str, str], None] = lambda _name, _message: None
    publish: Callable[[KVEvent], None] | None = None


@dataclass(frozen=True, kw_only=True)
class KVConnectorContext(Context["KVConnector"]):
    """Context of a KV connector.

    Attributes:
        config: the table `kv_connector`.
    """

    config: KVConnectorConfig = field(default_factory=KVConnectorConfig)


class KVConnector(Component):
    """Loads and saves KV blocks; built in the engine and in each worker, for one half each."""

    Metadata: ClassVar[Any] = Any
    """Type of the metadata for worker halves, as msgspec knows types."""
    Message: ClassVar[Any] = Any
    """Type of the messages from a worker half to the scheduler half."""

    context: KVConnectorContext

    @abstractmethod
    def scheduler_half(self, context: KVSchedulerContext) -> KVConnectorScheduler:
        """Return the half that plans; called once, in the engine."""

    @abstractmethod
    def worker_half(self, context: KVWorkerContext) -> KVConnectorWorker:
        """Return the half that moves bytes; called once in each worker."""
