"""The worker half of KV transfer: a connector's worker half around steps, with faults caught."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import (
    ConfigError,
    HardpointError,
    KVConnector,
    KVStore,
    KVTierStats,
    SchedulerOutput,
)
from hardpoint.plugins.kv_cache import KVEvent
from hardpoint.plugins.kv_connector import (
    KVConnectorContext,
    KVConnectorWorker,
    KVWorkerContext,
)
from hardpoint.plugins.kv_store import KVStoreContext
from hardpoint.plugins.step_part import BlockAccess, LayerWrapper, WorkerStep
from hardpoint.plugins.worker_half import (
    WorkerHalfContext,
)
from hardpoint.typed import prepared

from .messages import StepData, TransferReport

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins import EngineConfig
    from hardpoint.plugins.kv_cache.block_identity import BlockIdentity
    from hardpoint.plugins.model.forward import Attend
    from hardpoint.plugins.step_part.worker_data import KVBlocks

_log = logging.getLogger("hardpoint")

_MOST_FAULTS = 64  # of one report; a component that fails in each call fails alike each time
_MOST_EVENTS = 1 << 16


class TransferWorker(BlockAccess, WorkerStep, LayerWrapper):
    """Calls the connector's worker half; collects the events of each step.

    A half that cannot end its loads, or take the KV cache, is closed and not called again.
    """

    def __init__(self, config: EngineConfig, context: WorkerHalfContext) -> None:
        self._config, self._context = config.kv_connector, context
        self._components = context.components
        (self.name,) = self._components.enabled("kv_connectors")
        self._calls = self._components.calls("kv_connectors", self.name)
        self._lock = threading.Lock()
        self._faults: list[tuple[str, str]] = []
        self._events: list[KVEvent] = []
        self._failure: str | None = None
        self._left_out: str | None = None
        self._connector: KVConnector | None = None
        self._opened: KVConnectorWorker | None = None
        self._has_opened_stores = False
        self._ended = frozenset[str]()
        self._has_data = False

    def start(self, blocks: KVBlocks | None) -> bytes | None:
        """Build the connector and its worker half, and give it the KV cache.

        Returns:
            Its handshake, as msgpack.

        Raises:
            PluginError: it cannot be built, or failed.
        """
        self._end()
        if blocks is None:
            return None
        create = self._components.create
        self._connector = create(
            "kv_connectors", self.name, KVConnectorContext, config=self._config
        )
        self._failure = self._left_out = None
        try:
            self._open(blocks.identity)
            handshake = self._handshake()
            half = self._half
            self._start("register_kv_caches", half.register_kv_caches, blocks.layers)
        except BaseException:
            self._close()
            raise
        return handshake

    def _open(self, identity: BlockIdentity) -> None:
        """Build the worker half; if that fails, the stores that it has opened are closed.

        Raises:
            PluginFaultError: it is not a KVConnectorWorker, or building it failed.
        """
        assert self._connector is not None
        context, publishes = self._context, bool(self._components.enabled("kv_event_publishers"))
        with ExitStack() as undo:
            half = self._start(
                "worker_half",
                self._connector.worker_half,
                KVWorkerContext(
                    identity=identity,
                    device=context.device,
                    rank=context.rank,
                    world_size=context.world_size,
                    open_stores=functools.partial(self._open_stores, identity, undo),
                    report_fault=self.fault,
                    publish=self._publish if publishes else None,
                ),
            )
            if not isinstance(half, KVConnectorWorker):
                raise PluginFaultError(
                    f"{self._calls.source}: its worker_half() gave {shown(half)}, expected a "
                    f"KVConnectorWorker"
                )
            if self._components.enabled("kv_stores") and not self._has_opened_stores:
                half.close()
                raise ConfigError(
                    f"kv_connector.stores: the connector {self._calls.source} opens no stores; "
                    f"leave out use or stores"
                )
            undo.pop_all()
        self._opened = half

    def _open_stores(
        self,
        identity: BlockIdentity,
        undo: ExitStack,
        sizes: Sequence[int],
        timeout_seconds: float,
    ) -> list[KVStore]:
        self._has_opened_stores = True
        context, stores = self._context, []
        for name in self._components.enabled("kv_stores"):
            store: KVStore = self._components.create(
                "kv_stores",
                name,
                KVStoreContext,
                sizes=tuple(sizes),
                identity=identity.digest().hex(),
                rank=context.rank,
                world_size=context.world_size,
                engine_id=self._config.engine_id or "",
                timeout_seconds=timeout_seconds,
                pin_memory=context.device.type == "cuda",
                report_evicted=functools.partial(self.evicted, name),
                host_memory=context.host_memory(),
                report_fault=functools.partial(self.fault, name),
            )
            undo.callback(store.close)
            stores.append(store)
        return stores

    def _start(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method that must work, as when the engine starts."""
        try:
            return self._calls.run(method, function, *args)
        except HardpointError:
            raise
        except BaseException as cause:
            raise PluginFaultError(
                f"{self._calls.source}: its {method}() failed: {self._describe(cause)}"
            ) from cause

    def _describe(self, cause: BaseException) -> str:
        """Return class and text of an exception; raise an interrupt of the user again."""
        return self._context.describe_fault(cause)

    @property
    def _half(self) -> KVConnectorWorker:
        assert self._opened is not None, "start() comes first"
        return self._opened

    def take_blocks(self, blocks: KVBlocks) -> None:
        """Give it another KV cache, after `release_blocks`."""
        if self._is_called:
            self._run("register_kv_caches", blocks.layers, is_vital=True)

    def release_blocks(self) -> None:
        """Let it let go of the KV cache."""
        if self._is_called:
            self._run("release_kv_caches", is_vital=True)

    @property
    def _is_called(self) -> bool:
        return self._opened is not None and self._left_out is None

    def _handshake(self) -> bytes | None:
        """Return its handshake for the scheduler half, as msgpack.

        Raises:
            PluginFaultError: it failed, or that is no plain data.
        """
        half = self._half

        def encoded() -> bytes | None:
            data = half.handshake()
            return None if data is None else msgspec.msgpack.encode(data)

        handshake: bytes | None = self._start("handshake", encoded)
        return handshake

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Begin a step."""
        self._failure, self._ended = self._left_out, plan.finished_request_ids
        self._has_data = bool(data)
        if not self._is_called:
            return
        cancelled: Sequence[str] = ()
        metadata = None
        try:
            if data:
                assert self._connector is not None
                step = msgspec.msgpack.decode(data, type=prepared(StepData))
                cancelled = step.cancelled
                if step.metadata is not None:
                    type_ = prepared(self._connector.Metadata)
                    metadata = msgspec.msgpack.decode(step.metadata, type=type_)
        except msgspec.MsgspecError as cause:
            self._failed("its metadata cannot be read", cause)
        half = self._half
        self._run("start_load_kv", loads=True, function=lambda: half.start_load_kv(metadata))
        if cancelled:  # last, so that nothing that the step began goes on, either
            self._run("cancel_loads", cancelled, is_vital=True)

    @property
    def wants_layers(self) -> bool:  # type: ignore[override]
        """Whether the connector waits for layers of this step, or saves them."""
        return self._is_called and bool(
            self._run("wants_layers", loads=True, function=lambda: bool(self._half.wants_layers))
        )

    def around_layers(self, attend: Attend) -> Attend:
        """Return `attend` with the connector's calls before and after each layer."""

        def call(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            angles: torch.Tensor | None = None,
        ) -> torch.Tensor:
            self._run("wait_for_layer_load", layer, loads=True)
            out = attend(layer, q, k, v, angles)
            self._run("save_kv_layer", layer)
            return out

        return call

    def after_layers(self) -> None:
        """Wait until this step's blocks may be overwritten."""
        if self._is_called:
            self._run("wait_for_save")

    def report(self) -> bytes | None:
        """Return a TransferReport since the last step, as msgpack; None if it is empty."""
        loaded = saved = frozenset[str]()
        invalid: frozenset[int] = frozenset()
        message: bytes | None = None
        tiers: dict[str, KVTierStats] | None = None
        if self._is_called:
            half, ended = self._half, self._ended
            finished = self._run(
                "get_finished", loads=True, function=lambda: _finished(half.get_finished(ended))
            )
            loaded, saved = finished or (loaded, saved)
            message = self._run("take_message", function=lambda: _encoded(half.take_message()))
            # Last, so that it has the blocks of all loads that have been named.
            invalid = (
                self._run(
                    "load_errors", loads=True, function=lambda: _block_ids(half.load_errors())
                )
                or frozenset()
            )
            tiers = self._run("stats", function=lambda: _tiers(half.stats()))
        with self._lock:
            faults, self._faults = self._faults, []
            events, self._events = self._events, []
        something = (loaded, saved, invalid, tiers, faults, events, self._failure)
        if message is None and not self._has_data and not any(something):
            return None
        report = TransferReport(
            loaded=loaded,
            saved=saved,
            invalid_block_ids=invalid,
            failure=self._failure,
            left_out=self._left_out is not None,
            message=message,
            faults=faults,
            tiers=tiers,
            events=events,
        )
        return msgspec.msgpack.encode(report)

    def sleep(self, level: int) -> None:
        """Close the connector with the model; the engine goes on if that fails."""
        if level > 1:
            self._end()

    def close(self) -> None:
        """Close the connector.

        Raises:
            PluginFaultError: it failed.
        """
        self._close()

    def _end(self) -> None:
        """Close the connector; the engine goes on if that fails."""
        try:
            self._close()
        except PluginFaultError as error:
            _log.warning("%s; the engine goes on", error)

    def _close(self) -> None:
        connector, half = self._connector, self._opened if self._is_called else None
        self._connector = self._opened = None
        if connector is not None:
            with ExitStack() as stack:
                stack.callback(self._components.close, connector)
                if half is not None:
                    self._start("close", half.close)

    def _run(
        self,
        method: str,
        *args: Any,
        loads: bool = False,
        is_vital: bool = False,
        function: Any = None,
    ) -> Any:
        """Call a method of the half; return None if it raises.

        Args:
            loads: whether loads cannot be trusted if it raises.
            is_vital: whether the half is left out if it raises.
            function: calls it and checks its result.
        """
        try:
            return self._calls.run(method, function or getattr(self._half, method), *args)
        except BaseException as cause:
            ends = ", and it is not called again" if is_vital else ""
            problem = f"{method}() failed{ends}"
            message = self._failed(problem, cause, loads=loads or is_vital)
        if is_vital:
            self._leave_out(message)
        return None

    def _leave_out(self, message: str) -> None:
        """Close the half, which might go on writing to blocks of others, for good."""
        self._run("close")
        self._left_out = message

    def _failed(self, problem: str, cause: BaseException, *, loads: bool = True) -> str:
        message = f"{self._calls.source}: {problem}: {self._describe(cause)}"
        if loads:
            self._failure = message
        self.fault(self.name, message)
        return message

    def fault(self, name: str, message: str) -> None:
        """Count a fault of a component. For any thread."""
        with self._lock:
            if len(self._faults) < _MOST_FAULTS:
                self._faults.append((str(name), str(message)))

    def evicted(self, store: str, keys: Sequence[bytes]) -> None:
        """Report to the half the blocks that a store does not keep any more. For any thread."""
        if self._opened is None:
            return
        try:
            self._opened.evicted(store, keys)
        except BaseException as cause:
            self._failed("evicted() failed", cause, loads=False)

    def _publish(self, event: KVEvent) -> None:
        if not isinstance(event, KVEvent):
            raise TypeError(f"expected a KV event, got {shown(event)}")
        with self._lock:
            if len(self._events) < _MOST_EVENTS:
                self._events.append(event)


def _finished(value: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the requests that `get_finished` names.

    Raises:
        TypeError, ValueError: they are not two collections of ids.
    """
    if value is None:
        return frozenset(), frozenset()
    loaded, saved = value
    return _ids(loaded), _ids(saved)


def _ids(value: Iterable[str]) -> frozenset[str]:
    if isinstance(value, str):
        raise TypeError(f"expected collections of request ids, got {shown(value)}")
    ids = frozenset(value)
    if wrong := [request_id for request_id in ids if type(request_id) is not str]:
        raise TypeError(f"expected request ids, got {shown(wrong[0])}")
    return ids


def _block_ids(value: Iterable[int] | None) -> frozenset[int]:
    # A tensor or an array gives numbers of its own; they are as good.
    return frozenset(() if value is None else map(int, value))


def _encoded(message: Any) -> bytes | None:
    return None if message is None else msgspec.msgpack.encode(message)


def _tiers(value: Mapping[str, KVTierStats] | None) -> dict[str, KVTierStats] | None:
    if value is None:
        return None
    return msgspec.convert(
        msgspec.to_builtins(value), prepared(dict[str, KVTierStats])
    )  # a copy, which later steps do not change
