"""The stat sink that exports a span per request, by OpenTelemetry, which is optional."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from hardpoint import plugins
from hardpoint.errors import install_command
from hardpoint.plugins import (
    ConfigError,
    FinishedRequest,
    IterationStats,
    StatSink,
    StatSinkContext,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_CLOSE_SECONDS = 2.0
"""How long the last spans may take at the end: a collector that is gone is tried for longer."""

_FAILED = frozenset({"error", "timeout"})
_NS = 1_000_000_000


class OpenTelemetrySink(StatSink):
    """Exports a span for each completion, with a child span for each of its stages.

    Spans are made when a completion ends, and sent by another thread; the library drops late
    ones. A `traceparent` among the request's trace headers is the parent.
    Sampling is the library's, by its environment variables (`OTEL_TRACES_SAMPLER`).
    """

    contract = 1
    expected_failures = dict.fromkeys(
        ["test_memory", "test_resources"],
        "without a collector spans wait, OTEL_BSP_MAX_QUEUE_SIZE of them at most",
    )

    class Options(plugins.Options):
        """Destination of spans; None follows the environment (`OTEL_EXPORTER_OTLP_...`).

        Attributes:
            endpoint: URL of the collector; of "http/protobuf" with the path, which usually is
                /v1/traces.
            protocol: protocol that OTLP is sent by.
            provider: "own" makes a tracer provider with an exporter of OTLP; "program" takes that
                which the program has set (`opentelemetry.trace.set_tracer_provider`), and leaves
                it open.
        """

        endpoint: str | None = None
        protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
        provider: Literal["own", "program"] = "own"

    options: Options

    def __init__(self, context: StatSinkContext) -> None:
        """Open the exporter; no collector is asked yet.

        Raises:
            ConfigError: an option is wrong, or the program has set no tracer provider.
            ImportError: the library OpenTelemetry is not installed.
        """
        super().__init__(context)
        self._model = context.model_name or context.model
        try:
            from opentelemetry import trace  # noqa: PLC0415 - optional
            from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

            self._exporter = self._open_exporter() if self.options.provider == "own" else None
            self._opened = self._open_provider()
        except ImportError as cause:
            raise ImportError(
                f"it needs the library OpenTelemetry: {install_command('opentelemetry')} ({cause})"
            ) from cause
        self._trace, self._closed = trace, False
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = self._provider().get_tracer("hardpoint")

    def _provider(self) -> Any:
        if self._opened is not None:
            return self._opened
        provider = self._trace.get_tracer_provider()
        if isinstance(provider, self._trace.ProxyTracerProvider):
            raise ConfigError(
                f'plugin.{self.name}.provider: "program" needs a tracer provider, which the '
                "program has to set before it opens the model"
            )
        return provider

    def _open_provider(self) -> TracerProvider | None:
        if self._exporter is None:
            return None
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        named = Resource.create({"service.name": "hardpoint"})
        resource = named.merge(OTELResourceDetector().detect())  # the environment's name wins
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(self._exporter))
        return provider

    def _open_exporter(self) -> SpanExporter:
        endpoint = self.options.endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"plugin.{self.name}.endpoint: expected a URL that begins with http:// or "
                f"https://, got {endpoint!r}"
            )
        if self.options.protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter  # noqa: PLC0415

            return trace_exporter.OTLPSpanExporter(endpoint=endpoint)
        from opentelemetry.exporter.otlp.proto.http import (  # noqa: PLC0415
            trace_exporter as over_http,
        )

        return over_http.OTLPSpanExporter(endpoint=endpoint)

    def record(self, stats: IterationStats) -> None:
        """Make the spans of the completions that ended."""
        if stats.finished and not self._closed:
            now = time.time_ns()
            for request in stats.finished:
                self._export(request, stats.engine_index, now)

    def _export(self, request: FinishedRequest, engine: int, end: int) -> None:
        metrics = request.metrics
        headers = request.trace_headers
        parent = None if headers is None else self._propagator.extract(headers)
        start = end - _nanoseconds(metrics.e2e_seconds)
        span = self._tracer.start_span(
            f"text_completion {self._model}",
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            attributes=self._attributes(request, engine),
            start_time=start,
        )
        if span.is_recording():
            if request.finish_reason in _FAILED:
                span.set_attribute("error.type", request.finish_reason)
                span.set_status(self._trace.StatusCode.ERROR)
            context = self._trace.set_span_in_context(span)
            for name, begin, finish in _stages(request, start, end):
                child = self._tracer.start_span(name, context=context, start_time=begin)
                child.end(finish)
        span.end(end)

    def _attributes(self, request: FinishedRequest, engine: int) -> dict[str, Any]:
        metrics = request.metrics
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "hardpoint",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.finish_reasons": (request.finish_reason,),
            "gen_ai.usage.input_tokens": metrics.num_prompt_tokens,
            "gen_ai.usage.output_tokens": metrics.num_generation_tokens,
            "gen_ai.usage.cache_read.input_tokens": metrics.num_cached_tokens,
            "hardpoint.engine": engine,
            "hardpoint.num_external_tokens": metrics.num_external_tokens,
            "hardpoint.num_preemptions": metrics.num_preemptions,
            "hardpoint.num_resumes": metrics.num_resumes,
        }
        if request.n > 1:
            attributes["gen_ai.request.choice.count"] = request.n
            attributes["hardpoint.completion_index"] = request.index
        if request.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = request.max_tokens
        if metrics.time_to_first_token is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = metrics.time_to_first_token
        return attributes

    def close(self) -> None:
        """Send the remaining spans for a moment; drop the rest."""
        if self._closed:
            return
        self._closed = True
        if self._opened is not None and self._exporter is not None:
            closing = threading.Thread(target=self._opened.shutdown, name="spans", daemon=True)
            closing.start()
            closing.join(_CLOSE_SECONDS)
            if closing.is_alive():
                self._exporter.shutdown()  # it tries no more


def _stages(request: FinishedRequest, start: int, end: int) -> list[tuple[str, int, int]]:
    """Return the stages of a completion: their names and times, in nanoseconds.

    Their durations are the engine's. They lie around the time of the first token, which the
    frontend knows, since the engine's clock may be another one.
    """
    metrics = request.metrics
    if metrics.time_to_first_token is None:
        return []
    first_token = min(start + _nanoseconds(metrics.time_to_first_token), end)
    stages: list[tuple[str, int, int]] = []
    begin = first_token
    for name, seconds in (("prefill", metrics.prefill_seconds), ("queue", metrics.queue_seconds)):
        if seconds is None:
            break
        before = max(begin - _nanoseconds(seconds), start)
        stages.insert(0, (name, before, begin))
        begin = before
    if metrics.decode_seconds is not None:
        last_token = min(first_token + _nanoseconds(metrics.decode_seconds), end)
        stages.append(("decode", first_token, last_token))
    return stages


def _nanoseconds(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * _NS)
