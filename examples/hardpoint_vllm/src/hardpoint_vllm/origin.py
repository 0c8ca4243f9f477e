"""The base class of vLLM from which a class derives, and the methods that the class overrides."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any


def is_of_vllm(base: type) -> bool:
    """Return whether a class is defined by vLLM, or by a module that stands in for one of it."""
    return base.__module__.startswith(("vllm.", "hardpoint_vllm."))


def vllm_base(target: Any, names: Collection[str]) -> str:
    """Return the name of the nearest base class of vLLM's among names; empty if there is none."""
    bases = target.__mro__ if inspect.isclass(target) else ()
    return next(
        (base.__name__ for base in bases if base.__name__ in names and is_of_vllm(base)), ""
    )


def is_overridden(target: type, method: str) -> bool:
    """Return whether a class, or a base of its package, defines a method."""
    owner = next((base for base in target.__mro__ if method in vars(base)), None)
    return owner is not None and not is_of_vllm(owner)
