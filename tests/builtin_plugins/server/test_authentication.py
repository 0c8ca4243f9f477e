"""With a key every route needs one, by whatever path it is asked for."""

import json

import msgspec
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running

from hardpoint.builtin_plugins.server.access.keys import KeyStore, installed
from hardpoint.builtin_plugins.server.assembly import assemble
from hardpoint.plugins import ConfigError
from hardpoint.plugins.server import Transform

KEY = "right-0123456789abcdef"
RIGHT = {"authorization": f"Bearer {KEY}"}
WRONG = ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": KEY})


def keys(path=None):
    """Return an authenticator of KEY, and of the keys of a file."""
    return installed(KeyStore(path, KEY))


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(config=configured()), authenticators=[keys()]) as running_server:
        yield running_server


def routes():
    """Return (method, path) of all routes of an application, as its router has them."""
    users = assemble(FakeEngine(config=configured()), "9.9").users
    routed = {(method, route.path) for route in users.routes for method in route.methods}
    assert len(routed) >= 8
    return sorted((m, path.replace("{model:path}", "smollm2")) for m, path in routed)


def is_page_file(path):
    """Return whether a path is that of a page or its files, which hold no data of the server."""
    return path == "/docs" or path.startswith(("/page/", "/docs/"))


@pytest.mark.parametrize(("method", "path"), routes())
def test_every_route_needs_the_key(server, method, path):
    is_open = path in server.service.settings.open_routes or is_page_file(path)
    for headers in WRONG:
        response = server.client.request(method, path, headers=headers)
        if is_open:
            assert response.status_code in (200, 405)
            if method == "GET" and "json" in response.headers["content-type"]:
                assert list(response.json()) == ["status"]  # one word and no data
            continue
        assert response.status_code == 401, (method, path, headers)
        assert response.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            kind = response.json()["error"]
            assert kind.get("code", "invalid_api_key") == "invalid_api_key"
            assert kind["type"] == "authentication_error"
            assert "valid key as `Authorization: Bearer KEY`" in response.text
    # 404: routes that report what this version does not have; 426: WebSockets.
    assert server.client.request(method, path, headers=RIGHT).status_code in (
        200,
        400,
        404,
        405,
        426,
    )


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/v1",
        "/v1/",
        "//health",
        "//v1/models",
        "/health/",
        "/health//",
        "/ready/..",
        "/health/../v1/models",
        "/HEALTH",
        "/%2fhealth",
        "/health%00",
        "/health%20",
        "/v1/models/",
        "/v1/models/../../health",
        "/v1%2fmodels",
        "/%2e/v1/models",
        "/v1/models;/health",
        "/v1/models?api_key=" + KEY,
        "/v1/models?/health",
        "/v1/chat/completions/",
        "/metrics/",
        "/openapi.json",
        "/redoc",
        "/admin",
        "/plugins",
        "*",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
def test_unknown_paths_are_401_before_404(server, method, path):
    """Sent as written, since a client library would normalise it; a key in the URL is not read."""
    assert answered(server, method, path) == 401


def answered(server, method, path, *headers):
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
    with server.socket() as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        answer = connection.makefile("rb").readline()
    return int(answer.split()[1])


def test_encoded_paths_are_the_same_route(server):
    """An open route stays open and a closed one closed, in whatever way it is written."""
    assert answered(server, "GET", "/he%61lth") == 200
    assert answered(server, "GET", "/v1/mod%65ls") == 401
    assert answered(server, "GET", "http://localhost/health") == 200
    assert answered(server, "GET", "http://localhost/v1/models") == 401
    assert answered(server, "GET", "http://localhost/health", f"x-api-key: {KEY}") == 200


@pytest.mark.parametrize("path", ["/v1/nowhere", "/page", "/v1/models/other"])
def test_unknown_paths_are_404_with_the_key(server, path):
    assert server.client.get(path, headers=RIGHT).status_code == 404


def test_a_wrong_method_is_405_with_the_key(server):
    response = server.client.delete("/v1/models", headers=RIGHT)
    assert response.status_code == 405
    assert "GET" in response.headers["allow"]


def test_two_keys_in_one_request_are_refused(server):
    """Servers and proxies may take another one of them."""
    both = [("authorization", "Bearer wrong"), ("authorization", f"Bearer {KEY}")]
    response = server.client.get("/v1/models", headers=both)
    assert response.status_code == 400
    assert "authorization: expected one such header, got several" in response.text


def test_open_routes_are_the_operators(server):
    engine = FakeEngine(config=configured(open_routes=["/version"]))
    with running(engine, authenticators=[keys()]) as other:
        assert other.client.get("/version").status_code == 200
        assert other.client.get("/health").status_code == 401
        assert other.client.get("/health", headers=RIGHT).status_code == 200


def test_details_need_the_key(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    server.service.faults.count("acme")
    try:
        assert server.client.get("/health").json() == {"status": "ok"}
        assert server.client.get("/health", headers=RIGHT).json()["faults"] == {"acme": 1}
    finally:
        server.service.counts.add("faults of acme", -1)


@pytest.mark.parametrize("prefix", ["", "/llm"], ids=["stripped", "kept"])
def test_a_root_path_changes_no_rule(prefix):
    """Whether the proxy leaves its prefix there or not."""
    engine = FakeEngine(config=configured(root_path="/llm"))
    with running(engine, authenticators=[keys()]) as server:
        assert server.client.get(f"{prefix}/health").status_code == 200
        assert server.client.get(f"{prefix}/v1/models").status_code == 401
        assert server.client.get(f"{prefix}/v1/models", headers=RIGHT).status_code == 200
        assert server.client.get(f"{prefix}/llm/llm/health").status_code == 401
        assert server.client.get("/llmhealth").status_code == 401
        assert server.client.get("/llm").status_code == 401


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "//llm", "/a?b"])
def test_malformed_root_paths_are_refused(path):
    with pytest.raises(ConfigError, match=r"server.root_path: expected a path such as '/llm'"):
        assemble(FakeEngine(config=configured(root_path=path)), "9.9")


