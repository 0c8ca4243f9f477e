"""Plugins in packages of their own: errors about their names give the package to install."""

from __future__ import annotations

import tomllib

import pytest
from support.processes import ROOT

from hardpoint import LLM, SamplingParams
from hardpoint.errors import HardpointError, PluginNotFoundError
from hardpoint.host.registry.external_packages import EXTERNAL_PACKAGES
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.testing import scripted_config
from hardpoint.typed import convert

INSTALL = "install the package {0} (pip install ./examples/{1} in a clone of"
XGRAMMAR = INSTALL.format("hardpoint-xgrammar", "hardpoint_xgrammar")


@pytest.mark.parametrize("package", EXTERNAL_PACKAGES, ids=lambda package: package.distribution)
def test_the_table_agrees_with_the_packages(package):
    project = tomllib.loads((ROOT / package.folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == package.distribution
    assert {
        f"{group.removeprefix('hardpoint.')}/{name}"
        for group, entries in project["entry-points"].items()
        for name in entries
    } == set(package.components)


@pytest.mark.parametrize("name", ["xgrammar", "grammars/xgrammar"])
def test_enabling_by_name(name):
    with pytest.raises(PluginNotFoundError) as error:
        resolve_plugins(convert({"plugins": {"enable": [name]}}, EngineConfig, path=""))
    assert XGRAMMAR in str(error.value)


@pytest.mark.parametrize("config", [{"grammar": {"use": "xgrammar"}}, {}])
def test_naming_in_a_setting_or_a_request(scripted, config):
    backend = {} if config else {"backend": "xgrammar"}
    params = SamplingParams(structured={"choice": ["a"], **backend})
    with (
        pytest.raises(HardpointError) as error,
        LLM(config=scripted_config(scripted, config)) as llm,
    ):
        llm.generate("x", params)
    assert XGRAMMAR in str(error.value)
    assert 'add "xgrammar" to plugins.enable' in str(error.value)


def test_other_unknown_names_have_no_such_hint():
    with pytest.raises(PluginNotFoundError) as error:
        resolve_plugins(convert({"plugins": {"enable": ["zgrammar"]}}, EngineConfig, path=""))
    assert "pip install" not in str(error.value)
