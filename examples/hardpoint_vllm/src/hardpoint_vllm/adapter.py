"""The component adapter: recognizes vLLM's classes by base class and signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hardpoint.errors import PluginContractError
from hardpoint.plugins import ComponentAdapter, Phase
from hardpoint.plugins.component import Source
from hardpoint.toolkit.logits_calls import (
    AdaptedProcessor,
    ExternalProcessor,
    signature_text,
)

from .batch_classes import V1_METHODS, VLLMV1Class
from .callables import adapt_callable
from .connectors import adapt_connector, is_connector
from .io_processors import adapt_processor, is_processor
from .other_classes import why_not_adapted
from .parsers import adapt_parser, form_of
from .slot_classes import VLLMV2Class
from .stand_ins import is_missing, stand_ins
from .stat_loggers import adapt_logger, is_logger

if TYPE_CHECKING:
    from hardpoint.plugins.component.base import Component

_METHODS = {*V1_METHODS, "validate_params", "add_request", "apply_staged_writes"} - {"apply"}


class VLLM(ComponentAdapter):
    """Adapts vLLM's plugin classes, with vLLM installed or without.

    These are logits processors, output parsers, IO processors, stat loggers and KV connectors.
    Classes of other kinds are refused with the kind that replaces them.
    """

    contract = 1

    @classmethod
    def matches(cls, target: Any, kind: str | None) -> bool:
        """Return whether it is one of vLLM's classes, or a callable in the form of its V0."""
        if _adaptation(target) or why_not_adapted(target):
            return True
        if kind not in (None, "logits_processors"):
            return False
        if not inspect.isclass(target):
            return callable(target)
        return seems_from_vllm(target) or _makes_callables(target)

    @classmethod
    def adapt(cls, target: Any, source: Source) -> type[Component]:
        """Return the component.

        Raises:
            PluginContractError: it is of another kind, or nearly has one of the forms.
        """
        if (adapt := _adaptation(target)) is not None:
            return adapt(target, source)
        external = ExternalProcessor(target, source)
        if inspect.isclass(target) and seems_from_vllm(target):
            return adapt_class(external)
        if reason := why_not_adapted(target):
            raise PluginContractError(f"{source}: {reason}")
        return adapt_callable(external)

    @classmethod
    def stand_ins(cls, module: str) -> AbstractContextManager[None] | None:
        """Return the stand-ins for vLLM's modules, if vLLM is not installed."""
        return stand_ins() if is_missing(module) else None


_ADAPTATIONS = (
    (form_of, adapt_parser),
    (is_processor, adapt_processor),
    (is_logger, adapt_logger),
    (is_connector, adapt_connector),
)


def _adaptation(target: Any) -> Callable[[Any, Source], type[Component]] | None:
    """Return the function that adapts a class with a base class of vLLM; None for other objects."""
    return next((adapt for recognizes, adapt in _ADAPTATIONS if recognizes(target)), None)


def seems_from_vllm(target: type) -> bool:
    """Return whether a class has vLLM's base class, or `apply` and another name of its forms."""
    if any(
        base.__module__.startswith("vllm.") and base.__name__ == "LogitsProcessor"
        for base in target.__mro__
    ):
        return True
    return hasattr(target, "apply") and bool(
        _METHODS & set(dir(target)) or _first_parameter(target) == "vllm_config"
    )


def adapt_class(external: ExternalProcessor) -> type[AdaptedProcessor]:
    """Return the component for a class for which `seems_from_vllm` is true.

    Raises:
        PluginContractError: the class is of neither form; the message has the differences.
    """
    target = external.target
    missing = [name for name in V1_METHODS if not callable(getattr(target, name, None))]
    is_v1 = not missing and _takes(target, 3)
    is_v2 = not is_v1 and _takes(target, 2) and _takes(getattr(target, "apply", None), 3)
    if not is_v1 and not is_v2:
        lacks = f"it lacks {', '.join(missing)}, and " if missing else ""
        raise PluginContractError(
            f"{external.source}: it seems to be a logits processor for vLLM, but of no form that "
            f"is known: {lacks}its constructor is {signature_text(target)}; a V1 class has "
            f"{', '.join(V1_METHODS)} and the constructor (vllm_config, device, is_pin_memory), "
            f"a V2 class has apply(logits, ctx) and the constructor (vllm_config, req_states)"
        )
    if unfinished := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginContractError(f"{external.source}: it lacks {', '.join(unfinished)}")
    validate = getattr(target, "validate_params", None)
    if validate is not None and not _takes(validate, 1):
        raise PluginContractError(
            f"{external.source}: its validate_params must be a classmethod or staticmethod that "
            f"takes (params), this one is {signature_text(validate)}"
        )
    if is_v2:
        return VLLMV2Class.of(external)
    invariant = _argmax_invariant(target)
    phase = Phase.TRUNCATE if invariant else Phase.BIAS
    return VLLMV1Class.of(external, argmax_invariant=invariant, phase=phase)


def _takes(call: Any, count: int) -> bool:
    """Return whether a callable accepts `count` positional arguments."""
    try:
        inspect.signature(call).bind(*range(count))
    except ValueError:
        return True  # no signature; a wrong one shows when it is called
    except TypeError:
        return False
    return True


def _first_parameter(target: type) -> str:
    try:
        return next(iter(inspect.signature(target).parameters), "")
    except (TypeError, ValueError):
        return ""


def _argmax_invariant(target: Any) -> bool:
    """Return whether a class is argmax-invariant; False, which is always safe, if that fails.

    The phase must be known before any object is constructed, but the method belongs to instances.
    It is called on an uninitialised object, since it returns a constant by contract.
    """
    try:
        return object.__new__(target).is_argmax_invariant() is True
    except Exception:
        return False


def _makes_callables(target: type) -> bool:
    return any("__call__" in vars(base) for base in target.__mro__)
