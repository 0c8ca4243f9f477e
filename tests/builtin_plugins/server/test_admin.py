"""The admin address and its routes."""

import asyncio
import logging
import re
import stat
import threading
import time
from pathlib import Path

import msgspec
import pytest
from starlette.responses import Response
from support.fake_engine import FakeEngine, configured
from support.http_server import client_of, running
from support.processes import ROOT
from support.waiting import PATIENCE_S, wait_until

from hardpoint.builtin_plugins.server.routes.admin import OLD_PATHS
from hardpoint.builtin_plugins.server.service import ServerPhase
from hardpoint.errors import EngineTimeoutError, PluginNotFoundError
from hardpoint.plugins import ConfigError, HardpointError, RequestError
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.plugins.requests.stats import Health, PluginMeter
from hardpoint.plugins.scheduling.step_record import LiveRequest, WaitingFor, WaitReason
from hardpoint.plugins.server import Authenticator, Client, InstalledExtension, Route

ASK = {"messages": [{"role": "user", "content": "Hi"}]}

WAITING = LiveRequest(
    request_id="7-0",
    external_id="chatcmpl-a",
    index=0,
    status="waiting",
    num_prompt_tokens=5,
    num_computed_tokens=0,
    num_output_tokens=0,
    priority=0,
    age_seconds=1.5,
    waits_for=WaitReason(WaitingFor.BLOCKS, "needs 2 blocks, 1 is free", 2, 1),
)
PLUGIN = PluginEntry(
    kind="logits_processors",
    name="acme",
    value="acme:Acme",
    distribution="acme",
    version="1.0",
    options={"api_key": "hush", "size": 3, "parts": [{"password": "hush", "rows": 4}]},
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("admin") / "admin.sock"
    engine = FakeEngine(config=configured(admin=f"unix:{path}"))
    engine.manifest = Manifest(hardpoint="9.9", entries=(PLUGIN,))
    with running(engine) as running_server:
        yield running_server


def post(server, path, body=None):
    return server.admin.post(path, json={} if body is None else body)


def test_it_is_off_by_default():
    with running(FakeEngine(config=configured())) as server:
        assert server.admin is None


def test_users_have_none_of_its_routes(server):
    for path in ("/plugins", "/requests", "/engines/stats", "/is_paused"):
        assert server.client.get(path).status_code == 404
    for path in ("/pause", "/drain", "/collective_rpc", "/requests/abort"):
        assert server.client.post(path, json={}).status_code == 404


def test_it_has_none_of_the_users_routes(server):
    assert post(server, "/v1/chat/completions", ASK).status_code == 404


def test_its_socket_is_its_owners_alone(server):
    path = Path(server.engine.config.server.admin.removeprefix("unix:"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_plugins(server):
    server.engine.health_now = Health({"acme": 2}, {"acme": "it raised"})

    async def meters():
        return {"acme": PluginMeter(steps=3, rows=6, seconds=0.5)}

    server.engine.meters = meters
    answer = server.admin.get("/plugins").json()
    (plugin,) = answer["plugins"]
    assert (plugin["kind"], plugin["name"], plugin["version"]) == (PLUGIN.kind, "acme", "1.0")
    assert plugin["options"] == {
        "api_key": "***",
        "size": 3,
        "parts": [{"password": "***", "rows": 4}],
    }
    assert answer["faults"] == {"acme": 2}
    assert answer["quarantined"] == {"acme": "it raised"}
    assert answer["meters"]["acme"]["rows"] == 6
    server.engine.health_now = Health({}, {})


def test_requests_report_why_they_wait(server):
    server.engine.live = [WAITING]
    (request,) = server.admin.get("/requests").json()["requests"]
    assert request["external_id"] == "chatcmpl-a"
    assert request["waits_for"]["waiting_for"] == "blocks"
    assert request["waits_for"]["message"] == "needs 2 blocks, 1 is free"


def test_requests_are_aborted_by_either_id(server):
    server.engine.live = [WAITING]
    for name in ("chatcmpl-a", "7-0"):
        answer = post(server, "/requests/abort", {"request_ids": [name, "no such"]})
        assert answer.json() == {"aborted": ["chatcmpl-a"]}
        assert server.engine.utilities[-1] == ("abort", [name, "no such"])


def test_a_paused_engine_refuses_requests_until_it_is_resumed(server):
    answer = post(server, "/pause", {"mode": "keep", "clear_cache": False})
    assert answer.json() == {"is_paused": True, "is_sleeping": False}
    assert ("pause", "keep", False) in server.engine.utilities
    refused = server.post("/v1/chat/completions", ASK)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "paused"
    assert refused.json()["error"]["message"] == "the engine is paused by an administrator"
    assert int(refused.headers["retry-after"]) >= 1
    assert server.client.get("/ready").status_code == 503
    health = server.client.get("/health")
    assert (health.status_code, health.json()["paused"]) == (
        200,
        "the engine is paused by an administrator",
    )
    assert server.admin.get("/is_paused").json() == {"is_paused": True}
    assert post(server, "/resume").json() == {"is_paused": False, "is_sleeping": False}
    assert server.post("/v1/chat/completions", ASK).status_code == 200
    assert server.client.get("/ready").status_code == 200
    assert "paused" not in server.client.get("/health").json()


def test_a_sleeping_engine_refuses_requests_until_all_of_it_is_awake(server):
    assert post(server, "/sleep", {"level": 2}).json() == {"is_paused": True, "is_sleeping": True}
    assert ("sleep", 2, "abort") in server.engine.utilities
    refused = server.post("/v1/chat/completions", ASK)
    assert refused.status_code == 503
    assert "put to sleep" in refused.json()["error"]["message"]
    conflict = post(server, "/resume")
    assert conflict.status_code == 409
    assert conflict.json()["error"]["message"] == "the engine is asleep; wake_up first"
    assert post(server, "/wake_up", {"tags": ["weights"]}).json()["is_sleeping"] is True
    assert server.post("/v1/chat/completions", ASK).status_code == 503
    assert server.admin.get("/is_sleeping").json() == {"is_sleeping": True}
    assert post(server, "/wake_up").json()["is_sleeping"] is False
    assert server.post("/v1/chat/completions", ASK).status_code == 200


def test_a_pause_that_fails_refuses_nothing(server, monkeypatch):
    async def pause(mode, *, clear_cache):
        raise RequestError("mode: this engine cannot wait")

    monkeypatch.setattr(server.engine, "pause", pause, raising=False)
    answer = post(server, "/pause", {"mode": "wait"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "mode"
    assert server.post("/v1/chat/completions", ASK).status_code == 200


def test_a_restarted_engine_is_not_paused(server):
    post(server, "/pause")
    server.engine.is_running, server.engine.paused = False, False
    try:
        refused = post(server, "/pause")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_restarting"
        wait_until(lambda: server.service.paused is None)
    finally:
        server.engine.is_running = True
    assert server.post("/v1/chat/completions", ASK).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        ("/reset_prefix_cache", {"recompute_running": True}, ("reset_prefix_cache", True)),
        ("/reset_encoder_cache", {}, ("reset_encoder_cache",)),
        ("/start_profile", {}, ("start_profile",)),
        ("/stop_profile", {}, ("stop_profile",)),
        (
            "/collective_rpc",
            {"method": "plugin_meters", "args": [1], "timeout": 2.5},
            ("collective_rpc", "plugin_meters", 2.5, [1]),
        ),
    ],
)
def test_calls_reach_the_engine(server, path, body, call):
    assert post(server, path, body).status_code == 200
    assert server.engine.utilities[-1] == call


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (HardpointError("there is no encoder cache"), 409),
        (PluginNotFoundError("there is no policy 'x'"), 400),
        (ConfigError("policy: wrong"), 400),
        (RequestError("method: expected another one"), 400),
        (EngineTimeoutError("no answer within 5 s"), 503),
    ],
)
def test_errors_of_the_engine_are_answered(server, monkeypatch, error, status):
    async def fail():
        raise error

    monkeypatch.setattr(server.engine, "reset_encoder_cache", fail, raising=False)
    answer = post(server, "/reset_encoder_cache")
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, str(error))


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/pause", {"mode": "now"}, "mode: expected"),
        ("/pause", {"mod": "keep"}, "mod"),
        ("/resume", {"x": 1}, "x"),
        ("/sleep", {"level": 3}, "level: expected"),
        ("/requests/abort", {}, "request_ids"),
        (
            "/plugins/policy",
            {"use": "fair"},
            "use: 'fair' is not among the plugins that may change over",
        ),
        ("/debug/log_level", {"level": "LOUD"}, "level: expected"),
        (
            "/debug/log_level",
            {"level": "INFO", "logger": "root"},
            'logger: expected "hardpoint" or',
        ),
        ("/collective_rpc", {"method": 3}, "method: expected"),
    ],
)
def test_bad_bodies_are_refused(server, path, body, expected):
    before = len(server.engine.utilities)
    answer = post(server, path, body)
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]
    assert len(server.engine.utilities) == before


