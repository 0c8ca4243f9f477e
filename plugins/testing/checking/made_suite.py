"""The test class of a component that has no test file."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import hardpoint.testing
from hardpoint.errors import PluginLoadError
from hardpoint.host.registry.kinds import PluginKind
from hardpoint.testing.suite import ConformanceSuite

from .drawn_arguments import UndrawnError, arguments_of

NEEDS = "needs "
"""Begins the reason of a check that an author's sample would make possible."""

MODULE = "plugin_under_check"
"""Name of the module that holds the class."""

GUIDE = "docs/conformance-kit.md"
"""The page on how to give samples."""

_SAMPLES = {
    "AdapterResolverSuite": ("known", "provide"),
    "ComponentAdapterSuite": ("targets", "refused"),
    "IOProcessorSuite": ("samples", "refused"),
    "QuantizationSuite": ("samples",),
    "WeightLoaderSuite": ("write",),
}
"""Samples of suites that have a default, with which a test would pass on nothing, or fail."""


def suite_of(kind: PluginKind, target: Any) -> type[ConformanceSuite]:
    """Return the suite of a component: its `conformance_suite`, else the suite of its kind.

    Raises:
        PluginLoadError: it names something else than a suite of its kind.
    """
    suite: type[ConformanceSuite] = getattr(hardpoint.testing, kind.suite)
    named = getattr(target, "conformance_suite", None)
    if named is None:
        return suite
    module, _, name = str(named).partition(":")
    try:
        named_suite = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as cause:
        raise PluginLoadError(
            f"conformance_suite: {named!r} cannot be imported: {cause}"
        ) from cause
    if not (inspect.isclass(named_suite) and issubclass(named_suite, suite)):
        raise PluginLoadError(
            f"conformance_suite: expected the FQCN of a class that derives from "
            f"hardpoint.testing.{kind.suite}, got {named!r}"
        )
    return named_suite


def options_of(suite: type[ConformanceSuite]) -> Mapping[str, Any]:
    """Return the options that an author's suite gives, which its samples fit."""
    return suite.options if isinstance(suite.options, Mapping) else {}


def subject_of(suite: type) -> str:
    """Return the attribute of a suite of the kit that names the class under test."""
    ours = [c for c in suite.__mro__ if c.__module__.startswith("hardpoint.testing.")]
    for cls in ours:
        for name in inspect.get_annotations(cls):
            if name not in vars(cls):
                return name
    raise TypeError(f"{suite.__qualname__} declares no attribute for its class under test")


def make_suite(
    kind: PluginKind, target: Any, name: str, options: Mapping[str, Any]
) -> type[ConformanceSuite]:
    """Return a test class for a component; its arguments are drawn from their declared type.

    Attributes that only an author can give skip the tests that use them, with a reason.

    Args:
        kind: the component's.
        target: the component.
        name: under which it is enabled.
        options: as an operator sets them, with the options of the author's suite.

    Raises:
        PluginLoadError: it names something else than a suite of its kind.
    """
    suite = suite_of(kind, target)
    attributes: dict[str, Any] = {"__module__": MODULE, subject_of(suite): target}
    if isinstance(suite.options, Mapping):
        attributes["options"] = dict(options)
    if suite.name is None:
        attributes["name"] = name
    if getattr(suite, "arguments", None) is None:
        attributes |= _drawn(suite, getattr(target, "Arguments", None))
    if hasattr(suite, "place_options"):
        attributes |= _place(suite, target, options)
    for missing in _missing(suite, kind, attributes):
        attributes[missing] = _skipping(suite, missing)
    return type("TestPlugin", (suite,), attributes)


def _drawn(suite: type, declared: Any) -> dict[str, Any]:
    if not (inspect.isclass(declared) and issubclass(declared, msgspec.Struct)):
        return {}
    try:
        drawn = arguments_of(declared)
    except UndrawnError as error:
        reason = f", since no values are drawn for the field {error.field!r}, which has no default"
        return {"arguments": _skipping(suite, "arguments", reason)}
    return {} if drawn is None else {"arguments": drawn}


def _place(suite: Any, target: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    kit = getattr(hardpoint.testing, "KVStoreSuite")  # noqa: B009 - it is imported on first use
    fields = target.Options.__struct_fields__
    if suite.place_options is not kit.place_options or "path" not in fields or "path" in options:
        return {}

    def place_options(_self: Any, folder: Path) -> Mapping[str, Any]:
        return {"path": str(folder)}

    return {"place_options": place_options}


def _missing(suite: type, kind: PluginKind, attributes: Mapping[str, Any]) -> list[str]:
    kit = getattr(hardpoint.testing, kind.suite)
    declared = {
        name
        for cls in kit.__mro__
        if cls.__module__.startswith("hardpoint.testing.")
        for name in inspect.get_annotations(cls)
    }
    names = [name for name in sorted(declared - {"kind"}) if not hasattr(suite, name)]
    names += [
        name
        for name in _SAMPLES.get(kind.suite, ())
        if getattr(suite, name) is getattr(kit, name)  # an author's is another object
    ]
    return [name for name in names if name not in attributes]


def _skipping(suite: type, missing: str, reason: str = "") -> Any:
    def skip(self: Any, *_args: Any) -> Any:  # noqa: ARG001
        pytest.skip(f"{NEEDS}`{missing}`{reason}: write a test, or name a suite ({GUIDE})")

    return skip if callable(getattr(suite, missing, None)) else property(skip)
