"""Every built-in stat sink and KV event publisher passes the public conformance kit."""

from __future__ import annotations

import msgspec
import zmq
from support.searching import kit_examples, searches_long
from support.spans import exported_spans

from hardpoint.builtin_plugins.kv_cache.events import NullPublisher, ZmqPublisher
from hardpoint.builtin_plugins.stats.log import LogSink
from hardpoint.builtin_plugins.stats.opentelemetry import OpenTelemetrySink
from hardpoint.builtin_plugins.stats.prometheus import PrometheusSink
from hardpoint.plugins import KVEventBatch
from hardpoint.testing import KVEventPublisherSuite, StatSinkSuite

pytest_plugins = ["hardpoint.testing"]


class TestLogSink(StatSinkSuite):
    examples = kit_examples()
    sink = LogSink


class TestPrometheusSink(StatSinkSuite):
    examples = kit_examples(0.25) if searches_long() else 0.03  # each makes a registry
    sink = PrometheusSink


class TestOpenTelemetrySink(StatSinkSuite):
    examples = kit_examples()
    sink = OpenTelemetrySink
    options = {"provider": "program"}

    def setup_method(self):
        exported_spans().clear()


class TestNullPublisher(KVEventPublisherSuite):
    examples = kit_examples()
    publisher = NullPublisher


class TestZmqPublisher(KVEventPublisherSuite):
    examples = kit_examples()
    publisher = ZmqPublisher
    options = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    options |= {"buffer_steps": 100}

    def subscribe(self, publisher):
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.connect(publisher.endpoint)
        socket.subscribe(b"")

        def received():
            while socket.poll(0):
                yield msgspec.msgpack.decode(socket.recv_multipart()[-1], type=KVEventBatch)

        return received