def test_bodies_are_json_alone(server):
    answer = server.admin.post("/pause", content="{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    answer = server.admin.post("/resume")  # no body is no field
    assert answer.status_code == 200


def test_a_page_of_somebody_else_may_not_use_it(server):
    answer = server.admin.post("/pause", json={}, headers={"origin": "https://evil.example"})
    assert answer.status_code == 403
    assert server.engine.paused is False


def test_log_level(server):
    logger = logging.getLogger("hardpoint.some")
    answer = post(server, "/debug/log_level", {"logger": "hardpoint.some", "level": "DEBUG"})
    assert answer.json() == {"logger": "hardpoint.some", "level": "DEBUG", "before": "NOTSET"}
    assert logger.level == logging.DEBUG
    logger.setLevel(logging.NOTSET)


def test_stats_health_metrics_and_version(server):
    assert server.admin.get("/engines/stats").json()["num_running"] == 0
    assert server.admin.get("/health").json() == {"status": "ok"}
    assert server.admin.get("/version").json() == {"version": "9.9"}
    assert "hardpoint:http_requests_total" in server.admin.get("/metrics").text


def test_drain_ends_the_server(tmp_path):
    engine = FakeEngine(config=configured(admin=f"unix:{tmp_path}/a", drain_seconds=60))
    with running(engine) as server:
        assert post(server, "/drain").json() == {"open": 0}
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
        assert server.code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/waits", "/large"])
def test_a_drain_waits_for_answers_that_are_not_generated(tmp_path, path):
    may_end, size = threading.Event(), 32 << 20

    async def answer(request):
        if request.url.path == "/waits":
            await asyncio.to_thread(may_end.wait, PATIENCE_S)
        return Response(bytes(size))

    engine = FakeEngine(
        config=configured(admin=f"unix:{tmp_path}/a", drain_seconds=600),
        extensions=tuple(("acme", Route(path=p, endpoint=answer)) for p in ("/waits", "/large")),
    )
    with running(engine) as server, server.socket() as client:
        client.sendall(b"GET %b HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % path.encode())
        wait_until(lambda: server.service.traffic.open or server.service.traffic.requests)
        assert post(server, "/drain").status_code == 200
        wait_until(lambda: server.service.phase is ServerPhase.REFUSING)
        time.sleep(0.2)  # in which nothing may end
        assert server.socket().close() is None
        may_end.set()
        received = 0
        while part := client.recv(1 << 20):
            received += len(part)
        assert received > size
        server.thread.join(PATIENCE_S)
        assert server.code == 0


async def hello(request):
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(request.state.client.name)


def test_admin_routes_of_plugins_are_there_and_nowhere_else(tmp_path):
    engine = FakeEngine(
        config=configured(admin=f"unix:{tmp_path}/a"),
        extensions=(
            ("acme", Route(path="/acme", endpoint=hello, admin=True)),
            # Of users: no clash with the admin's.
            ("acme", Route(path="/engines/stats", endpoint=hello)),
        ),
    )
    with running(engine) as server:
        assert server.admin.get("/acme").text == "administrator"
        assert server.client.get("/acme").status_code == 404
        assert server.client.get("/engines/stats").text == "anybody"
        assert server.admin.get("/engines/stats").json()["num_running"] == 0


def keys(**clients):
    """Return authenticators that know keys by the clients that have them."""

    async def authenticate(headers, path):
        return clients.get(headers.get("authorization", "").removeprefix("Bearer "))

    extension = Authenticator(authenticate=authenticate)
    return [InstalledExtension("keys", "the keys", extension)]


def test_a_port_needs_the_key_of_an_administrator():
    engine = FakeEngine(config=configured(admin="127.0.0.1:0", admin_keys_file="keys.toml"))
    user, admin = Client(name="ada"), Client(name="root", admin=True)
    with running(
        engine,
        authenticators=keys(user=user),
        admin_authenticators=keys(admin=admin, weak=Client(name="weak")),
    ) as server:

        def status(path, key, client=server.admin):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return client.get(path, headers=headers).status_code

        for path in ("/plugins", "/health", "/metrics", "/version", "/no/such"):
            assert status(path, None) == 401
            assert status(path, "user") == 401
            assert status(path, "weak") == 403
        assert status("/plugins", "admin") == 200
        assert status("/v1/models", "admin", server.client) == 401
        assert status("/v1/models", "user", server.client) == 200
        answer = server.admin.get("/health", headers={"host": "evil.example"})
        assert answer.status_code == 403


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"admin": "127.0.0.1:0"}, "server.admin_keys_file: expected a file of keys"),
        ({"admin": "here"}, 'server.admin: expected "unix:PATH" or "HOST:PORT", got \'here\''),
        ({"admin": "127.0.0.1:99999"}, "server.admin: expected"),
        ({"admin": ":80"}, "server.admin: expected"),
        (
            {"admin": "127.0.0.1:0", "admin_keys_file": "keys.toml"},
            "server.admin_keys_file: expected keys that can be checked",
        ),
    ],
)
def test_addresses_that_are_wrong_or_unsafe(settings, expected):
    with pytest.raises(ConfigError) as raised, running(FakeEngine(config=configured(**settings))):
        pass
    assert expected in str(raised.value)


