"""The worker half of a KV connector around the steps of the model runner, with faults caught."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from hardpoint.core.activity import PluginCalls
from hardpoint.core.wire.kv_step import KVStepMetadata
from hardpoint.plugins import KVConnector, SchedulerOutput
from hardpoint.plugins.kv_cache import KVEvent
from hardpoint.plugins.kv_connector import KVConnectorWorker, KVWorkerContext
from hardpoint.plugins.model import ModelConfig
from hardpoint.plugins.plan import KVReport
from hardpoint.registry.blame import describe, raise_unless_fault

_MOST_FAULTS = 64  # of one report; a component that fails in each call says the same each time


class WorkerConnector:
    """Calls the worker half; collects what it reports of each step."""

    def __init__(
        self, connector: KVConnector, calls: PluginCalls, *, publishes: bool = False
    ) -> None:
        """Own the connector; `open` builds its worker half.

        Args:
            connector: of this worker.
            calls: through which the half is called.
            publishes: whether anyone publishes KV events.
        """
        self._connector = connector
        self._calls = calls
        self._publishes = publishes
        self._lock = threading.Lock()
        self._faults: list[tuple[str, str]] = []
        self._events: list[KVEvent] = []
        self._failure: str | None = None
        self._opened: tuple[KVConnectorWorker, int] | None = None

    def open(self, context: KVWorkerContext) -> None:
        """Build the worker half."""
        publish = self._publish if self._publishes else None
        context = dataclasses.replace(context, report_fault=self.fault, publish=publish)
        self._opened = self._connector.worker_half(context), context.rank

    @property
    def _half(self) -> KVConnectorWorker:
        assert self._opened is not None, "open() comes first"
        return self._opened[0]

    def register(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give it the KV cache, by layers."""
        self._half.register_kv_caches(caches)

    def release(self) -> None:
        """Let it let go of the KV cache."""
        self._run("release_kv_caches")

    def handshake(self) -> bytes | None:
        """Return what it says to the scheduler half at start, as msgpack."""
        data = self._half.handshake()
        return None if data is None else msgspec.msgpack.encode(data)

    def begin(self, plan: SchedulerOutput) -> None:
        """Begin a step."""
        self._failure = None
        metadata = None
        try:
            if plan.kv_connector_metadata is not None:
                step = msgspec.msgpack.decode(plan.kv_connector_metadata, type=KVStepMetadata)
                if step.cancelled:
                    self._run("cancel_loads", step.cancelled)
                if step.data is not None:
                    metadata = msgspec.msgpack.decode(step.data, type=self._connector.Metadata)
        except msgspec.MsgspecError as cause:
            self._failed("its metadata cannot be read", cause)
            return
        self._run("start_load_kv", metadata, loads=True)

    @property
    def wants_layers(self) -> bool:
        """Whether this step calls `wait_for_layer` and `save_layer`."""
        return self._half.wants_layers

    def wait_for_layer(self, layer: int) -> None:
        """Wait until this step's blocks are loaded in a layer."""
        self._run("wait_for_layer_load", layer, loads=True)

    def save_layer(self, layer: int) -> None:
        """Save this step's blocks in a layer."""
        self._run("save_kv_layer", layer)

    def wait_for_save(self) -> None:
        """Wait until this step's blocks may be overwritten."""
        self._run("wait_for_save")

    def report(self, plan: SchedulerOutput) -> KVReport | None:
        """Return what happened since the last step; None if nothing did."""
        assert self._opened is not None
        finished = self._run("get_finished", plan.finished_request_ids) or ((), ())
        message = self._run("take_message")
        invalid = self._run("load_errors", loads=True) or ()
        tiers = self._run("stats")
        with self._lock:
            faults, self._faults = self._faults, []
            events, self._events = self._events, []
        loaded, saved = map(frozenset, finished)
        is_empty = not (loaded or saved or invalid or tiers or faults or events or self._failure)
        if is_empty and message is None:
            return None
        return KVReport(
            rank=self._opened[1],
            loaded=loaded,
            saved=saved,
            invalid_block_ids=frozenset(invalid),
            failure=self._failure,
            message=None if message is None else msgspec.msgpack.encode(message),
            faults=faults,
            tiers=tiers,
            events=events,
        )

    def close(self) -> None:
        """Close both."""
        try:
            if self._opened is not None:
                self._half.close()
        finally:
            self._connector.close()

    def _run(self, method: str, *args: Any, loads: bool = False) -> Any:
        """Call a method of the half; return None if it raises."""
        try:
            return self._calls.run(method, getattr(self._half, method), *args)
        except BaseException as cause:
            raise_unless_fault(cause)
            self._failed(f"{method}() failed", cause, loads=loads)

    def _failed(self, what: str, cause: BaseException, *, loads: bool = True) -> None:
        message = f"{self._calls.source}: {what}: {describe(cause)}"
        if loads:
            self._failure = message
        self.fault(self._connector.name, message)

    def fault(self, name: str, message: str) -> None:
        """Count a fault of a component. For any thread."""
        with self._lock:
            if len(self._faults) < _MOST_FAULTS:
                self._faults.append((name, message))

    def evicted(self, store: str, keys: Sequence[bytes]) -> None:
        """Report to the half the blocks that a store does not keep any more. For any thread."""
        if self._opened is None:
            return
        try:
            self._half.evicted(store, keys)
        except BaseException as cause:
            raise_unless_fault(cause)
            self._failed("evicted() failed", cause, loads=False)

    def _publish(self, event: KVEvent) -> None:
        with self._lock:
            self._events.append(event)


def config_hash(config: ModelConfig) -> str:
    """Return a hash of the fields of a model's configuration."""
    encoded = msgspec.json.encode(
        (config.architecture, config.vocab_size, config.hf),
        enc_hook=repr,
        order="deterministic",
    )
    return hashlib.sha256(encoded).hexdigest()