ASK = {"messages": [{"role": "user", "content": "Hi"}]}
CLIENTS = """
[[key]]
name = "alice"
key = "alice-0123456789abcdef"
tags = { team = "red" }
min_priority = 2
max_priority = 4
max_timeout = 5

[[key]]
name = "bob"
key = "bob-0123456789abcdef"
kv_transfer = true

[[key]]
name = "carol"
key = "carol-0123456789abcdef"
tags = { tenant = "red" }

[[key]]
name = "dave"
key = "dave-0123456789abcdef"
tags = { tenant = "red" }
"""


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.touch(0o600)
    path.write_text(CLIENTS)
    engine = FakeEngine(config=configured())
    with running(engine, authenticators=[keys(str(path))]) as running_server:
        yield running_server


def asked(server, name, **fields):
    headers = {"x-api-key": f"{name}-0123456789abcdef"}
    response = server.post("/v1/chat/completions", {**ASK, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return server.engine.asked[-1][2]


def refused(server, name, **fields):
    headers = {"x-api-key": f"{name}-0123456789abcdef"}
    response = server.post("/v1/chat/completions", {**ASK, **fields}, headers=headers)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def test_the_tags_of_a_key_stay(bounded):
    tags = asked(bounded, "alice", tags={"team": "blue", "job": "x"})["tags"]
    assert tags == {"team": "red", "job": "x", "tenant": "alice"}
    tags = asked(bounded, "bob", tags={"team": "blue"})["tags"]
    assert tags == {"team": "blue", "tenant": "bob"}


@pytest.mark.parametrize("tags", [{}, {"tenant": "bob"}, {"tenant": ""}])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_requests_are_of_the_tenant_of_their_key(bounded, route, tags):
    body = {"prompt": "x"} if route == "/v1/completions" else ASK
    body = {"input": "x"} if route == "/v1/responses" else body
    for name, tenant in (("alice", "alice"), ("carol", "red"), ("dave", "red")):
        headers = {"x-api-key": f"{name}-0123456789abcdef"}
        response = bounded.post(route, body | {"tags": tags}, headers=headers)
        assert response.status_code == 200, response.text
        assert bounded.engine.asked[-1][2]["tags"]["tenant"] == tenant


def test_requests_name_their_tenant_on_a_server_without_keys():
    with running(FakeEngine(config=configured())) as server:
        for tags in ({"tenant": "bob"}, {}):
            response = server.post("/v1/chat/completions", ASK | {"tags": tags})
            assert response.status_code == 200, response.text
            assert (server.engine.asked[-1][2]["tags"] or {}) == tags


def test_the_priority_of_a_key_is_bounded(bounded):
    assert asked(bounded, "alice")["priority"] == 2
    assert asked(bounded, "alice", priority=4)["priority"] == 4
    for priority in (1, 5):
        assert refused(bounded, "alice", priority=priority) == (
            400,
            "priority",
            f"priority: expected 2 to 4 for this key, got {priority}",
        )
    assert refused(bounded, "bob", priority=-1)[0] == 400


def test_the_timeout_of_a_key_is_bounded(bounded):
    assert asked(bounded, "alice")["timeout"] == 5.0
    assert asked(bounded, "alice", timeout=1)["timeout"] == 1.0
    assert asked(bounded, "bob")["timeout"] is None
    status, param, message = refused(bounded, "alice", timeout=5.1)
    assert (status, param) == (400, "timeout")
    assert message == "timeout: expected at most 5 s on this server, got 5.1"


def test_salts_differ_by_key_and_by_request(bounded):
    """CVE-2025-46570: a client that shares cached prompts can find out others' by their speed."""
    requests = [{}, {"cache_salt": "x"}, {"cache_salt": "y"}]
    salts = [
        asked(bounded, name, **fields)["cache_salt"]
        for name in ("alice", "bob")
        for fields in requests
    ]
    assert len(set(salts)) == 6
    assert asked(bounded, "alice", cache_salt="x")["cache_salt"] == salts[1]
    assert asked(bounded, "alice", cache_salt=salts[3])["cache_salt"] != salts[3]


def test_kv_transfer_params_need_a_marked_key(bounded):
    status, param, message = refused(bounded, "alice", kv_transfer_params={"remote": 1})
    assert (status, param) == (403, "kv_transfer_params")
    assert message == (
        "kv_transfer_params: needs a key with kv_transfer = true in server.keys_file"
    )
    status, param, message = refused(bounded, "bob", kv_transfer_params={"remote": 1})
    assert (status, param) == (400, "kv_transfer_params")
    assert message == (
        "kv_transfer_params: expected none, because this server has no KV connector "
        "(kv_connector.use)"
    )
    response = bounded.post(
        "/v1/completions", {"prompt": "x", "kv_transfer_params": {}}, headers={"x-api-key": KEY}
    )
    assert response.status_code == 403


def test_no_key_travels_with_a_call(bounded):
    """Transforms of plugins see the headers but the credentials."""
    seen = []

    async def look(call, body):
        seen.append(json.dumps(msgspec.to_builtins(call.client)) + repr(call))
        return body

    engine = FakeEngine(config=configured(), extensions=(("acme", Transform(request=look)),))
    with running(engine, authenticators=[keys()]) as server:
        headers = {**RIGHT, "x-api-key": KEY, "cookie": KEY}
        assert server.post("/v1/chat/completions", ASK, headers=headers).status_code == 200
    assert seen
    assert KEY not in seen[0]
