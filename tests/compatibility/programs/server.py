"""Asks a server that frozen hooks extend, and whose engine runs frozen plugins in its process.

It fails if they do not work. The argument is an empty folder.
"""

import sys

from hardpoint.testing import serve

RULE = "Answer briefly."
ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}
ANN = {"authorization": "Bearer ann-key"}

settings = {"ACME_KEYS": "ann=ann-key,bob=bob-key", "ACME_PER_MINUTE": "2"}
replies = {f"system: {RULE}\nuser: hi\nassistant: ": "hello"}
config = {
    "plugins": {"enable": ["acme_server", "acme_audit", "compat_hooks", "dry"]},
    "sampler": {"use": "top_n_sigma"},
    "scheduler": {"policy": "tenant_cap"},
    "kv_cache": {"eviction": "arc"},
    "kv_events": {"publishers": ["compat_publisher"]},
    "executor": {"use": "timed"},
    "plugin": {
        "timed": {"log": f"{sys.argv[1]}/steps.log"},
        "compat_publisher": {"path": f"{sys.argv[1]}/events"},
    },
}
with serve(config, replies=replies, environment=settings) as server:
    given = {**ASK, "plugin_args": {"dry": {"allowed_length": 9}}}
    answer = server.ask("/v1/chat/completions", given, headers=ANN)  # the transform
    assert answer.status == 200, server.log
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    usage = server.ask("/acme/usage", {}, headers=ANN).json()  # the route
    tokens = answer.json()["usage"]["total_tokens"]
    assert usage == {"client": "ann", "requests": 1, "tokens": tokens, "waiting": 0}
    refused = server.ask("/acme/usage", {"client": "bob"}, headers=ANN)
    assert refused.status == 400
    assert refused.json()["error"]["message"] == "client: expected your own name, 'ann', got 'bob'"
    refused = server.ask("/acme/usage", {"clent": "ann"}, headers=ANN)
    assert "did you mean 'client'?" in refused.json()["error"]["message"]
    assert server.ask("/v1/models").status == 401  # the authenticator
    assert server.ask("/v1/models", headers=ANN).status == 200
    limited = server.ask("/v1/models", headers=ANN)  # the middleware
    assert limited.status == 429
    assert 1 <= int(limited.headers["retry-after"]) <= 60
    document = server.ask("/openapi.json", headers={"authorization": "Bearer bob-key"}).json()
    route = document["paths"]["/acme/usage"]["post"]
    assert route["summary"] == "Return the usage of a client."
    assert "goes on without it" not in server.log, server.log
