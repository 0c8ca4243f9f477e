"""Images, compose file and chart name files, options and values that exist."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.processes import ROOT
from support.source_tree import top_level_folders

FOLDER = ROOT / "deployment" / "container"
CHART = ROOT / "deployment" / "helm" / "hardpoint"
IMAGES = ("Dockerfile", "Dockerfile.cuda")


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


def test_the_images_get_every_file_that_the_package_is_built_from():
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    built_from = {folder.split("/")[0] for folder in map(str, top_level_folders())}
    assert kept == {*built_from, "src", "pyproject.toml", "setup.py", "README.md", "LICENSE"}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_the_server_without_privileges(name):
    text = (FOLDER / name).read_text()
    assert 'ENTRYPOINT ["hardpoint", "serve", "--host", "0.0.0.0"]' in text
    assert text.rindex("USER 10001") > text.rindex("FROM ")
    for path in re.findall(r"^(?:COPY|RUN .*?/source/)\s*(deployment/\S+)", text, re.MULTILINE):
        assert (ROOT / path).is_file(), path
    assert "/source/deployment/container/install" in text
    assert "HEALTHCHECK" in text


def test_compose_mounts_files_that_exist(compose):
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    ]
    assert len(mounted) == 4
    for path in mounted:
        assert (FOLDER / path).is_file(), path
    build = compose["services"]["hardpoint"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_the_server_of_compose_accepts_the_names_of_its_clients(compose):
    command = compose["services"]["hardpoint"]["command"]
    names = command[command.index("--allowed-hosts") + 1].split(",")
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert {target.split(":")[0], "localhost", "host.docker.internal"} <= set(names)
    url = compose["services"]["open-webui"]["environment"]["OPENAI_API_BASE_URL"]
    assert url == f"http://{target}/v1"


def check_health(port: int) -> int:
    environment = {"HARDPOINT_HEALTH_PORT": str(port)}
    command = [sys.executable, "-S", str(FOLDER / "health.py")]
    return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode


def test_the_health_check_passes_while_the_server_does():
    with running(FakeEngine(config=configured())) as server:
        assert check_health(server.client.base_url.port) == 0


def test_the_health_check_fails_without_a_server_and_on_its_error():
    class Unavailable(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(503)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert check_health(server.server_port) == 1
        server.shutdown()
    assert check_health(server.server_port) == 1  # nothing listens there any more


def values_of(text: str) -> set[str]:
    return set(re.findall(r"\.Values\.([A-Za-z.]+)", text))


def test_the_chart_uses_each_value_and_no_other():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    used = set()
    for path in (CHART / "templates").iterdir():
        used |= values_of(path.read_text())
    for name in used:
        value = values
        for part in name.split("."):
            assert part in value, name
            value = value[part]
    assert {name.split(".")[0] for name in used} == set(values)


def test_the_versions_of_the_chart_are_that_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    stated = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert (chart["version"], chart["appVersion"]) == (stated[1], stated[1])
