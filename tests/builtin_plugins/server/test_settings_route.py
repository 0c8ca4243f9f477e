"""The settings of an engine on the admin address, and changes by plugins."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running

from hardpoint.errors import BusyError, PluginLoadError


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings") / "admin.sock"
    tables = {
        "plugins": {"live": ["mirostat", "fair"]},
        "plugin": {"acme": {"api_key": "hush", "url": "redis://me:hush@host/0", "size": 3}},
    }
    with running(FakeEngine(config=configured(tables, admin=f"unix:{path}"))) as running_server:
        yield running_server


def patch(server, body):
    return server.admin.patch("/engines/settings", json=body)


def test_each_setting_is_shown_without_secrets(server):
    answer = server.admin.get("/engines/settings")
    body = answer.json()
    settings = body["settings"]
    assert settings["scheduler.max_waiting_tokens"] == {
        "value": None,
        "origin": "default",
        "change": "live",
    }
    assert settings["scheduler.max_num_seqs"]["change"] == "restart"
    assert settings["plugin.acme.api_key"]["value"] == "***"
    assert settings["plugin.acme.url"]["value"] == "redis://***@host/0"
    assert settings["plugin.acme.size"]["value"] == 3
    assert "hush" not in answer.text
    assert (body["generation"], len(body["fingerprint"])) == (1, 64)


def test_states_are_shown_without_secrets(server):
    states = server.admin.get("/plugins").json()["states"]
    assert states == {"acme": {"api_key": "***", "shares": 2}}


def test_users_have_no_such_route(server):
    assert server.client.get("/engines/settings").status_code == 404
    assert server.client.patch("/engines/settings", json={}).status_code == 404


def test_a_change_reaches_the_engine_with_its_author(server):
    body = {
        "config": {"scheduler.max_waiting": 7, "scheduler.policy": "fair", "plugin.fair.tag": "a"},
        "plugins": {"enable": ["mirostat"], "options": {"mirostat": {"eta": 0.1}}},
        "running": "end",
    }
    answer = patch(server, body)
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"generation", "fingerprint"}
    call, arguments = server.engine.utilities[-1]
    assert call == "change"
    assert arguments.pop("origin").startswith("administrator ")
    assert arguments == {
        "enable": ["mirostat"],
        "disable": [],
        "replace": {},
        "options": {"mirostat": {"eta": 0.1}},
        "config": body["config"],
        "running": "end",
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"plugins": {"enable": ["dry"]}}, "plugins.enable[0]: 'dry' is not among the plugins"),
        ({"plugins": {"enable": ["os:system"]}}, "plugins.enable[0]: expected the name of a plug"),
        ({"plugins": {"enable": ["../x"]}}, "plugins.enable[0]: expected the name of a plugin"),
        ({"plugins": {"enable": ["acme.dry"]}}, "plugins.enable[0]: expected the name of a plugin"),
        ({"plugins": {"disable": ["min_p"]}}, "plugins.disable[0]: 'min_p' is not among"),
        ({"plugins": {"replace": {"fair": "x:Y"}}}, "plugins.replace.fair: expected the name of"),
        ({"plugins": {"replace": {"min_p": "fair"}}}, "plugins.replace.min_p: 'min_p' is not"),
        ({"plugins": {"options": {"dry": {}}}}, "plugins.options.dry: 'dry' is not among"),
        ({"config": {"scheduler.policy": "x:Y"}}, "config.scheduler.policy: expected the name"),
        ({"config": {"scheduler.policy": "fcfs"}}, "config.scheduler.policy: 'fcfs' is not among"),
        ({"config": {"stats.sinks": ["fair", "a:B"]}}, "config.stats.sinks: expected the name"),
        ({"config": {"stats.sinks": [{"use": "a:B"}]}}, "config.stats.sinks: expected the name"),
        ({"config": {"parallel.balancer": "a:B"}}, "config.parallel.balancer: expected the name"),
        ({"config": {"plugins.enable": ["a:B"]}}, "config.plugins.enable: expected in plugins.en"),
        ({"config": {"plugin.dry.x": 1}}, "config.plugin.dry.x: 'dry' is not among"),
        ({"config": {"plugin": {"dry": {}}}}, "config.plugin: expected the name of a plugin"),
        (
            {"plugins": {"options": {"mirostat": {"wraps": "a:B"}}}},
            "plugins.options.mirostat.wraps: expected the name of a plugin, got 'a:B'",
        ),
        (
            {"plugins": {"options": {"mirostat": {"deep": [{"x": "a.b:C"}]}}}},
            "plugins.options.mirostat.deep.x: expected the name of a plugin, got 'a.b:C'",
        ),
        ({"config": {"plugin.fair.wraps": "dry"}}, "config.plugin.fair.wraps: 'dry' is not among"),
        ({"config": {"plugin.fair": {"wraps": ["a:B"]}}}, "config.plugin.fair.wraps: expected the"),
        ({"administrator": "me"}, "administrator"),
        ({"running": "stop"}, "running: expected"),
        ({"plugin": {}}, "plugin"),
    ],
)
def test_what_is_not_allowed_is_refused_before_the_engine(server, body, words):
    before = len(server.engine.utilities)
    answer = patch(server, body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert len(server.engine.utilities) == before


def test_a_policy_reaches_the_engine_with_its_author(server):
    answer = server.admin.post("/plugins/policy", json={"use": "fair", "options": {"tag": "x"}})
    assert answer.json() == {"policy": "fair"}
    *call, origin = server.engine.utilities[-1]
    assert call == ["set_policy", "fair", {"tag": "x"}]
    assert origin.startswith("administrator ")


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("fair", "options.wraps: expected the name of a plugin, got 'a:B'"),
        ("fcfs", "use: 'fcfs' is not among the plugins that may change over HTTP"),
        ("os:system", "use: expected the name of a plugin, got 'os:system'"),
        ("acme.policies", "use: expected the name of a plugin"),
        ("../x", "use: expected the name of a plugin"),
        ("", "use: expected the name of a plugin"),
    ],
)
def test_policies_are_those_that_settings_may_name(server, use, words):
    before = len(server.engine.utilities)
    answer = server.admin.post("/plugins/policy", json={"use": use, "options": {"wraps": "a:B"}})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert len(server.engine.utilities) == before


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BusyError("another live change is under way"), 409),
        (PluginLoadError("plugin 'x': no"), 400),
    ],
)
def test_errors_of_a_change_are_answered(server, monkeypatch, error, status):
    async def fail(**_):
        raise error

    monkeypatch.setattr(server.engine, "change", fail, raising=False)
    answer = patch(server, {})
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, str(error))