def test_every_route_has_a_summary(server):
    from hardpoint.builtin_plugins.server.assembly import admin_routes

    for route in admin_routes(server.service):
        assert route.summary
        assert route.path.startswith("/")
        assert (route.methods != ("GET",)) == (route.request_type is not None)
        if route.request_type is not None:
            assert msgspec.inspect.type_info(route.request_type).forbid_unknown_fields


def test_the_number_of_engines(server):
    server.engine.utilities.clear()
    scaled = post(server, "/engines/scale", {"engines": 2})
    assert scaled.json() == {"epoch": 3, "ranks": [0, 1]}
    retired = post(server, "/engines/retire", {"ranks": [1], "drain_seconds": 2.5})
    assert retired.json() == {"epoch": 4, "ranks": [0]}
    assert server.engine.utilities == [("scale", 2, 30.0), ("retire", [1], 2.5)]
    for path, body, message in (
        ("/engines/scale", {}, "engines: missing, and it has no default"),
        ("/engines/scale", {"engines": "2"}, "engines: expected a whole number, got '2'"),
        ("/engines/retire", {"ranks": 1}, "ranks: expected a list, got 1"),
    ):
        refused = post(server, path, body)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)


def test_load_is_there_too(server):
    assert server.admin.get("/load").json() == server.client.get("/load").json()


