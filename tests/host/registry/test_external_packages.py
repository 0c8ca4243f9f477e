"""Plugins in packages of their own: errors about their names give the package to install."""

from __future__ import annotations

import re
import sys
import tomllib
from types import ModuleType

import pytest
from support.processes import ROOT

from hardpoint import LLM, SamplingParams
from hardpoint.errors import (
    HardpointError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
)
from hardpoint.host.registry.adapters.external_packages import EXTERNAL_PACKAGES
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.testing import scripted_config
from hardpoint.typed import convert

INSTALL = "install the package {0} (pip install ./examples/{1} in a clone of"
XGRAMMAR = INSTALL.format("hardpoint-xgrammar", "hardpoint_xgrammar")
VLLM = INSTALL.format("hardpoint-vllm", "hardpoint_vllm")


def resolve(*enable, **config):
    plugins = {"plugins": {"enable": list(enable)}}
    return resolve_plugins(convert(plugins | config, EngineConfig, path=""))


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
        resolve(name)
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
        resolve("zgrammar")
    assert "pip install" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.v1.sample.logits_processor import LogitsProcessor as Thing",
        "from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1 as Thing",
        "import vllm; Thing = vllm.LLM",
    ],
)
def test_code_that_imports_vllm(tmp_path, monkeypatch, source):
    (tmp_path / "reading_vllm.py").write_text(f"{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginLoadError) as error:
        resolve("reading_vllm:Thing")
    message = str(error.value)
    assert "of vLLM's classes, processors, parsers, stat loggers and connectors run: " in message
    assert VLLM in message
    assert "docs/migrate-from-vllm.md" in message
    assert "reading_vllm" not in sys.modules


def boost(output_ids, logits):
    return logits


class Batch:
    def apply(self, logits):
        return logits


@pytest.mark.parametrize("name", ["boost", "Batch"])
def test_objects_that_may_be_for_vllm(name):
    with pytest.raises(PluginContractError) as error:
        resolve(f"{__name__}:{name}")
    assert f"if it is a logits processor for vLLM, {VLLM}" in str(error.value)


@pytest.mark.parametrize("config", [{}, {"scheduler": {"use": "own_module:Mine"}}])
def test_classes_of_an_installed_vllm(monkeypatch, config):
    base = type("Scheduler", (), {"__module__": "vllm.v1.core.sched.scheduler"})
    module = ModuleType("own_module")
    module.Mine = type("Mine", (base,), {"__module__": "own_module"})
    monkeypatch.setitem(sys.modules, "own_module", module)
    with pytest.raises(PluginContractError) as error:
        resolve(*([] if config else ["own_module:Mine"]), **config)
    assert "of vLLM's classes, processors, parsers, stat loggers and connectors run: " in str(
        error.value
    )
    assert "docs/migrate-from-vllm.md names the kinds" in str(error.value)


def test_pages_that_the_package_names_exist(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "hardpoint_vllm" / "src")
    from hardpoint_vllm import other_classes

    text = "".join(other_classes.why_not_in(module) for module in other_classes.KINDS)
    pages = set(re.findall(r"docs/[\w-]+\.md", text))
    assert len(pages) > 10
    assert all((ROOT / page).is_file() for page in pages)
