"""Forms of a route's path: trailing slashes, and base URLs without `/v1` or with two."""

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import user

from hardpoint.builtin_plugins.server.access.keys import KeyStore, installed

KEY = "right-0123456789abcdef"


@pytest.fixture(scope="module")
def fake():
    with running(FakeEngine(config=configured())) as server:
        yield server


@pytest.fixture(scope="module")
def keyed():
    keys = installed(KeyStore(None, KEY))
    with running(FakeEngine(config=configured()), authenticators=[keys]) as server:
        yield server


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "/chat/completions",
        "/chat/completions/",
        "/v1/v1/chat/completions",
    ],
)
def test_forms_of_a_path(fake, path):
    response = fake.post(path, {"messages": user("hi")})
    assert response.status_code == 200, response.text
    assert response.json()["object"] == "chat.completion"


@pytest.mark.parametrize("path", ["/models", "/v1/models/", "/models/"])
def test_forms_of_the_list_of_models(fake, path):
    assert fake.client.get(path).json()["object"] == "list"


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/chat/completions", "/models"])
def test_every_form_needs_the_key(keyed, path):
    body = {"messages": user("hi")}
    assert keyed.client.post(path, json=body).status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    expected = 405 if path == "/models" else 200
    assert keyed.client.post(path, json=body, headers=headers).status_code == expected


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing/", "/v1/chat/completion"])
def test_a_path_without_a_route_is_not_found_with_any_body(fake, path):
    headers = {"content-type": "text/plain"}
    assert fake.client.post(path, content=b"x", headers=headers).status_code == 404
    response = fake.client.post("/v1/completions", content=b"x", headers=headers)
    assert response.status_code == 415
