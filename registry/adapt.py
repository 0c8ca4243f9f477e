"""Adapting: logits processors that were written for other engines load as they are."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from hardpoint.plugins.component import Component
from hardpoint.plugins.kinds import Kind
from hardpoint.plugins.manifest import Source
from hardpoint.registry.adapters.base import Adapter, Foreign
from hardpoint.registry.adapters.per_request import (
    TransformersProcessor,
    adapt_factory,
    is_transformers_form,
)
from hardpoint.registry.adapters.vllm import adapt_class

from .loading import check_component, import_object, marks_hooks

_VLLM_METHODS = {"update_state", "is_argmax_invariant", "validate_params"}


def adapt(target: Any, source: Source) -> Any:
    """Return the component for something in one of the accepted foreign forms, else `target`.

    Raises:
        PluginContractError: it is nearly of such a form; the message says which and what is wrong.
    """
    if isinstance(target, ModuleType) or marks_hooks(target):
        return target
    foreign = Foreign(target, source)
    if inspect.isclass(target):
        return _adapt_class(foreign)
    if is_transformers_form(target):
        return TransformersProcessor.of(foreign)
    return adapt_factory(foreign) if callable(target) else target


def configured(target: Any, options: Any) -> Any:
    """Return an adapted component as its checked options want it; anything else as it is.

    Raises:
        ConfigError: the options do not fit it.
    """
    return target.configured(options) if adapter_of(target) else target


def adapter_of(target: Any) -> str | None:
    """Return the name of the adapter through which a component was loaded, if there is one."""
    return target.adapter if inspect.isclass(target) and issubclass(target, Adapter) else None


def load_component(kind: Kind, source: Source, target: Any = None) -> Any:
    """Return a component, imported unless `target` already is it, adapted and checked.

    Raises:
        PluginError: it cannot be imported, or does not keep its kind's contract.
    """
    if target is None:
        target = import_object(source)
    if kind.name == "logits_processors":
        target = adapt(target, source)
    check_component(target, kind, source)
    return target


def _adapt_class(foreign: Foreign) -> Any:
    target = foreign.target
    if issubclass(target, Component):
        return target
    if is_transformers_form(target):
        return TransformersProcessor.of(foreign)
    if _from_vllm(target) or (hasattr(target, "apply") and _VLLM_METHODS & set(dir(target))):
        return adapt_class(foreign)
    return adapt_factory(foreign) if _makes_callables(target) else target


def _from_vllm(target: type) -> bool:
    return any(
        base.__module__.startswith("vllm.") and base.__name__ == "LogitsProcessor"
        for base in target.__mro__
    )


def _makes_callables(target: type) -> bool:
    return any("__call__" in vars(base) for base in target.__mro__)
