"""Clients from npm: OpenAI's, the AI SDK, LangChain; each script has its expectations."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.scripted_server import WEATHER, scripted_server
from support.waiting import wait_until

SCRIPTS = Path(__file__).with_name("javascript")

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("model")) as server:
        yield server


@pytest.fixture
def run(tmp_path, node_modules):
    (tmp_path / "node_modules").symlink_to(node_modules)

    def run_script(name, *arguments):
        script = shutil.copy(SCRIPTS / f"{name}.mjs", tmp_path)
        done = subprocess.run(
            ["node", script, *arguments], capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stdout + done.stderr

    return run_script


@pytest.mark.parametrize("script", ["openai", "ai_sdk", "langchain"])
def test_with_known_content(script, scripted, run):
    run(script, scripted.url, "scripted", json.dumps(WEATHER))
    wait_until(
        lambda: not scripted.call(scripted.engine.engines.live_requests),
        what="the end of the requests that their client has left",
    )


@pytest.mark.parametrize("stores", ["yes", "no"])
def test_references_to_stored_items(stores, tmp_path, run):
    store = {"plugin": {"response_stores": {"use": "memory"}}} if stores == "yes" else {}
    with scripted_server(tmp_path, **store) as server:
        run("ai_sdk_responses", server.url, "scripted", stores, json.dumps(WEATHER))


@pytest.mark.parametrize("script", ["openai", "ai_sdk", "langchain"])
def test_with_the_demo_model(script, demo_url, run):
    run(script, demo_url, "smollm2")
