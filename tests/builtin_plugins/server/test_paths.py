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


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/models/nobody", "model"),
        ("/responses/resp_a", "response_id"),
        ("/v1/conversations/conv_a/", None),
        ("/conversations/conv_a/items/msg_a", None),
    ],
)
def test_forms_of_a_path_with_parameters(fake, path, field):
    error = fake.client.get(path).json()["error"]
    assert error["param"] == field
    assert not error["message"].startswith("path: ")  # the route is known


def test_the_name_of_a_model_may_have_a_slash_after_it(fake):
    name = fake.client.get("/v1/models").json()["data"][0]["id"]
    assert fake.client.get(f"/models/{name}/").json()["id"] == name


def test_a_wrong_method_gets_the_methods_of_all_routes_of_the_path(fake):
    answer = fake.client.put("/v1/conversations/conv_a")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD, POST")
    assert answer.json()["error"]["message"].startswith("method: expected one of DELETE, GET")
    assert fake.client.put("/v1/chat/completions").headers["allow"] == "POST"


PATHS = ["/v1/chat/completions/", "/chat/completions", "/models", "/models/a", "/responses/a/"]


@pytest.mark.parametrize("path", PATHS)
def test_every_form_needs_the_key(keyed, path):
    body = {"messages": user("hi")}
    assert keyed.client.post(path, json=body).status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    expected = 200 if "chat" in path else 404 if "responses" in path else 405
    assert keyed.client.post(path, json=body, headers=headers).status_code == expected


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing/", "/v1/chat/completion"])
def test_a_path_without_a_route_is_not_found_with_any_body(fake, path):
    headers = {"content-type": "text/plain"}
    assert fake.client.post(path, content=b"x", headers=headers).status_code == 404
    response = fake.client.post("/v1/completions", content=b"x", headers=headers)
    assert response.status_code == 415
