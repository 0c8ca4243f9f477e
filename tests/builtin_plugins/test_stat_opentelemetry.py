"""The OpenTelemetry sink: a span per completion, within the trace of its caller."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.process.harness import process_config
from support.spans import exported_spans
from support.waiting import wait_until

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.builtin_plugins.stats import opentelemetry
from hardpoint.builtin_plugins.stats.opentelemetry import OpenTelemetrySink
from hardpoint.errors import PluginError
from hardpoint.plugins import ConfigError, IterationStats, StatSinkContext
from hardpoint.plugins.requests.stats import FinishedRequest, RequestMetrics
from hardpoint.testing import scripted_config

TRACE = "a" * 32
PARENT = {"traceparent": f"00-{TRACE}-{'b' * 16}-01", "tracestate": "acme=1"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
PROGRAM = {
    "stats": {"sinks": ["opentelemetry"]},
    "plugin": {"opentelemetry": {"provider": "program"}},
}


@pytest.fixture
def spans():
    exported = exported_spans()
    exported.clear()
    return exported


def sink(**options):
    return OpenTelemetrySink(
        StatSinkContext(
            name="opentelemetry",
            options=OpenTelemetrySink.Options(**options),
            clock=time.monotonic,
            model="tiny",
        )
    )


def finished(headers=None, reason="stop", metrics=None, **fields):
    numbers = {"num_prompt_tokens": 5, "num_generation_tokens": 3, "e2e_seconds": 1.0}
    return FinishedRequest(
        request_id="r",
        finish_reason=reason,
        tags={},
        metrics=RequestMetrics(**numbers | (metrics or {})),
        trace_headers=headers,
        **fields,
    )


def record(spans, *requests, engine=0):
    recorder = sink(provider="program")
    recorder.record(IterationStats(engine_index=engine, finished=list(requests)))
    return [span for span in spans if span.kind is trace.SpanKind.SERVER], list(spans)


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


STAGES = {
    "queue_seconds": 0.1,
    "prefill_seconds": 0.2,
    "decode_seconds": 0.5,
    "time_to_first_token": 0.4,
}


def test_a_request_is_a_span_with_its_stages(spans):
    metrics = STAGES | {"num_cached_tokens": 4, "num_resumes": 1, "num_preemptions": 2}
    request = finished(PARENT, metrics=metrics, max_tokens=9, n=2, index=1)
    (span,), exported = record(spans, request, engine=3)
    assert span.name == "text_completion tiny"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "b" * 16
    assert span.context.trace_state.get("acme") == "1"
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "hardpoint",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.time_to_first_chunk": 0.4,
        "hardpoint.completion_index": 1,
        "hardpoint.engine": 3,
        "hardpoint.num_external_tokens": 0,
        "hardpoint.num_preemptions": 2,
        "hardpoint.num_resumes": 1,
    }
    assert seconds(span) == pytest.approx(1.0, abs=1e-6)
    stages = [stage for stage in exported if stage is not span]
    assert [(stage.name, round(seconds(stage), 6)) for stage in stages] == [
        ("queue", 0.1),
        ("prefill", 0.2),
        ("decode", 0.5),
    ]
    assert all(stage.parent.span_id == span.context.span_id for stage in stages)
    queue, prefill, decode = stages
    assert queue.end_time == prefill.start_time
    assert (decode.start_time - span.start_time) / 1e9 == pytest.approx(0.4, abs=1e-6)


@pytest.mark.parametrize("reason", ["error", "timeout"])
def test_a_failure_is_one(spans, reason):
    (span,), exported = record(spans, finished(reason=reason))
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.attributes["error.type"] == reason
    assert len(exported) == 1  # it reached no stage


@pytest.mark.parametrize(
    "headers", [None, {}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-b-01"}]
)
def test_without_a_parent_it_begins_a_trace(spans, headers):
    (span,), _ = record(spans, finished(headers))
    assert span.parent is None


def test_what_its_caller_does_not_sample_is_no_span(spans):
    headers = {"traceparent": f"00-{TRACE}-{'b' * 16}-00"}
    _, exported = record(spans, finished(headers, metrics=STAGES))
    assert exported == []


def test_stages_lie_within_the_request(spans):
    late = STAGES | {"time_to_first_token": 0.05, "decode_seconds": 9.0}
    (span,), exported = record(spans, finished(metrics=late))
    assert all(
        span.start_time <= stage.start_time <= stage.end_time <= span.end_time for stage in exported
    )


def test_a_model_makes_them(spans, scripted):
    with LLM(config=scripted_config(scripted, PROGRAM)) as llm:
        llm.generate("say abc", GREEDY, trace_headers=PARENT)
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"queue", "prefill", "decode", f"text_completion {llm.config.model}"}
    assert {f"{span.context.trace_id:032x}" for span in by_name.values()} == {TRACE}


def test_a_request_that_goes_on_elsewhere_stays_one_span(spans, scripted, tmp_path):
    held = tmp_path / "held"
    held.touch()
    slow = {"plugins": {"enable": ["support.plugins.slow:Slow"]}, "parallel": {"data": 2}}
    llm = AsyncLLM(config=process_config(scripted, PROGRAM | slow))
    arguments = {"slow": {"seconds": 0.1, "held": str(held)}}

    async def run():
        params = SamplingParams(
            temperature=0.0, max_tokens=300, ignore_eos=True, plugin_args=arguments
        )
        outputs = llm.generate("say abc", params, trace_headers=PARENT)
        await anext(outputs)
        (rank,) = [load.rank for load in (await llm.engines.load()).engines if load.in_flight]
        await llm.engines.retire([rank], drain_seconds=0.0)
        held.unlink()
        return [output async for output in outputs][-1]

    with contextlib.closing(llm):
        output = asyncio.run(run())
    assert output.num_resumes == 1
    (span,) = [s for s in spans if s.kind is trace.SpanKind.SERVER]
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.attributes["hardpoint.num_resumes"] == 1


class Collector(BaseHTTPRequestHandler):
    """Keeps the spans that it is sent."""

    received: list = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        Collector.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def test_spans_reach_a_collector(monkeypatch):
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setattr(opentelemetry, "_CLOSE_SECONDS", 60.0)
    Collector.received = []
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        recorder = sink(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces")
        recorder.record(IterationStats(finished=[finished(PARENT, metrics=STAGES)]))
        recorder.close()
        recorder.close()
        wait_until(lambda: Collector.received, what="the spans")
        server.shutdown()
        thread.join()
    ((path, request),) = Collector.received
    (resource,) = request.resource_spans
    named = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (path, named["service.name"]) == ("/v1/traces", "hardpoint")
    (scope,) = resource.scope_spans
    assert {span.name for span in scope.spans} == {
        "queue",
        "prefill",
        "decode",
        "text_completion tiny",
    }


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_that_is_gone_does_not_hold_up_the_end(protocol, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "300")
    monkeypatch.setattr(opentelemetry, "_CLOSE_SECONDS", 0.2)
    recorder = sink(endpoint="http://127.0.0.1:9", protocol=protocol)
    recorder.record(IterationStats(finished=[finished()]))
    began = time.monotonic()
    recorder.close()
    assert time.monotonic() - began < 60.0  # the library tries longer
    recorder.record(IterationStats(finished=[finished()]))


def test_wrong_options():
    with pytest.raises(ConfigError) as refused:
        sink(endpoint="localhost:4317")
    assert str(refused.value) == (
        "plugin.opentelemetry.endpoint: expected a URL that begins with http:// or https://, got "
        "'localhost:4317'"
    )


def test_a_program_that_has_set_no_provider(monkeypatch):
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    with pytest.raises(ConfigError, match=r"^plugin.opentelemetry.provider: \"program\" needs"):
        sink(provider="program")


def test_a_library_that_is_not_installed_is_named(scripted, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(PluginError, match=r"pip install '\S*hardpoint\[opentelemetry\]'"):
        LLM(config=scripted_config(scripted, {"stats": {"sinks": ["opentelemetry"]}}))
