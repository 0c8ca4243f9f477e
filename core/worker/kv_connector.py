"""The worker half of a KV connector around the steps of the model runner, with faults caught."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from hardpoint.boundary.activity import PluginCalls
from hardpoint.boundary.errors import close_all
from hardpoint.core.protocol.kv_step import KVStepMetadata
from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import HardpointError, KVConnector, SchedulerOutput
from hardpoint.plugins.kv_cache import KVEvent
from hardpoint.plugins.kv_connector import KVConnectorWorker, KVWorkerContext
from hardpoint.plugins.loader import ModelConfig
from hardpoint.plugins.model import Attend
from hardpoint.plugins.plan import KVReport
from hardpoint.plugins.stats import KVTierStats
from hardpoint.registry.blame import describe, raise_unless_fault

_MOST_FAULTS = 64  # of one report; a component that fails in each call says the same each time
_MOST_EVENTS = 1 << 16


def around_layers(attend: Attend, connector: WorkerConnector) -> Attend:
    """Return `attend` with the connector's calls before and after each layer."""

    def call(
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        connector.wait_for_layer(layer)
        out = attend(layer, q, k, v, angles)
        connector.save_layer(layer)
        return out

    return call


class WorkerConnector:
    """Calls the worker half; collects what it reports of each step.

    A half that cannot end its loads, or take the KV cache, is closed and not called again.
    """

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
        self._left_out: str | None = None
        self._opened: tuple[KVConnectorWorker, int] | None = None

    def open(self, context: KVWorkerContext) -> None:
        """Build the worker half.

        Raises:
            PluginFaultError: it is none, or building it failed.
        """
        publish = self._publish if self._publishes else None
        context = dataclasses.replace(context, report_fault=self.fault, publish=publish)
        half = self._start("worker_half", self._connector.worker_half, context)
        if not isinstance(half, KVConnectorWorker):
            raise PluginFaultError(
                f"{self._calls.source}: its worker_half() gave {shown(half)}, expected a "
                f"KVConnectorWorker"
            )
        self._opened = half, context.rank

    def _start(self, method: str, function: Any, *args: Any) -> Any:
        """Call a method that must work, as when the engine starts."""
        try:
            return self._calls.run(method, function, *args)
        except HardpointError:
            raise
        except BaseException as cause:
            raise_unless_fault(cause)
            raise PluginFaultError(
                f"{self._calls.source}: its {method}() failed: {describe(cause)}"
            ) from cause

    @property
    def name(self) -> str:
        """The connector's name."""
        return self._calls.source.name

    @property
    def _half(self) -> KVConnectorWorker:
        assert self._opened is not None, "open() comes first"
        return self._opened[0]

    def register(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give it the KV cache, by layers.

        Raises:
            PluginFaultError: it failed.
        """
        self._start("register_kv_caches", self._half.register_kv_caches, caches)

    def register_again(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give it another KV cache, after `release`."""
        if self._left_out is None:
            self._run("register_kv_caches", caches, is_vital=True)

    def release(self) -> None:
        """Let it let go of the KV cache."""
        if self._left_out is None:
            self._run("release_kv_caches", is_vital=True)

    def handshake(self) -> bytes | None:
        """Return what it says to the scheduler half at start, as msgpack.

        Raises:
            PluginFaultError: it failed, or that is no plain data.
        """
        half = self._half

        def say() -> bytes | None:
            data = half.handshake()
            return None if data is None else msgspec.msgpack.encode(data)

        said: bytes | None = self._start("handshake", say)
        return said

    def begin(self, plan: SchedulerOutput) -> None:
        """Begin a step."""
        self._failure = self._left_out
        if self._left_out is not None:
            return
        cancelled: Sequence[str] = ()
        metadata = None
        try:
            if plan.kv_connector_metadata is not None:
                step = msgspec.msgpack.decode(plan.kv_connector_metadata, type=KVStepMetadata)
                cancelled = step.cancelled
                if step.data is not None:
                    metadata = msgspec.msgpack.decode(step.data, type=self._connector.Metadata)
        except msgspec.MsgspecError as cause:
            self._failed("its metadata cannot be read", cause)
        half = self._half
        self._run("start_load_kv", loads=True, function=lambda: half.start_load_kv(metadata))
        if cancelled:  # last, so that nothing that the step began goes on, either
            self._run("cancel_loads", cancelled, is_vital=True)

    @property
    def wants_layers(self) -> bool:
        """Whether this step calls `wait_for_layer` and `save_layer`."""
        return self._left_out is None and bool(
            self._run("wants_layers", loads=True, function=lambda: bool(self._half.wants_layers))
        )

    def wait_for_layer(self, layer: int) -> None:
        """Wait until this step's blocks are loaded in a layer."""
        self._run("wait_for_layer_load", layer, loads=True)

    def save_layer(self, layer: int) -> None:
        """Save this step's blocks in a layer."""
        self._run("save_kv_layer", layer)

    def wait_for_save(self) -> None:
        """Wait until this step's blocks may be overwritten."""
        if self._left_out is None:
            self._run("wait_for_save")

    def report(self, plan: SchedulerOutput) -> KVReport | None:
        """Return what happened since the last step; None if nothing did."""
        assert self._opened is not None
        half, rank = self._opened
        loaded = saved = frozenset[str]()
        invalid: frozenset[int] = frozenset()
        message: bytes | None = None
        tiers: dict[str, KVTierStats] | None = None
        if self._left_out is None:
            ended = plan.finished_request_ids
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
        if message is None and not any(something):
            return None
        return KVReport(
            rank=rank,
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

    def close(self) -> None:
        """Close both.

        Raises:
            PluginFaultError: one failed.
        """
        try:
            if self._opened is not None and self._left_out is None:
                self._start("close", self._half.close)
        finally:
            close_all([self._connector])

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
            method: its name.
            args: for it.
            loads: whether loads cannot be trusted if it raises.
            is_vital: whether the half is left out if it raises.
            function: calls it and checks what it returns.
        """
        try:
            return self._calls.run(method, function or getattr(self._half, method), *args)
        except BaseException as cause:
            raise_unless_fault(cause)
            ends = ", and it is not called again" if is_vital else ""
            what = f"{method}() failed{ends}"
            message = self._failed(what, cause, loads=loads or is_vital)
        if is_vital:
            self._leave_out(message)
        return None

    def _leave_out(self, message: str) -> None:
        """Close the half, which might go on writing to blocks of others, for good."""
        self._run("close")
        self._left_out = message

    def _failed(self, what: str, cause: BaseException, *, loads: bool = True) -> str:
        message = f"{self._calls.source}: {what}: {describe(cause)}"
        if loads:
            self._failure = message
        self.fault(self._connector.name, message)
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
            self._half.evicted(store, keys)
        except BaseException as cause:
            raise_unless_fault(cause)
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
    if wrong := [one for one in ids if type(one) is not str]:
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
        msgspec.to_builtins(value), dict[str, KVTierStats]
    )  # a copy, which later steps do not change


def config_hash(config: ModelConfig, variant: str = "", windows: Sequence[int | None] = ()) -> str:
    """Return a hash of the fields of a model's configuration, and of what it has made of them.

    Args:
        config: of the model.
        variant: its `kv_variant`.
        windows: of its layers.
    """
    made: list[object] = [variant] if variant else []
    if any(window is not None for window in windows):
        made.append(windows)
    encoded = msgspec.json.encode(
        (config.architecture, config.vocab_size, config.hf, *made),
        enc_hook=repr,
        order="deterministic",
    )
    return hashlib.sha256(encoded).hexdigest()
