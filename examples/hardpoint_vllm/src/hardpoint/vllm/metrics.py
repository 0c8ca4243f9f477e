"""Metrics of an engine as vLLM's `LLM.get_metrics` returns them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Metric:
    """A metric with its labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that grows and falls."""

    value: float


@dataclass
class Vector(Metric):
    """Numbers by position."""

    values: list[int] = field(default_factory=list)


@dataclass
class Histogram(Metric):
    """Numbers of observations by upper bound."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def read_metrics(text: str) -> list[Metric]:
    """Return the metrics of a text in Prometheus's format; counters by position are vectors."""
    metrics: list[Metric] = []
    vectors: dict[str, Vector] = {}
    for metric in _samples(text):
        if not isinstance(metric, Counter) or "position" not in metric.labels:
            metrics.append(metric)
            continue
        labels = {name: text for name, text in metric.labels.items() if name != "position"}
        key = f"{metric.name}{labels}"
        if key not in vectors:
            vectors[key] = Vector(metric.name, labels)
            metrics.append(vectors[key])
        vectors[key].values.append(metric.value)
    return metrics


def _samples(text: str) -> list[Metric]:  # noqa: C901 - one branch by type
    kinds: dict[str, str] = {}
    metrics: list[Metric] = []
    histograms: dict[tuple[str, tuple[tuple[str, str], ...]], Histogram] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            kinds[name] = kind
        elif not line.startswith("#") and (sample := _SAMPLE.match(line)):
            name, labels, number = (
                sample[1],
                dict(_LABEL.findall(sample[2] or "")),
                float(sample[3]),
            )
            base, _, suffix = name.rpartition("_")
            if kinds.get(base) == "histogram":
                bound = labels.pop("le", "")
                key = base, tuple(sorted(labels.items()))
                if key not in histograms:
                    histograms[key] = Histogram(base, labels)
                    metrics.append(histograms[key])
                if suffix == "bucket":
                    histograms[key].buckets[bound] = int(number)
                elif suffix == "count":
                    histograms[key].count = int(number)
                elif suffix == "sum":
                    histograms[key].sum = number
            elif (
                kinds.get(name) == "counter" or kinds.get(name.removesuffix("_total")) == "counter"
            ):
                metrics.append(Counter(name.removesuffix("_total"), labels, int(number)))
            elif suffix != "created":
                metrics.append(Gauge(name, labels, number))
    return metrics
