"""`/pooling`: inputs of IO processors and their answers; texts and their results."""

from __future__ import annotations

import asyncio
import base64
import json
import threading

import numpy as np
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.plugins.io_processors import (
    GO_ON,
    WAITING,
    Harmful,
    InRounds,
    Measurements,
    Nearest,
)
from support.plugins.slow import Slow
from support.scripted_server import server_config, write_model
from support.waiting import PATIENCE_S, wait_until

from hardpoint import LLM, AsyncLLM, PoolingParams, SamplingParams
from hardpoint.errors import PluginFaultError, RequestEndedError
from hardpoint.testing import scripted_config
from hardpoint.typed import json_schema


class SlowRounds(InRounds):
    """Has slow requests after its first round."""

    contract = 1

    def prompts(self, request, prompts):
        slow = {"slow": {"seconds": 0.1}} if request else {}
        params = SamplingParams(max_tokens=400, ignore_eos=True, plugin_args=slow)
        return [(ids, params if request else SamplingParams(max_tokens=1)) for ids in prompts]


ROWS = {"rows": [[1.0, 1.0], [-1.0, -1.0]]}
TEXTS = ["say abc", "fox"]
PLUGINS = (Nearest, Harmful, InRounds, SlowRounds, Slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder):
    names = [f"{plugin.__module__}:{plugin.__qualname__}" for plugin in PLUGINS]
    enabled = [*scripted_config(folder)["plugins"]["enable"], *names]
    plugins = {"enable": enabled, "quarantine_after": 0}
    with running(AsyncLLM(config=server_config(folder, plugins=plugins))) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def own_engine(folder):
    """Results of an engine of its own, by task."""
    with LLM(config=scripted_config(folder)) as llm:
        return {
            task: [output.outputs for output in llm.encode(TEXTS, PoolingParams(task=task))]
            for task in ("embed", "token_embed")
        }


def post(server, status=200, **body):
    response = server.post("/pooling", body)
    assert response.status_code == status, response.text
    return response.json()


def refused(server, status=400, **body):
    return post(server, status, **body)["error"]


def test_an_input_is_answered_as_vllm_does(server):
    body = {"data": ROWS, "task": "plugin", "io_processor": "nearest", "request_id": "mine"}
    answer = post(server, **body, model="other")
    assert answer["data"] == {"names": ["high", "low"], "vectors": None}
    assert (answer["id"], answer["request_id"]) == ("pool-mine", "pool-mine")
    assert answer["created"] == answer["created_at"]
    assert (answer["object"], answer["model"]) == ("processed", "other")
    assert answer["io_processor"] == "nearest"


def test_a_wrong_input_is_named_by_its_path(server):
    error = refused(server, data={"rows": [[1.0], [0.5, 3.0]]}, io_processor="nearest")
    assert error["message"] == "data.rows[1][1]: expected a number <= 1, got 3.0"
    assert error["param"] == "data.rows[1][1]"
    error = refused(server, data={"prompts": 1, "pre_process": "refuses"}, io_processor="harmful")
    assert (error["message"], error["param"]) == ("data.x: expected another one", "data.x")
    error = refused(server, data=ROWS)
    assert (
        error["message"]
        == "io_processor: expected one of harmful, in_rounds, nearest, slow_rounds, got none"
    )
    error = refused(server, data=ROWS, io_processor="nearst")
    assert error["message"].endswith("got 'nearst' (did you mean 'nearest'?)")
    assert refused(server, 404, data=ROWS, model="x")["code"] == "model_not_found"
    assert refused(server, data=ROWS, io_processor="nearest", priority=-1)["param"] == "priority"


def test_a_fault_names_the_processor(server):
    error = refused(server, 500, data={"post_process": "fails"}, io_processor="harmful")
    assert error["type"] == "plugin_error"
    assert "plugin 'harmful'" in error["message"]
    assert error["message"].endswith("its post_process failed: KeyError")
    assert server.client.get("/health").status_code == 200


def test_a_request_that_times_out(server):
    error = refused(server, 408, data={}, io_processor="harmful", timeout=1e-9)
    assert error["code"] == "timeout"
    assert error["message"].endswith("""prompts[0]: it ended by "timeout\"""")


def test_one_that_is_slow_delays_no_other_request(server):
    GO_ON.clear()
    WAITING.clear()
    answers = []
    body = {"data": {"pre_process": "waits"}, "io_processor": "harmful"}
    thread = threading.Thread(target=lambda: answers.append(post(server, **body)))
    thread.start()
    try:
        assert WAITING.wait(PATIENCE_S)
        assert post(server, data=ROWS, io_processor="nearest")["data"]["names"]
        assert not answers
    finally:
        GO_ON.set()
        thread.join(PATIENCE_S)
    assert answers[0]["data"] == "done"


def test_rounds_are_answered_together(server):
    rounds = [[[1], [2], [3]], [], [[4]]]
    answer = post(server, data={"rounds": rounds}, io_processor="in_rounds")
    assert answer["data"] == [1, 3, 0, 1]
    error = refused(server, data={"rounds": [[[1], [9999]]]}, io_processor="in_rounds")
    assert error["message"].startswith(
        "data: the IO processor 'in_rounds': round 2: prompts[1]: prompt_token_ids[0]: expected"
    )
    assert error["param"] == "data"
    error = refused(server, 500, data={"rounds": [[[1]], "fails"]}, io_processor="in_rounds")
    assert error["message"].endswith("its post_process failed: KeyError")


