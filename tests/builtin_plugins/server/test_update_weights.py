"""Other weights over HTTP: on the admin address, from allowed folders, with their versions."""

from __future__ import annotations

import shutil

import pytest
from support.adapters import write_two_models
from support.http_server import running

from hardpoint import AsyncLLM

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
    "/v1/completions": {"prompt": "ab"},
    "/inference/v1/generate": {"token_ids": [1, 2, 3]},
    "/v1/responses": {"input": "ab"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    base = tmp_path_factory.mktemp("weights")
    first, second = write_two_models(base)
    (base / "allowed").mkdir()
    shutil.copy(second / "model.safetensors", base / "allowed" / "step.safetensors")
    (base / "allowed" / "link.safetensors").symlink_to(first / "model.safetensors")
    server = {
        "port": 0,
        "access_log": "off",
        "admin": f"unix:{base}/admin.sock",
        "weight_folders": [str(base / "allowed")],
    }
    config = {
        "model": str(first),
        "kv_cache": {"num_blocks": 64},
        "server": server,
        "stats": {"sinks": ["prometheus"]},
    }
    with running(AsyncLLM(config=config)) as server:
        server.base = base
        yield server


def update(server, path, **fields):
    return server.admin.post("/weights/update", json={"path": str(path), **fields})


def versions(server, route):
    """The versions of an answer's tokens."""
    limit = {"max_output_tokens": 16} if route == "/v1/responses" else {"max_tokens": 5}
    if route == "/inference/v1/generate":
        limit = {"sampling_params": limit}
    answer = server.post(route, ROUTES[route] | limit).json()
    assert "error" not in answer or answer["error"] is None, answer
    (choice,) = answer.get("choices", [answer])
    return [run["version"] for run in choice.get("weight_runs", ())]


def test_users_see_the_version(server):
    allowed = server.base / "allowed"
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["weight_version"] == "0"
    answer = update(server, allowed / "step.safetensors", version="step 7")
    assert (answer.status_code, answer.json()) == (200, {"weight_version": "step 7"})
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["weight_version"] == "step 7"
    for route in ROUTES:
        assert versions(server, route) == ["step 7"]
    assert 'version="step 7"} 1' in server.client.get("/metrics").text
    assert server.client.post("/weights/update", json={}).status_code == 404


def test_paths_outside_of_the_folders_are_refused(server):
    allowed = server.base / "allowed"
    wrong = {
        "step.safetensors": (400, "path: expected an absolute path, got 'step.safetensors'"),
        f"{allowed}/../first": (403, "path: expected a path in one of server.weight_folders"),
        f"{allowed}/link.safetensors": (403, "path: expected a path in one of server.weight_f"),
        f"{allowed}/none": (400, "none: expected a safetensors file, there is none"),
        "": (400, "path: expected an absolute path, got ''"),
    }
    for path, (status, message) in wrong.items():
        answer = update(server, path, version="x")
        assert message in answer.json()["error"]["message"]
        assert answer.status_code == status
    answer = update(server, allowed / "step.safetensors", version="x", mode="soon")
    assert answer.status_code == 400
    assert "mode" in answer.json()["error"]["message"]
