"""`hardpoint.testing.serve`: a real server on the scripted model."""

import pytest

from hardpoint.testing import serve

REPLIES = {"user: hi\nassistant: ": "hello"}
ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}


@pytest.mark.nightly
def test_serves_the_replies_and_the_schemas_of_real_plugins():
    with serve({"scheduler": {"policy": "fair"}}, replies=REPLIES) as server:
        answer = server.ask("/v1/chat/completions", {**ASK, "plugin_args": {"top_k": {"top_k": 5}}})
        assert answer.status == 200, server.log
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        events = server.ask("/v1/chat/completions", {**ASK, "stream": True}).events()
        texts = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(texts) == "hello"
        document = server.ask("/openapi.json").json()
        schemas = document["components"]["schemas"]
        top_k = schemas["PluginArgs"]["properties"]["top_k"]["$ref"].rpartition("/")[2]
        assert list(schemas[top_k]["properties"]) == ["top_k"]
        assert server.ask("/nowhere").status == 404
        assert server.ask("/v1/models", method="DELETE").status == 405
    assert "Serving" in server.log


def test_a_server_that_does_not_start_reports_why():
    with pytest.raises(RuntimeError, match="no such plugin|not installed|nobody"):
        serve({"plugins": {"enable": ["nobody"]}}).__enter__()
