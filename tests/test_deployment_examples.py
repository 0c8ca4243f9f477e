"""The files in examples/deployment name routes, metrics and settings that there are."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from urllib.parse import urlsplit

import pytest
import yaml
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.processes import ROOT

from hardpoint.builtin_plugins.stats.families import (
    ADAPTER_FAMILIES,
    ENGINE_FAMILIES,
    OWN_FAMILIES,
    PLUGIN_COUNTERS,
    CounterMetricFamily,
    HistogramMetricFamily,
)
from hardpoint.configuration.loading import default_config_type, load_config

FOLDER = ROOT / "examples" / "deployment"
PAGE = (ROOT / "docs" / "deployment.md").read_text()


def test_each_file_is_on_the_page():
    for path in FOLDER.iterdir():
        assert f"(../examples/deployment/{path.name})" in PAGE


def exported() -> set[str]:
    names = {"plugin_quarantined", *(f"plugin_{name}_total" for name in PLUGIN_COUNTERS)}
    for family in (*ENGINE_FAMILIES, *OWN_FAMILIES, *ADAPTER_FAMILIES):
        if family.kind is CounterMetricFamily:
            names.add(f"{family.name}_total")
        elif family.kind is HistogramMetricFamily:
            names |= {f"{family.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
        else:
            names.add(family.name)
    return names


def test_the_dashboard_shows_metrics_that_there_are():
    text = (FOLDER / "grafana.json").read_text()
    board = json.loads(text)
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert all(expr.count("(") == expr.count(")") for expr in shown)
    assert all("hardpoint:" in expr for expr in shown)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert set(re.findall(r"hardpoint:(\w+)", text)) - exported() == set()


@pytest.fixture(scope="module")
def manifests():
    loaded = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    return {one["kind"]: one for one in loaded}


@pytest.fixture(scope="module")
def config(manifests, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "hardpoint.toml"
    path.write_text(manifests["ConfigMap"]["data"]["hardpoint.toml"])
    config, _ = load_config(path, environ={})
    return config


@pytest.fixture(scope="module")
def pod(manifests):
    return manifests["Deployment"]["spec"]["template"]["spec"]


def get(path):
    with running(FakeEngine(config=configured())) as server:
        return server.client.get(path)


def test_the_probes_name_routes_and_the_port_of_the_server(pod, config):
    (container,) = pod["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": config.server.port}]
    for probe in ("startupProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == config.server.port
        assert get(asked["path"]).status_code == 200
    assert container["livenessProbe"]["tcpSocket"]["port"] == config.server.port


def test_pods_have_time_to_drain_and_one_engine_each(pod, config):
    settings = config.server
    assert pod["terminationGracePeriodSeconds"] > settings.drain_delay + settings.drain_seconds
    assert config.parallel.data == 1
    assert settings.host == "0.0.0.0"


def test_the_service_and_the_autoscaler_find_the_pods(manifests, config):
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    service = manifests["Service"]
    assert service["spec"]["selector"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == config.server.port
    (trigger,) = manifests["ScaledObject"]["spec"]["triggers"]
    url = urlsplit(trigger["metadata"]["url"])
    assert (url.hostname, url.port) == (service["metadata"]["name"], config.server.port)
    value = get(url.path).json()
    for name in trigger["metadata"]["valueLocation"].split("."):
        value = value[name]
    assert value == 0.5
    authentication = manifests["TriggerAuthentication"]
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    (secret,) = authentication["spec"]["secretTargetRef"]
    assert manifests["Secret"]["metadata"]["name"] == secret["name"]
    assert secret["key"] in manifests["Secret"]["stringData"]


def test_the_excerpt_on_the_page_is_that_of_the_pods(pod):
    (text,) = re.findall(r"```yaml\n(spec:\n  termination.*?)```", PAGE, re.DOTALL)
    excerpt = yaml.safe_load(text)["spec"]
    (shown,), (container,) = excerpt.pop("containers"), pod["containers"]
    assert excerpt == {"terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"]}
    shown.pop("ports")
    assert shown == {name: container[name] for name in shown}


def test_the_unit_is_that_of_the_page_and_gives_the_server_its_time():
    text = (FOLDER / "hardpoint.service").read_text()
    assert text in PAGE
    unit = configparser.ConfigParser(strict=False)
    unit.read_string(text)
    service, defaults = unit["Service"], default_config_type()()
    assert service["Type"] == "notify"
    assert float(service["TimeoutStartSec"]) > defaults.engine.start_timeout_seconds
    (toml,) = re.findall(r"```toml\n(model = .*?)```", PAGE, re.DOTALL)
    shown = tomllib.loads(toml)["server"]
    assert float(service["TimeoutStopSec"]) > shown["drain_delay"] + shown["drain_seconds"]
