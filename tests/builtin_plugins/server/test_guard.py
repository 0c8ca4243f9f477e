"""Host, Origin and the type of bodies: requests from pages of other sites."""

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running

from hardpoint.builtin_plugins.server.access.guard import Guard, accepted_names
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.plugins import ConfigError


def scope(*headers, method="GET", server=("127.0.0.1", 8000)):
    named = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {"headers": named, "method": method, "server": server}


def status(guard, *headers, **kwargs):
    """Return 200, or the status with which a request is refused."""
    try:
        guard.check(scope(*headers, **kwargs))
    except AnswerError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost:1",
        "localhost.",
        "localhost.:8000",
        "127.0.0.1",
        "127.0.0.1:8000",
        "[::1]",
        "[::1]:8000",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
    ],
)
def test_names_of_the_loopback(host):
    assert status(Guard("127.0.0.1", None), ("host", host)) == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("", 400),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("evil.localhost", 403),
        ("localhost@evil.example", 403),
        ("localhost:8000:80", 403),
        ("localhost:port", 403),
        ("localhost:", 403),
        ("localhost/", 403),
        ("localhost..", 403),
        ("localhost, evil.example", 403),
        (" localhost", 403),
        ("[::1]evil.example", 403),
        ("[::1", 403),
        ("::1", 403),
        ("[evil]", 403),
        ("[localhost]", 403),
        ("127.1", 403),
        ("2130706433", 403),
        ("0x7f000001", 403),
        ("0.0.0.0", 403),
        ("192.168.0.7", 403),
        ("\xff", 403),
    ],
)
def test_other_hosts(host, expected):
    """A name that an attacker makes lead to 127.0.0.1 (DNS rebinding) is not the server's."""
    assert status(Guard("127.0.0.1", None), ("host", host)) == expected


def test_a_missing_host_and_several():
    guard = Guard("127.0.0.1", None)
    with pytest.raises(AnswerError, match="host: expected a Host header, got none"):
        guard.check(scope())
    with pytest.raises(AnswerError, match="host: expected one such header, got several"):
        guard.check(scope(("host", "localhost"), ("host", "localhost")))
    with pytest.raises(
        AnswerError,
        match=r"host: 'evil.example' is not a name of this server; "
        r"server.allowed_hosts \(--allowed-hosts\) lists the names that it accepts",
    ):
        guard.check(scope(("host", "evil.example")))


def test_bound_addresses():
    assert status(Guard("10.0.0.5", None), ("host", "10.0.0.5:8000")) == 200
    everywhere = Guard("0.0.0.0", None)
    local = {"server": ("192.168.0.7", 8000)}
    assert status(everywhere, ("host", "192.168.0.7:8000"), **local) == 200
    assert status(everywhere, ("host", "192.168.0.8:8000"), **local) == 403
    assert status(everywhere, ("host", "evil.example"), **local) == 403
    six = Guard("::", None)
    assert status(six, ("host", "192.168.0.7"), server=("::ffff:192.168.0.7", 8000)) == 200
    assert status(six, ("host", "[fe80:0::1]"), server=("fe80::1", 8000)) == 200


def test_a_machine_that_listens_on_all_addresses_has_its_own_names(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "GPU-1.lab.example")
    for bound, own_host in (("0.0.0.0", "0.0.0.0:8000"), ("::", "[::]:8000")):
        guard = Guard(bound, None)
        assert status(guard, ("host", own_host)) == 200  # the URL that the server prints
        for host in ("gpu-1", "GPU-1:8000", "gpu-1.lab.example", "gpu-1.local", "localhost"):
            assert status(guard, ("host", host)) == 200
        for host in ("gpu-1.evil.example", "gpu-2", "lab.example"):
            assert status(guard, ("host", host)) == 403
    assert status(Guard("127.0.0.1", None), ("host", "gpu-1")) == 403
    monkeypatch.setattr("socket.gethostname", lambda: "two words")
    assert accepted_names("0.0.0.0", None) == {"localhost", "127.0.0.1", "::1", "0.0.0.0"}


def test_allowed_hosts_take_the_place_of_the_default():
    guard = Guard("127.0.0.1", ["LLM.example.org", "10.0.0.5:9000", "::2", "[::3]"])
    for host in ("llm.example.org", "llm.example.org:443", "10.0.0.5", "[::2]:1", "[::3]"):
        assert status(guard, ("host", host)) == 200
    assert status(guard, ("host", "localhost")) == 403
    assert status(guard, ("host", "x.llm.example.org")) == 403
    assert status(Guard("127.0.0.1", ["*"]), ("host", "evil.example")) == 200
    assert status(Guard(None, None)) == 200  # no browser reaches a Unix socket
    assert status(Guard(None, ["a"]), ("host", "b")) == 403


@pytest.mark.parametrize("name", ["http://a", "a/b", "*.example.org", "", "a b"])
def test_malformed_names_are_refused_at_start(name):
    with pytest.raises(ConfigError, match="server.allowed_hosts: expected names or addresses"):
        Guard("127.0.0.1", [name])


OWN = ("host", "localhost:8000")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:8000", 200),
        ("HTTP://LOCALHOST:8000", 200),
        ("https://localhost:8000", 200),
        ("http://localhost", 403),
        ("http://localhost:8001", 403),
        ("http://127.0.0.1:8000", 403),
        ("http://evil.example", 403),
        ("http://localhost:8000.evil.example", 403),
        ("http://evil.example#localhost:8000", 403),
        ("http://localhost:8000/", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
        ("http://[::1", 403),
        ("file://", 403),
        ("chrome-extension://localhost:8000", 403),
        ("\xff", 403),
    ],
)
def test_origins(origin, expected):
    assert status(Guard("127.0.0.1", None), OWN, ("origin", origin)) == expected


