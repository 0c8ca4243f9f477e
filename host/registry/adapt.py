"""Loads components, adapting those that were written for other engines or an earlier contract."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from hardpoint.host.registry.adapters.base import Adapter, ExternalProcessor
from hardpoint.host.registry.adapters.contract_1 import adapt_earlier
from hardpoint.host.registry.adapters.per_request import (
    TransformersProcessor,
    adapt_callable,
    is_transformers_form,
)
from hardpoint.host.registry.adapters.vllm import adapt_class, seems_from_vllm
from hardpoint.plugins.component import Component, Source

from .kinds import PluginKind
from .loading import check_component, import_object, inspecting, marks_hooks


def adapt(target: Any, source: Source) -> Any:
    """Return the adapter of an object in an accepted external form; other objects unchanged.

    Raises:
        PluginContractError: it nearly has such a form; the message names it and what is wrong.
    """
    is_component = inspect.isclass(target) and issubclass(target, Component)
    if is_component or isinstance(target, ModuleType) or marks_hooks(target):
        return target
    external = ExternalProcessor(target, source)
    if inspect.isclass(target):
        return _adapt_class(external)
    if is_transformers_form(target):
        return TransformersProcessor.of(external)
    return adapt_callable(external) if callable(target) else target


def configured(target: Any, options: Any) -> Any:
    """Return an adapter with its checked options applied; any other component unchanged.

    Raises:
        ConfigError: the options do not fit the adapted processor.
    """
    return target.configured(options) if adapter_of(target) else target


def adapter_of(target: Any) -> str | None:
    """Return the name of the adapter that a component is; None if it is not one."""
    return target.adapter if inspect.isclass(target) and issubclass(target, Adapter) else None


def adapter_name(target: Any, kind: PluginKind) -> str | None:
    """Return how a component is adapted, for people; None if it is not."""
    is_earlier = target.contract < kind.contract
    return f"contract {target.contract}" if is_earlier else adapter_of(target)


def load_component(kind: PluginKind, source: Source, target: Any = None) -> Any:
    """Import a component unless `target` is given, adapt and check it.

    Raises:
        PluginError: it cannot be imported, or does not keep its kind's contract.
    """
    if target is None:
        target = import_object(source)
    with inspecting(source):
        if kind.name == "logits_processors":
            target = adapt(target, source)
        target = adapt_earlier(target, kind)
        check_component(target, kind, source)
    return target


def _adapt_class(external: ExternalProcessor) -> Any:
    target = external.target
    if is_transformers_form(target):
        return TransformersProcessor.of(external)
    if seems_from_vllm(target):
        return adapt_class(external)
    return adapt_callable(external) if _makes_callables(target) else target


def _makes_callables(target: type) -> bool:
    return any("__call__" in vars(base) for base in target.__mro__)
