"""The tracer provider of a test program, which keeps its last spans."""

from __future__ import annotations

import collections
import functools

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult


class LastSpans(SpanExporter):
    """Keeps the spans that ended last."""

    def __init__(self):
        self.spans = collections.deque(maxlen=64)

    def export(self, spans):
        self.spans += spans
        return SpanExportResult.SUCCESS


@functools.cache
def exported_spans() -> collections.deque:
    """Return the spans of this process; a program can set its provider only once."""
    exporter = LastSpans()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter.spans
