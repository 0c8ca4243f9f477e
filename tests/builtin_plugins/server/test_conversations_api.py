"""OpenAI's Conversations and `/v1/responses/compact`, through openai's own client."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib

import openai
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.keyed_server import ALICE, BOB, keyed_server

from hardpoint.builtin_plugins.server.dialects.responses import compaction

STORES = {
    "memory": lambda folder: {"use": "memory", "retain_seconds": 60.0},
    "sqlite": lambda folder: {"use": "sqlite", "path": str(folder / "responses.db")},
}
GREEDY = {"temperature": 0, "max_output_tokens": 20}


@contextlib.contextmanager
def conversation_server(folder, store, **tables):
    plugin = {"response_stores": store}
    with keyed_server(folder, 4, plugin=plugin, kv_cache={"block_size": 4}, **tables) as server:
        yield server


@pytest.fixture(scope="module", params=STORES)
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with conversation_server(folder, STORES[request.param](folder)) as server:
        yield server


def client_of(server, key=ALICE):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def texts_of(items):
    return [part.text for item in items for part in item.content]


def test_a_conversation_is_created_updated_and_deleted(client):
    made = client.conversations.create(metadata={"topic": "demo"})
    assert (made.object, made.metadata) == ("conversation", {"topic": "demo"})
    assert made.id.startswith("conv_")
    assert client.conversations.retrieve(made.id) == made
    updated = client.conversations.update(made.id, metadata={"topic": "other"})
    assert (updated.id, updated.metadata) == (made.id, {"topic": "other"})
    assert client.conversations.retrieve(made.id).metadata == {"topic": "other"}
    assert client.conversations.update(made.id, metadata=None).metadata == {}
    assert client.conversations.retrieve(made.id).metadata == {}
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (
        made.id,
        "conversation.deleted",
        True,
    )
    with pytest.raises(openai.NotFoundError) as error:
        client.conversations.retrieve(made.id)
    assert (error.value.code, error.value.param) == ("not_found", "conversation_id")
    with pytest.raises(openai.NotFoundError):
        client.conversations.delete(made.id)


@pytest.mark.parametrize("others", [{}, {"unknown": 1}])
def test_new_metadata_may_be_null_and_not_left_out(server, client, others):
    path = f"/v1/conversations/{client.conversations.create(metadata={'a': 'b'}).id}"
    headers = {"authorization": f"Bearer {ALICE}"}
    answer = server.post(path, others, headers=headers)
    assert answer.json()["error"]["message"].startswith("metadata: missing")
    answer = server.post(path, {"metadata": None, **others}, headers=headers)
    assert (answer.status_code, answer.json()["metadata"]) == (200, {})


def test_items_are_added_listed_retrieved_and_deleted(client):
    made = client.conversations.create(items=[{"role": "user", "content": "first"}])
    added = client.conversations.items.create(
        made.id,
        items=[
            {"role": "assistant", "content": "second"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "result"},
        ],
    )
    assert [item.type for item in added.data] == [
        "message",
        "function_call",
        "function_call_output",
    ]
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[-1].id)
    listed = list(client.conversations.items.list(made.id, order="asc", limit=3))
    assert len(listed) == 4  # the client follows the pages
    assert texts_of(listed[:2]) == ["first", "second"]
    assert [part.type for item in listed[:2] for part in item.content] == [
        "input_text",
        "output_text",
    ]
    assert {item.status for item in listed} == {"completed"}
    newest = client.conversations.items.list(made.id, limit=1)
    assert (newest.data[0].id, newest.has_more) == (added.last_id, True)
    item = client.conversations.items.retrieve(added.first_id, conversation_id=made.id)
    assert texts_of([item]) == ["second"]
    left = client.conversations.items.delete(added.first_id, conversation_id=made.id)
    assert left.id == made.id
    assert added.first_id not in {item.id for item in client.conversations.items.list(made.id)}
    with pytest.raises(openai.NotFoundError, match="item_id"):
        client.conversations.items.retrieve(added.first_id, conversation_id=made.id)


def test_responses_continue_a_conversation(client):
    made = client.conversations.create(items=[{"role": "user", "content": "say abc"}])
    first = client.responses.create(conversation=made.id, input="and then", **GREEDY)
    assert first.conversation.id == made.id
    *_, end = client.responses.create(conversation=made.id, input="more", stream=True, **GREEDY)
    second = end.response
    assert second.usage.input_tokens > first.usage.total_tokens
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert texts_of(items) == [
        "say abc",
        "and then",
        first.output_text,
        "more",
        second.output_text,
    ]
    whole = client.responses.create(
        input=[*({"role": i.role, "content": texts_of([i])[0]} for i in items[:4])],
        store=False,
        **GREEDY,
    )
    assert (whole.output_text, whole.usage.input_tokens) == (
        second.output_text,
        second.usage.input_tokens,
    )
    counted = client.responses.input_tokens.count(conversation=made.id, input="x")
    assert counted.input_tokens > second.usage.total_tokens


def test_a_response_that_is_not_stored_is_in_its_conversation(client):
    made = client.conversations.create()
    answer = client.responses.create(
        conversation={"id": made.id}, input="say abc", store=False, **GREEDY
    )
    assert not answer.store
    items = client.conversations.items.list(made.id, order="asc").data
    assert texts_of(items) == ["say abc", answer.output_text]


def test_concurrent_changes_lose_no_items(server, client):
    made = client.conversations.create()

    def add(number):
        client.conversations.items.create(made.id, items=[{"role": "user", "content": str(number)}])

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(24)))
    items = client.conversations.items.list(made.id, limit=100).data
    assert sorted(int(text) for text in texts_of(items)) == list(range(24))
    assert not list(server.service.counts.items("held conversation"))


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"conversation": "conv_none"}, 404, "conversation: no conversation 'conv_none'"),
        ({"conversation": "../secret"}, 404, "conversation: no conversation"),
        (
            {"conversation": "conv_a", "previous_response_id": "resp_a"},
            400,
            "conversation: expected none with previous_response_id",
        ),
    ],
)
def test_wrong_conversations_of_responses_are_rejected(server, fields, status, message):
    headers = {"authorization": f"Bearer {ALICE}"}
    answer = server.post("/v1/responses", {"input": "hi", **fields}, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith(message)


def test_an_item_cannot_be_added_twice(client):
    item = {"id": "msg_1", "role": "user", "content": "once"}
    made = client.conversations.create(items=[item])
    for add in (
        lambda: client.conversations.items.create(made.id, items=[item]),
        lambda: client.responses.create(conversation=made.id, input=[item], **GREEDY),
    ):
        with pytest.raises(openai.BadRequestError, match=r"\[0\].id: expected an id"):
            add()
    assert len(client.conversations.items.list(made.id).data) == 1


def test_conversations_belong_to_their_key_and_count_for_its_rate(server, client):
    made = client.conversations.create()
    bob = client_of(server, BOB)
    for ask in (
        lambda: bob.conversations.retrieve(made.id),
        lambda: bob.conversations.delete(made.id),
        lambda: bob.responses.create(conversation=made.id, input="hi"),
        lambda: bob.conversations.items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.RateLimitError):
        bob.conversations.create()
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "nobodys").conversations.create()
    assert client.conversations.retrieve(made.id) == made


def test_limits_hold_for_conversations(tmp_path):
    store = {"use": "memory", "max_response_bytes": 2000}
    limits = {"server": {"limits": {"messages": 3}}}
    with conversation_server(tmp_path, store, **limits) as server:
        client = client_of(server)
        message = {"role": "user", "content": "hi"}
        made = client.conversations.create(items=[message] * 2)
        with pytest.raises(openai.BadRequestError, match="at most 3 items"):
            client.conversations.items.create(made.id, items=[message] * 2)
        with pytest.raises(
            openai.BadRequestError,
            match="items: expected a conversation of at most 3 items on this server, got 4",
        ):
            client.conversations.create(items=["no item"] * 4)
        with pytest.raises(openai.BadRequestError, match="metadata"):
            client.conversations.create(metadata={"a": "x" * 513})
        with pytest.raises(openai.BadRequestError, match="at most 2000 bytes"):
            client.conversations.create(items=[{"role": "user", "content": "x" * 3000}])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server with conversations of at most two items."""
    limits = {"server": {"limits": {"messages": 2}}}
    folder = tmp_path_factory.mktemp("small")
    with conversation_server(folder, STORES["memory"](folder), **limits) as server:
        yield server


