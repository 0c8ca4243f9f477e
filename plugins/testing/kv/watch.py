"""A KV connector with monitored halves: exceptions, results and durations of their calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import torch

from hardpoint.errors import RequestError
from hardpoint.plugins import BlockIds, EngineCoreRequest, KVConnector, Request, SchedulerOutput
from hardpoint.plugins.kv_connector import (
    FinishedTransfers,
    KVConnectorScheduler,
    KVConnectorWorker,
    KVSchedulerContext,
    KVWorkerContext,
)
from hardpoint.plugins.requests.stats import KVTierStats
from hardpoint.testing.suite import Rule, Violation, short_repr

from .slots import WITNESS

_Half = KVConnectorScheduler | KVConnectorWorker

RAISES = Rule(
    "raises: no method of a half raises, whatever the storage does",
    "catch the errors of storage; a missing or wrong block is not loaded, and a block that cannot "
    "be stored is not kept",
)
DATA = Rule(
    "data: messages between the halves are plain data, because they are in different processes",
    "return values that msgspec converts to msgpack and back to the class attribute Metadata (for "
    "`build_connector_meta`) or Message (for `take_message`): structs, numbers, texts, bytes, "
    "lists",
)
RESULTS = Rule(
    "results: each method returns a result as its contract states",
    "see `hardpoint.plugins.kv_connector`",
)


class Watch:
    """The observations of the halves of a connector.

    Attributes:
        violations: broken rules, in the order in which they were seen.
        slowest: seconds of the longest call, by method.
        halves: all that were made.
    """

    def __init__(self, connector: type[KVConnector]) -> None:
        self._connector = connector
        self._types: Any = connector
        self._lock = threading.Lock()
        self.violations: list[Violation] = []
        self.slowest: dict[str, float] = {}
        self.halves: list[_Half] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put a watch around all halves that the connector makes in the body."""
        cls = self._connector
        scheduler_half, worker_half = cls.scheduler_half, cls.worker_half

        def watched_scheduler(
            connector: KVConnector, context: KVSchedulerContext
        ) -> KVConnectorScheduler:
            self._types = connector  # as the engine reads them: of the object, see Wrapper
            half = self.call("scheduler_half", scheduler_half, connector, context)
            self._check_half(half, "scheduler_half", KVConnectorScheduler)
            return _WatchedScheduler(half, self)

        def watched_worker(connector: KVConnector, context: KVWorkerContext) -> KVConnectorWorker:
            self._types = connector
            half = self.call("worker_half", worker_half, connector, context)
            self._check_half(half, "worker_half", KVConnectorWorker)
            return _WatchedWorker(half, self)

        with (
            mock.patch.object(cls, "scheduler_half", watched_scheduler),
            mock.patch.object(cls, "worker_half", watched_worker),
        ):
            yield

    def _check_half(self, half: Any, method: str, expected: type[Any]) -> None:
        if not isinstance(half, expected):
            raise RESULTS.violation(
                f"{method}() returned {short_repr(half)}, expected a {expected.__name__}"
            )
        self.halves.append(half)

    def call(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method; record its exception and its duration."""
        began = time.monotonic()
        try:
            return function(*args)
        except RequestError:
            raise
        except Exception as cause:
            self.note(RAISES.violation(f"{method}() raised {type(cause).__name__}: {cause}"))
            raise
        finally:
            seconds = time.monotonic() - began
            self.slowest[method] = max(self.slowest.get(method, 0.0), seconds)

    def note(self, violation: Violation) -> None:
        """Keep a violation. For any thread."""
        with self._lock:
            self.violations.append(violation)

    def expect(self, method: str, value: Any, expected: str, *, is_right: bool) -> None:
        """Note a result that is not as expected."""
        if not is_right:
            self.note(
                RESULTS.violation(f"{method}() returned {short_repr(value)}, expected {expected}")
            )

    def check_data(self, method: str, value: Any, type_name: str) -> None:
        """Note data that another process would not get as it is."""
        expected = getattr(self._types, type_name) if type_name else Any
        try:
            encoded = msgspec.msgpack.encode(value)
            decoded = msgspec.msgpack.decode(encoded, type=expected)
        except Exception as cause:
            self.note(
                DATA.violation(
                    f"{method}() returned {short_repr(value)}, which does not come through: {cause}"
                )
            )
            return
        is_struct = isinstance(value, msgspec.Struct) and bool(type_name)
        if is_struct and type(decoded) is not type(value):
            self.note(
                DATA.violation(
                    f"{method}() returned {short_repr(value)}, which comes through as "
                    f"{short_repr(decoded)}, for the connector's {type_name} is {expected}"
                )
            )


class _WatchedScheduler(KVConnectorScheduler):
    def __init__(self, half: KVConnectorScheduler, watch: Watch) -> None:
        self._half, self._watch = half, watch

    def check_request(self, request: EngineCoreRequest) -> None:
        self._watch.call("check_request", self._half.check_request, request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        name = "get_num_new_matched_tokens"
        result = self._watch.call(
            name, self._half.get_num_new_matched_tokens, request, num_computed_tokens
        )
        is_right = isinstance(result, tuple) and len(result) == 2
        is_right = is_right and (result[0] is None or (type(result[0]) is int and result[0] >= 0))
        expected = "(tokens >= 0 or None, whether they are loaded between steps)"
        self._watch.expect(name, result, expected, is_right=is_right)
        answer: tuple[int | None, bool] = result
        return answer

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        name = "update_state_after_alloc"
        method = self._half.update_state_after_alloc
        self._watch.call(name, method, request, block_ids, num_external_tokens)

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        name = "build_connector_meta"
        metadata = self._watch.call(name, self._half.build_connector_meta, plan)
        if metadata is not None:
            self._watch.check_data(name, metadata, "Metadata")
        return metadata

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        name = "request_finished"
        result = self._watch.call(name, self._half.request_finished, request, block_ids)
        is_right = isinstance(result, tuple) and len(result) == 2 and type(result[0]) is bool
        is_right = is_right and (result[1] is None or isinstance(result[1], Mapping))
        expected = "(whether its blocks are kept, a mapping or None)"
        self._watch.expect(name, result, expected, is_right=is_right)
        answer: tuple[bool, Mapping[str, Any] | None] = result
        return answer

    def load_ended(self, request_id: str, failed: bool) -> None:
        self._watch.call("load_ended", self._half.load_ended, request_id, failed)

    def receive(self, rank: int, message: Any) -> None:
        self._watch.call("receive", self._half.receive, rank, message)

    def set_handshakes(self, handshakes: Sequence[Any]) -> None:
        self._watch.call("set_handshakes", self._half.set_handshakes, handshakes)

    def plan_lost(self, metadata: Any) -> None:
        self._watch.call("plan_lost", self._half.plan_lost, metadata)

    def close(self) -> None:
        self._watch.call("close", self._half.close)


class _WatchedWorker(KVConnectorWorker):
    def __init__(self, half: KVConnectorWorker, watch: Watch) -> None:
        self._half, self._watch = half, watch

    @property
    def wants_layers(self) -> bool:  # type: ignore[override] # read in each step
        return self._half.wants_layers

    def register_kv_caches(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        self._watch.call("register_kv_caches", self._half.register_kv_caches, caches)

    def release_kv_caches(self) -> None:
        self._watch.call("release_kv_caches", self._half.release_kv_caches)

    def start_load_kv(self, metadata: Any) -> None:
        self._watch.call("start_load_kv", self._half.start_load_kv, metadata)

    def wait_for_layer_load(self, layer: int) -> None:
        self._watch.call("wait_for_layer_load", self._half.wait_for_layer_load, layer)

    def save_kv_layer(self, layer: int) -> None:
        self._watch.call("save_kv_layer", self._half.save_kv_layer, layer)

    def wait_for_save(self) -> None:
        self._watch.call("wait_for_save", self._half.wait_for_save)

    def get_finished(self, ended: frozenset[str]) -> FinishedTransfers:
        result = self._watch.call("get_finished", self._half.get_finished, ended)
        is_right = isinstance(result, tuple) and len(result) == 2
        result = [list(part) for part in result] if is_right else ([], [])
        is_right = is_right and all(isinstance(name, str) for name in (*result[0], *result[1]))
        self._watch.expect(
            "get_finished", result, "FinishedTransfers of request ids", is_right=is_right
        )
        return FinishedTransfers(*result)

    def load_errors(self) -> Sequence[int]:
        result = list(self._watch.call("load_errors", self._half.load_errors))
        is_right = all(type(block) is int for block in result)
        self._watch.expect("load_errors", result, "block ids", is_right=is_right)
        WITNESS.end_step(result)
        return result

    def cancel_loads(self, request_ids: Sequence[str]) -> None:
        self._watch.call("cancel_loads", self._half.cancel_loads, request_ids)

    def take_message(self) -> Any:
        message = self._watch.call("take_message", self._half.take_message)
        if message is not None:
            self._watch.check_data("take_message", message, "Message")
        return message

    def handshake(self) -> Any:
        data = self._watch.call("handshake", self._half.handshake)
        self._watch.check_data("handshake", data, "")
        return data

    def stats(self) -> Mapping[str, KVTierStats] | None:
        result: Mapping[str, KVTierStats] | None = self._watch.call("stats", self._half.stats)
        is_right = result is None or all(isinstance(s, KVTierStats) for s in result.values())
        self._watch.expect("stats", result, "KVTierStats by tier, or None", is_right=is_right)
        return result

    def close(self) -> None:
        self._watch.call("close", self._half.close)