def test_the_page_about_them_lists_all_routes(server):
    from hardpoint.builtin_plugins.server.assembly import admin_routes

    page = (ROOT / "docs" / "hot-reconfiguration.md").read_text()
    listed = set(re.findall(r"^\| `(GET|POST|PATCH) (/\S+)` \|", page, re.MULTILINE))
    routes = [route for route in admin_routes(server.service) if route.path not in OLD_PATHS]
    assert listed == {(method, route.path) for route in routes for method in route.methods}
    for route in routes:
        if route.request_type is not None:
            (line,) = [
                x
                for x in page.splitlines()
                if x.startswith(f"| `{route.methods[0]} {route.path}` ")
            ]
            for field in route.request_type.__struct_fields__:
                assert f"`{field}`" in line


def test_old_paths_answer_as_the_new_ones_do(server, caplog):
    caplog.set_level(logging.WARNING, logger="hardpoint")
    bodies = {
        "/settings": None,
        "/stats": None,
        "/scale": {"engines": 2},
        "/retire": {"ranks": [1]},
        "/update_weights": {"path": "/no/such/folder"},
        "/policy": {"use": "no such policy"},
        "/log_level": {"level": "DEBUG", "logger": "hardpoint.of_a_test"},
    }
    assert bodies.keys() == OLD_PATHS.keys()
    for old, new in OLD_PATHS.items():
        caplog.clear()
        method = "GET" if bodies[old] is None else "POST"
        answers = [server.admin.request(method, path, json=bodies[old]) for path in (new, old, old)]
        statuses = {answer.status_code for answer in answers}
        assert len(statuses) == 1
        assert 404 not in statuses
        assert answers[1].json().keys() == answers[0].json().keys()
        if statuses == {200}:
            assert "deprecation" not in answers[0].headers
            assert answers[1].headers["deprecation"].startswith("@")
            assert answers[1].headers["link"] == f'<{new}>; rel="successor-version"'
        notice = f"the path {old} is deprecated, and works until hardpoint 0.3; use {new}"
        assert [notice in message for message in caplog.messages].count(True) == 1
    changed = server.admin.patch("/settings", json={"running": "never"})
    assert (
        changed.json() == server.admin.patch("/engines/settings", json={"running": "never"}).json()
    )
    logging.getLogger("hardpoint.of_a_test").setLevel(logging.NOTSET)


def test_the_client_of_a_unix_socket_needs_no_host(server):
    path = server.engine.config.server.admin
    with client_of(path) as client:
        assert client.get("/version", headers={"host": "whatever"}).status_code == 200
