"""The distribution that the built-in plugins come from."""

from __future__ import annotations

from types import SimpleNamespace

import importlib_metadata
import pytest

from hardpoint.errors import HardpointError
from hardpoint.host.registry import discovery
from hardpoint.host.registry.loading import import_object
from hardpoint.plugins.component import Source


def test_third_parties_are_of_other_distributions():
    assert not discovery.is_third_party(SimpleNamespace(distribution="hardpoint"))
    assert discovery.is_third_party(SimpleNamespace(distribution="hardpoint-more"))


def test_a_module_that_is_absent_is_named():
    value = "hardpoint.builtin_plugins.not_there:X"
    with pytest.raises(
        HardpointError, match="there is no module 'hardpoint.builtin_plugins.not_th.*'$"
    ):
        import_object(Source("x", value, "no distribution", "0", "test"))
    with pytest.raises(HardpointError, match="there is no module 'nowhere'$"):
        import_object(Source("x", "nowhere:X", "no distribution", "0", "test"))


def test_the_version_is_that_of_the_distribution():
    assert discovery.installed_version() == importlib_metadata.version("hardpoint")
