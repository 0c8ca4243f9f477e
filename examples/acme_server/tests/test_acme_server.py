"""The package's own tests: the routes that the plugin adds, asked over HTTP."""

import asyncio

import pytest
from acme_server.limits import rate_limit
from acme_server.rules import RULE
from starlette.exceptions import HTTPException

from hardpoint.plugins.server import Client
from hardpoint.testing import serve

ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}


def key(name):
    return {"authorization": f"Bearer {name}-key"}


@pytest.fixture(scope="module")
def server():
    settings = {"ACME_KEYS": "ann=ann-key,bob=bob-key,admin=admin-key"}
    replies = {f"system: {RULE}\nuser: hi\nassistant: ": "hello"}
    options = {"acme_server": {"per_minute": 4}}
    config = {"plugins": {"enable": ["acme_server"]}, "plugin": options}
    with serve(config, replies=replies, environment=settings) as running:
        yield running


def test_every_conversation_begins_with_the_rule_and_is_counted(server):
    answer = server.ask("/v1/chat/completions", ASK, headers=key("ann"))
    assert answer.status == 200, server.log
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    usage = server.ask("/acme/usage", {}, headers=key("ann")).json()
    tokens = answer.json()["usage"]["total_tokens"]
    assert usage == {"client": "ann", "requests": 1, "tokens": tokens, "waiting": 0}


def test_usage_of_others_is_for_administrators(server):
    refused = server.ask("/acme/usage", {"client": "ann"}, headers=key("bob"))
    assert refused.status == 400
    assert refused.json()["error"]["message"] == "client: expected your own name, 'bob', got 'ann'"
    assert server.ask("/acme/usage", {"client": "ann"}, headers=key("admin")).status == 200


def test_a_wrong_body_is_refused_with_the_servers_message(server):
    refused = server.ask("/acme/usage", {"clent": "ann"}, headers=key("ann"))
    assert (refused.status, refused.json()["error"]["param"]) == (400, "clent")
    assert "did you mean 'client'?" in refused.json()["error"]["message"]


def test_strangers_are_refused(server):
    for headers in ({}, {"authorization": "Bearer unknown"}, {"authorization": "ann-key"}):
        assert server.ask("/v1/models", headers=headers).status == 401
    assert server.ask("/health").json() == {"status": "ok"}


def test_a_client_that_asks_too_often_waits(server):
    for _ in range(4):
        assert server.ask("/v1/models", headers=key("bob")).status == 200
    refused = server.ask("/v1/models", headers=key("bob"))
    assert refused.status == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert server.ask("/v1/models", headers=key("admin")).status == 200


def test_the_openapi_document_has_the_route(server):
    document = server.ask("/openapi.json", headers=key("ann")).json()
    route = document["paths"]["/acme/usage"]["post"]
    assert route["summary"] == "Return the usage of a client."
    properties = document["components"]["schemas"]["UsageRequest"]["properties"]
    assert properties["client"]["description"].startswith("name of the client; None is the caller.")


def test_a_minute_later_there_is_room_again():
    now = 0.0
    answered = []

    async def app(*_):
        answered.append(now)

    limited = rate_limit(1, lambda: now).wrap(app)
    scope = {"path": "/v1/models", "state": {"client": Client(name="ann")}}
    asyncio.run(limited(scope, None, None))
    now = 10.0
    with pytest.raises(HTTPException, match="try again in 50 s"):
        asyncio.run(limited(scope, None, None))
    now = 61.0
    asyncio.run(limited(scope, None, None))
    assert answered == [0.0, 61.0]
