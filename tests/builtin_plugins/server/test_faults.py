"""A plugin that fails ends the requests that use it, with its name; others stream on unharmed."""

import json
import threading

import pytest
from support.fault_cases import DENSE_MESSAGES, SPARSE_MESSAGES
from support.http_server import running
from support.waiting import PATIENCE_S

from hardpoint import AsyncLLM
from hardpoint.testing import scripted_config, write_scripted_model

ENABLED = [
    {"use": "support.plugins.faulty:Dense", "name": "dense"},
    {"use": "support.plugins.faulty:Sparse", "name": "sparse"},
]
COMPLETIONS = "/v1/completions"
SEEDED = {"temperature": 1, "seed": 5, "ignore_eos": True, "max_tokens": 40}


def asking(plugin=None, how="", **fields):
    arguments = {} if plugin is None else {"plugin_args": {plugin: {"how": how}}}
    return {"prompt": "say abc", **SEEDED, **arguments, **fields}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_scripted_model(tmp_path_factory.mktemp("model"), {"say abc": " abc abc abc"})
    config = scripted_config(folder, {"plugins": {"enable": ENABLED, "quarantine_after": 0}})
    llm = AsyncLLM(config={**config, "server": {"port": 0}})
    with running(llm) as running_server:
        yield running_server
    llm.close()


@pytest.fixture(scope="module")
def expected(server):
    return server.post(COMPLETIONS, asking()).json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("plugin", "how", "message"),
    [
        *(("dense", how, DENSE_MESSAGES[how]) for how in ("raise", "nan", "none", "columns")),
        *(("sparse", how, SPARSE_MESSAGES[how]) for how in ("raise", "vocabulary")),
        ("dense", "nothing", DENSE_MESSAGES["nothing"]),
    ],
)
def test_a_fault_is_its_own(server, expected, plugin, how, message):
    texts = {}

    def neighbour(number):
        events = server.events(COMPLETIONS, asking(stream=True))
        texts[number] = "".join(event["choices"][0]["text"] for event in events)

    threads = [threading.Thread(target=neighbour, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    answer = server.post(COMPLETIONS, asking(plugin, how))
    with server.client.stream("POST", COMPLETIONS, json=asking(plugin, how, stream=True)) as s:
        streamed = s.read()
    for thread in threads:
        thread.join(PATIENCE_S)
    error = answer.json()["error"]
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    assert error["type"] == "generation_error"
    assert f"plugin '{plugin}'" in error["message"]
    assert _for_clients(message) in error["message"]
    assert "broken" not in error["message"]  # the plugin's own text is for the log
    assert f"plugin '{plugin}'" in streamed.decode()
    assert texts == dict.fromkeys(range(3), expected)


def _for_clients(message):
    """Return how much of a message clients get: an exception's class without its text."""
    beginning, _, text = message.partition("failed: ")
    kind, colon, _ = text.partition(": ")
    return f"{beginning}failed: {kind if colon and kind.endswith('Error') else text}"


def test_a_misspelt_argument_is_400_and_named(server):
    body = asking("dense")
    body["plugin_args"]["dense"] = {"hwo": "raise"}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("plugin_args.dense.hwo: unknown field (did you mean 'how'?)")
    assert error["param"] == "plugin_args.dense.hwo"


def test_an_unknown_plugin_is_400(server):
    answer = server.post(COMPLETIONS, asking("dens"))
    assert answer.status_code == 400
    assert "did you mean 'dense'" in answer.json()["error"]["message"]


def test_health_counts_the_faults(server):
    server.post(COMPLETIONS, asking("dense", "raise"))
    health = server.client.get("/health").json()
    assert health["status"] == "ok"  # none is quarantined here
    assert health["faults"]["dense"] >= 1


def test_a_quarantined_plugin_is_reported_in_health(tmp_path):
    folder = write_scripted_model(tmp_path, {"say abc": " abc"})
    config = scripted_config(folder, {"plugins": {"enable": ENABLED, "quarantine_after": 2}})
    llm = AsyncLLM(config={**config, "server": {"port": 0}})
    with running(llm) as server:
        for _ in range(2):
            assert server.post(COMPLETIONS, asking("dense", "raise")).status_code == 500
        refused = server.post(COMPLETIONS, asking("dense"))
        assert refused.status_code == 400
        assert "the plugin is quarantined" in refused.json()["error"]["message"]
        response = server.client.get("/health")
        assert (response.status_code, response.json()["status"]) == (200, "degraded")
        assert "its apply failed: RuntimeError" in json.dumps(response.json()["quarantined"])
        assert server.post(COMPLETIONS, asking()).status_code == 200
    llm.close()
