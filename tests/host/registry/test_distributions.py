"""Which distribution of Hardpoint is installed, and the errors about what it lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import importlib_metadata
import pytest
from support.plugins.fake import Installed

from hardpoint.errors import PluginConflictError, PluginNotFoundError
from hardpoint.host.registry import discovery
from hardpoint.host.registry.loading import import_object
from hardpoint.plugins import HardpointError
from hardpoint.plugins.component import Source

ADVICE = "to have it, pip uninstall hardpoint-core and pip install hardpoint"


class Distribution(NamedTuple):
    """An installed distribution."""

    name: str
    version: str


def point(group, name, value="hardpoint.builtin_plugins.x:X", distribution="hardpoint-core"):
    return SimpleNamespace(
        group=group,
        name=name,
        value=value,
        dist=Distribution(distribution, "1.0"),
    )


@pytest.fixture
def core(monkeypatch):
    """The entry points of hardpoint-core alone are installed; returns them."""
    points = [
        point("hardpoint.ops", "torch"),
        point("hardpoint_left_out.grammars", "llguidance"),
        point("hardpoint_left_out.tokenizers", "transformers"),
        point("hardpoint_left_out.hooks", "server"),
    ]

    def entry_points(group=None):
        return [one for one in points if group in (None, one.group)]

    monkeypatch.setattr(importlib_metadata, "entry_points", entry_points)
    return points


def test_what_is_left_out_is_no_component(core):
    assert [(found.kind, found.name) for found in discovery.discover()] == [("ops", "torch")]
    assert discovery.discover()[0].builtin
    assert not discovery.is_third_party(SimpleNamespace(distribution="hardpoint-core"))
    assert discovery.is_third_party(SimpleNamespace(distribution="hardpoint-more"))
    assert discovery.is_left_out("grammars", "llguidance")
    assert not discovery.is_left_out("grammars", "mine")
    assert discovery.left_out_names("tokenizers") == ["transformers"]


def test_two_distributions_of_the_same_files_are_refused(core):
    core.append(point("hardpoint.ops", "torch", distribution="hardpoint"))
    with pytest.raises(
        PluginConflictError, match="hardpoint and hardpoint-core are installed both"
    ):
        discovery.discover()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"tokenizer": {"use": "transformers"}}, "tokenizers/transformers"),
        ({"plugins": {"enable": ["server"]}}, "hooks/server"),
        ({"plugins": {"enable": ["grammars/llguidance"]}}, "grammars/llguidance"),
    ],
)
def test_what_names_a_component_that_is_left_out_gets_advice(core, monkeypatch, config, what):
    installed = Installed(monkeypatch)
    installed.found = [one for one in installed.found if one.kind != "tokenizers"]
    with pytest.raises(PluginNotFoundError) as caught:
        installed.resolve(**config)
    assert str(caught.value).endswith(f"; hardpoint-core has no {what}; {ADVICE}")


def test_a_component_that_a_request_names_has_advice(core, monkeypatch):
    plugins = Installed(monkeypatch).resolve()
    with pytest.raises(
        PluginNotFoundError, match=f"hardpoint-core has no grammars/llguid.*{ADVICE}"
    ):
        plugins.get("grammars", "llguidance")


def test_a_module_that_is_left_out_has_advice(core):
    value = "hardpoint.builtin_plugins.not_there:X"
    with pytest.raises(HardpointError) as caught:
        import_object(Source("x", value, "no distribution", "0", "test"))
    assert str(caught.value).endswith(
        f"hardpoint-core has no hardpoint.builtin_plugins.not_there; {ADVICE}"
    )
    with pytest.raises(HardpointError, match="there is no module 'nowhere'$"):
        import_object(Source("x", "nowhere:X", "no distribution", "0", "test"))


def test_nothing_is_left_out_of_the_whole():
    assert discovery.left_out_names("grammars") == []
    assert discovery.advice("grammars", "llguidance") == ""
    value = "hardpoint.builtin_plugins.not_there:X"
    with pytest.raises(
        HardpointError, match="there is no module 'hardpoint.builtin_plugins.not_th.*'$"
    ):
        import_object(Source("x", value, "no distribution", "0", "test"))


def test_the_version_is_that_of_the_one_that_is_installed(monkeypatch):
    versions = {"hardpoint-core": "3.0"}

    def version(name):
        if name not in versions:
            raise importlib_metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib_metadata, "version", version)
    assert discovery.installed_version() == "3.0"
    versions["hardpoint"] = "4.0"
    assert discovery.installed_version() == "4.0"