def test_a_disconnect_aborts_the_present_round(server):
    data = {"rounds": [[[1], [2], [3]], [[4]]], "name": "disconnected"}
    body = json.dumps({"data": data, "io_processor": "slow_rounds", "tags": {"a": "b"}}).encode()
    connection = server.socket()
    connection.sendall(
        b"POST /pooling HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )

    async def until_live(count):
        while len(await server.engine.engines.live_requests()) != count:
            await asyncio.sleep(0.005)

    server.call(until_live, 3)
    connection.close()
    wait_until(lambda: InRounds.over["disconnected"])
    assert InRounds.over["disconnected"] == ["ended"]
    server.call(until_live, 0)
    wait_until(lambda: server.service.load.open == 0)


def test_texts_are_pooled(server, own_engine):
    answer = post(server, input=TEXTS, task="token_embed")
    assert answer["object"] == "list"
    assert answer["usage"]["total_tokens"] == sum(map(len, own_engine["token_embed"]))
    for index, entry in enumerate(answer["data"]):
        assert (entry["object"], entry["index"]) == ("pooling", index)
        assert np.allclose(entry["data"], own_engine["token_embed"][index])
    (entry, _) = post(server, input=TEXTS, encoding_format="base64")["data"]
    vector = np.frombuffer(base64.b64decode(entry["data"]), "<f4")
    assert np.array_equal(vector, own_engine["embed"][0])
    assert refused(server, input=["a", ""])["param"] == "input[1]"
    message = refused(server, input="a", task="classify")["message"]
    assert message.startswith("classify: this model cannot do it")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "data: expected either data, for an IO processor, or input, got neither"),
        ({"data": 1, "input": "a"}, "data: expected either data, for an IO processor, or input, "),
        ({"input": "a", "io_processor": "x"}, "io_processor: expected none with input"),
        ({"input": "a", "task": "plugin"}, 'task: expected data with "plugin", got input'),
        ({"data": 1, "task": "embed"}, 'task: expected "plugin" with data, got "embed"'),
        ({"data": 1, "pooler": "mean"}, "pooler: expected none with data"),
        ({"data": 1, "plugin_args": {"x": {}}}, "plugin_args: expected none with data"),
        ({"data": 1, "dimensions": 2}, "dimensions: expected none with data"),
        ({"data": 1, "normalize": True}, "normalize: expected none with data"),
        ({"data": 1, "use_activation": False}, "use_activation: expected none with data"),
        ({"data": 1, "encoding_format": "base64"}, "encoding_format: expected none with data"),
        ({"data": 1, "prompt": "x"}, "prompt: not supported: send it as input"),
        ({"messages": [{"role": "user"}]}, "messages: not supported: send the text of the "),
    ],
)
def test_fields_that_do_not_go_together(fake, body, message):
    error = refused(fake, **body)
    assert error["message"].startswith(message)
    assert error["param"] == message.partition(":")[0]


@pytest.fixture(scope="module")
def fake():
    engine = FakeEngine(config=configured(), inputs={"nearest": json_schema(Measurements)})
    with running(engine) as running_server:
        yield running_server


def test_options_reach_the_engine(fake):
    options = {"priority": 3, "timeout": 9.0, "tags": {"a": "b"}, "cache_salt": "s"}
    answer = post(fake, data={"any": [None]}, truncate_prompt_tokens=7, **options)
    assert answer["data"] == {"of": {"any": [None]}}
    assert answer["io_processor"] == "nearest"
    data, name, passed = fake.engine.asked[-1]
    assert (data, name) == ({"any": [None]}, None)
    assert passed.pop("truncate_prompt_tokens") == 7
    assert {key: passed[key] for key in options} == options


def test_errors_of_the_engine_are_answers(fake):
    ended = RequestEndedError('prompts[0]: it ended by "abort"')
    ended.finish_reason = "abort"
    for error, status in ((ended, 503), (PluginFaultError("plugin 'x': failed"), 500)):
        fake.engine.error = error
        try:
            assert str(error) in refused(fake, status, data=1)["message"]
        finally:
            fake.engine.error = None


def test_inputs_are_described(fake):
    schemas = fake.client.get("/openapi.json").json()["components"]["schemas"]
    place = "#/components/schemas/IOProcessorData"
    assert {"$ref": place} in schemas["PoolingRequest"]["properties"]["data"]["anyOf"]
    assert schemas["IOProcessorData"]["anyOf"] == [
        {"title": "nearest", "$ref": f"{place}_nearest_Measurements"}
    ]
    described = schemas["IOProcessorData_nearest_Measurements"]
    assert described["properties"]["rows"]["description"] == "numbers from -1 to 1."
    with running(FakeEngine(config=configured(), inputs={})) as none:
        schemas = none.client.get("/openapi.json").json()["components"]["schemas"]
        assert schemas["IOProcessorData"]["anyOf"] == [{}]