def test_allowed_origins():
    guard = Guard("127.0.0.1", None, ["https://App.example.org", "http://[::1]:3000"])
    assert status(guard, OWN, ("origin", "https://app.example.org")) == 200
    assert status(guard, OWN, ("origin", "http://[::1]:3000")) == 200
    assert status(guard, OWN, ("origin", "http://app.example.org")) == 403
    assert status(guard, OWN, ("origin", "https://app.example.org"), ("origin", "null")) == 400
    everyone = Guard("127.0.0.1", None, ["*"])
    assert status(everyone, OWN, ("origin", "null")) == 200
    assert status(everyone, OWN, ("sec-fetch-site", "cross-site")) == 200
    assert status(everyone, ("host", "evil.example"), ("origin", "null")) == 403
    assert status(Guard("127.0.0.1", ["*"]), ("origin", "null")) == 403


@pytest.mark.parametrize("origin", ["null", "https://a.example/", "a.example", "https://*.example"])
def test_malformed_origins_are_refused_at_start(origin):
    with pytest.raises(ConfigError, match="server.allowed_origins: expected origins such as"):
        Guard("127.0.0.1", None, [origin])


@pytest.mark.parametrize(
    ("site", "mode", "expected"),
    [
        ("same-origin", "cors", 200),
        ("none", "navigate", 200),
        ("cross-site", "navigate", 200),
        ("cross-site", "no-cors", 403),
        ("same-site", "no-cors", 403),
        ("cross-site", "websocket", 403),
    ],
)
def test_what_pages_of_others_load_without_an_origin(site, mode, expected):
    headers = (OWN, ("sec-fetch-site", site), ("sec-fetch-mode", mode))
    assert status(Guard("127.0.0.1", None), *headers) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("content-type", "application/json")], 200),
        ([("content-type", "Application/JSON; charset=utf-8")], 200),
        ([("content-type", "text/plain")], 415),
        ([("content-type", "application/x-www-form-urlencoded")], 415),
        ([("content-type", "multipart/form-data; boundary=x")], 415),
        ([("content-type", "application/jsonp")], 415),
        ([], 415),
        ([("content-type", "application/json"), ("content-encoding", "gzip")], 415),
        ([("content-type", "application/json"), ("content-type", "text/plain")], 400),
    ],
)
@pytest.mark.parametrize("length", [("content-length", "5"), ("transfer-encoding", "chunked")])
def test_bodies_are_json(headers, length, expected):
    """Pages of others can send text and forms without asking, but no JSON."""
    assert status(Guard("127.0.0.1", None), OWN, length, *headers, method="POST") == expected


def test_a_form_is_refused_with_the_option_of_curl(server):
    body = {"content": b"{}", "headers": {"content-type": "application/x-www-form-urlencoded"}}
    answer = server.client.post("/v1/chat/completions", **body)
    assert answer.status_code == 415
    hint = "with curl, add -H 'Content-Type: application/json'"
    assert answer.json()["error"]["message"].endswith(hint)


APP = {"origin": "https://app.example.org"}
ASK = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


@pytest.fixture(scope="module")
def server():
    config = configured(allowed_origins=["https://app.example.org"])
    with running(FakeEngine(config=config)) as running_server:
        yield running_server


def test_browsers_may_ask_first(server):
    response = server.client.options("/v1/chat/completions", headers={**APP, **ASK})
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == APP["origin"]
    assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert "x-stainless-os" in response.headers["access-control-allow-headers"]
    assert response.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in response.headers
    odd = {**ASK, "access-control-request-headers": "a\tb"}
    response = server.client.options("/v1/chat/completions", headers={**APP, **odd})
    assert "access-control-allow-headers" not in response.headers


def test_pages_of_allowed_origins_read_answers_and_errors(server):
    for path, expected in (("/v1/models", 200), ("/nowhere", 404)):
        response = server.client.get(path, headers=APP)
        assert response.status_code == expected
        assert response.headers["access-control-allow-origin"] == APP["origin"]
        readable = response.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-should-retry", "x-hardpoint-ignored-fields"} <= set(readable)


def test_other_pages_get_no_permission(server):
    for headers in ({}, {"origin": "https://evil.example"}, {"origin": "null"}):
        response = server.client.options("/v1/models", headers={**headers, **ASK})
        assert response.status_code in (403, 405)
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "origin"
    hosted = {**APP, **ASK, "host": "evil.example"}
    assert server.client.options("/v1/models", headers=hosted).status_code == 403


def test_without_allowed_origins_there_is_no_permission_at_all():
    with running(FakeEngine(config=configured())) as server:
        response = server.client.get("/v1/models", headers={"origin": server.url})
        assert response.status_code == 200
        assert "access-control-allow-origin" not in response.headers
        response = server.client.options("/v1/models", headers={"origin": server.url, **ASK})
        assert response.status_code == 405


def test_any_origin():
    with running(FakeEngine(config=configured(allowed_origins=["*"]))) as server:
        response = server.client.get("/v1/models", headers={"origin": "null"})
        assert response.headers["access-control-allow-origin"] == "*"
