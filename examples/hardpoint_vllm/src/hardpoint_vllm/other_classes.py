"""Replacements of vLLM's classes of kinds that are not adapted."""

from __future__ import annotations

import inspect
from typing import Any

ADAPTED = "logits processors, output parsers, IO processors, stat loggers and KV connectors"

KINDS = {
    "vllm.distributed": ("own KV connectors", "kv_connectors", "write-a-kv-connector"),
    "vllm.distributed.kv_events": (
        "event publishers",
        "kv_event_publishers",
        "write-kv-cache-plugins",
    ),
    "vllm.plugins": ("own IO processors", "io_processors", "write-an-io-processor"),
    "vllm.v1.core": ("schedulers", "schedulers", "write-a-scheduler"),
    "vllm.v1.executor": ("executors", "executors", "parallelism"),
    "vllm.v1.attention": ("attention backends", "attention_backends", "write-an-attention-backend"),
    "vllm.attention": ("attention backends", "attention_backends", "write-an-attention-backend"),
    "vllm.v1.spec_decode": ("speculators", "speculators", "write-a-speculator"),
    "vllm.v1.structured_output": ("grammar backends", "grammars", "write-a-grammar-backend"),
    "vllm.v1.metrics": ("own stat loggers", "stat_sinks", "metrics"),
    "vllm.model_executor": ("models", "models", "write-a-model"),
    "vllm.model_executor.layers.quantization": (
        "quantizations",
        "quantizations",
        "write-a-quantization-scheme",
    ),
    "vllm.entrypoints": ("server extensions", "hooks", "write-a-route"),
    "vllm.lora": ("adapter resolvers", "adapter_resolvers", "write-an-adapter-resolver"),
}
"""By package of vLLM's: its classes, the kind in their place, and the page about that. A package
that is not installed hides the ones in it."""


def why_not_in(module: str) -> str:
    """Return why classes of a module of vLLM's cannot be used; empty if it may have others."""
    packages = [package for package in KINDS if f"{module}.".startswith(f"{package}.")]
    if not packages:
        return ""
    classes, kind, page = KINDS[max(packages, key=len)]
    return (
        f"vLLM's {classes} cannot be used, with vLLM installed or without: only {ADAPTED} of "
        f"other packages are adapted. The kind {kind} takes their place (docs/{page}.md); "
        f"docs/migrate-from-vllm.md lists the differences"
    )


def why_not_adapted(target: Any) -> str:
    """Return why a class that derives from vLLM's cannot be used; empty if it may be another."""
    bases = target.__mro__ if inspect.isclass(target) else ()
    return next(filter(None, (why_not_in(base.__module__) for base in bases)), "")