def made_of(client, count):
    items = [{"role": "user", "content": "think"}] * count
    return client.conversations.create(items=items).id


@pytest.mark.parametrize(
    ("count", "fields", "message"),
    [
        (1, {"input": "hi"}, "input: expected .* 2 items on this server, got 2 before the answer"),
        (2, {}, "conversation: expected .* 2 items on this server, got 2 before the answer"),
        (2, {"input": "hi"}, "input: expected .* 2 items on this server, got 3"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_conversation_is_rejected_before_it_is_answered(
    small, monkeypatch, count, fields, message, stream
):
    client = client_of(small)
    name = made_of(client, count)
    monkeypatch.setattr(small.engine, "chat", lambda **_: pytest.fail("it is answered"))
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(conversation=name, stream=stream, **fields, **GREEDY)
    assert len(client.conversations.items.list(name).data) == count


def test_a_full_conversation_is_counted_and_compacted(small):
    client = client_of(small)
    name = made_of(client, 2)
    assert client.responses.input_tokens.count(conversation=name).input_tokens
    body = {"conversation": name, "temperature": 0}
    headers = {"authorization": f"Bearer {ALICE}"}
    assert small.post("/v1/responses/compact", body, headers=headers).status_code == 200


@pytest.mark.parametrize(("count", "fields"), [(0, {"input": "think"}), (1, {})])
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_may_be_longer_by_the_items_of_its_last_answer(small, count, fields, stream):
    client = client_of(small)
    name = made_of(client, count)
    answer = client.responses.create(
        conversation=name, stream=stream, **fields, temperature=0, max_output_tokens=40
    )
    if stream:
        assert [event.type for event in answer][-1] == "response.completed"
    listed = client.conversations.items.list(name, order="asc").data
    assert [item.type for item in listed] == ["message", "reasoning", "message"]
    with pytest.raises(openai.BadRequestError, match="conversation: expected .* 2 items .* got 3"):
        client.responses.create(conversation=name)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/conversations"),
        ("GET", "/v1/conversations/conv_1"),
        ("DELETE", "/v1/conversations/conv_1/items/msg_1"),
    ],
)
def test_without_a_store_the_error_names_the_setting(method, path):
    with running(FakeEngine(config=configured())) as server:
        answer = server.client.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == 404
        assert "plugin.response_stores.use" in answer.json()["error"]["message"]
        answer = server.post("/v1/responses", {"input": "hi", "conversation": "conv_1"})
        assert answer.json()["error"]["param"] == "conversation"


def test_openapi_has_the_routes(server):
    paths = server.client.get("/openapi.json", headers={"authorization": f"Bearer {ALICE}"}).json()[
        "paths"
    ]
    item = paths["/v1/conversations/{conversation_id}"]
    assert {"get", "post", "delete"} <= set(item)
    assert "post" in paths["/v1/conversations"]
    assert "post" in paths["/v1/responses/compact"]


def test_input_may_be_left_out_if_the_conversation_has_items(server, client):
    items = [{"role": "user", "content": "say abc"}]
    made = client.conversations.create(items=items)
    counted = client.responses.input_tokens.count(conversation=made.id)
    first = client.responses.create(conversation=made.id, **GREEDY)
    same = client.responses.create(input="say abc", **GREEDY)
    assert first.output_text == same.output_text
    assert counted.input_tokens == first.usage.input_tokens == same.usage.input_tokens
    roles = [item.role for item in client.conversations.items.list(made.id, order="asc")]
    assert roles == ["user", "assistant"]
    assert client.responses.create(previous_response_id=first.id, **GREEDY).status
    empty = client.conversations.create()
    for fields in ({}, {"conversation": empty.id}, {"input": []}):
        headers = {"authorization": f"Bearer {ALICE}"}
        for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
            answer = server.post(path, fields, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


class TestCompaction:
    def test_user_messages_and_a_summary_replace_a_conversation(self, client):
        first = client.responses.create(input="say abc", **GREEDY)
        made = client.responses.compact(
            model=None, previous_response_id=first.id, extra_body={"temperature": 0}
        )
        assert made.object == "response.compaction"
        assert [item.type for item in made.output] == ["message", "compaction"]
        assert made.output[0].role == "user"
        assert made.usage.input_tokens > first.usage.total_tokens
        summary = base64.b64decode(made.output[1].encrypted_content).decode()
        assert summary
        items = [item.model_dump(exclude_none=True) for item in made.output]
        following = client.responses.create(
            input=[*items, {"role": "user", "content": "go on"}], **GREEDY
        )
        assert following.status == "completed"

    def test_the_model_reads_the_instruction_and_later_the_summary(self):
        with running(FakeEngine(config=configured())) as server:
            fields = {"input": "say abc", "instructions": "Be brief."}
            made = server.post("/v1/responses/compact", fields).json()
            assert asked_messages(server) == [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "say abc"},
                {"role": "user", "content": compaction.INSTRUCTION},
            ]
            server.post(
                "/v1/responses", {"input": [*made["output"], {"role": "user", "content": "x"}]}
            )
            summary = base64.b64decode(made["output"][1]["encrypted_content"]).decode()
            assert asked_messages(server)[1] == {
                "role": "user",
                "content": f"Summary of the conversation so far:\n{summary}",
            }

    def test_it_is_not_streamed(self, server):
        fields = {"input": "say abc", "stream": True, "temperature": 0}
        headers = {"authorization": f"Bearer {ALICE}"}
        answer = server.post("/v1/responses/compact", fields, headers=headers)
        assert (answer.status_code, answer.json()["object"]) == (200, "response.compaction")

    def test_a_summary_that_is_cut_is_an_error(self, server):
        fields = {"input": "say abc", "max_output_tokens": 1, "temperature": 0}
        headers = {"authorization": f"Bearer {ALICE}"}
        answer = server.post("/v1/responses/compact", fields, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "compaction_failed")

    def test_content_that_is_not_of_this_api_is_rejected(self):
        item = {"type": "compaction", "encrypted_content": "gAAAA!"}
        with running(FakeEngine(config=configured())) as server:
            answer = server.post("/v1/responses", {"input": [item]})
        assert answer.json()["error"]["param"] == "input[0].encrypted_content"


def asked_messages(server):
    """Return the messages of the last request to the fake engine."""
    return server.engine.asked[-1][0]
