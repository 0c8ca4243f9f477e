"""Stored responses: `previous_response_id`, and the routes that show and delete them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sqlite3

import msgspec
import openai
import pytest
from starlette.exceptions import HTTPException
from support.delta_engine import DeltaEngine
from support.fake_engine import configured
from support.http_server import running
from support.scripted_server import WEATHER, server_config, write_model
from support.serve_program import serving

from hardpoint import AsyncLLM
from hardpoint.builtin_plugins.response_stores import sqlite
from hardpoint.builtin_plugins.response_stores.bounds import Bounds
from hardpoint.builtin_plugins.response_stores.memory import MemoryResponseStore
from hardpoint.builtin_plugins.response_stores.sqlite import SQLiteStore
from hardpoint.builtin_plugins.server.extensions import store_of
from hardpoint.errors import ConfigError, PluginConflictError
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Authenticator, Client, InstalledExtension, ResponseStore
from hardpoint.testing import write_scripted_model

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}
STORES = {
    "memory": lambda folder: {"use": "memory", "retain_seconds": 60.0},
    "sqlite": lambda folder: {"use": "sqlite", "path": str(folder / "responses.db")},
}


async def by_name(headers, path):
    """The client has the name that its key is."""
    name = headers.get("authorization", "").removeprefix("Bearer ")
    return Client(name=name, cache_salt=name) if name else None


NAMED = InstalledExtension("names", "names", Authenticator(authenticate=by_name))


@contextlib.contextmanager
def stored_server(folder, **options):
    """Run a server that stores responses, for any key."""
    tables = {"plugin": {"response_stores": options}, "kv_cache": {"block_size": 4}}
    config = server_config(write_model(folder), **tables)
    with running(AsyncLLM(config=config), authenticators=[NAMED]) as server:
        yield server


def client_of(server, key="alice"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module", params=STORES)
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with stored_server(folder, **STORES[request.param](folder)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "say abc"},
        {"input": [{"role": "user", "content": "hi"}], "instructions": "Be brief."},
        {"input": "hi", "tools": [TOOL]},
    ],
)
@pytest.mark.parametrize("has_previous", [False, True])
def test_input_tokens_are_those_of_the_response(client, fields, has_previous):
    if has_previous:
        before = client.responses.create(input="say abc", temperature=0)
        fields = {**fields, "previous_response_id": before.id}
    counted = client.responses.input_tokens.count(**fields)
    assert counted.object == "response.input_tokens"
    usage = client.responses.create(**fields, temperature=0, max_output_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens


def test_input_tokens_of_another_keys_response_are_not_counted(server, client):
    before = client.responses.create(input="say abc", temperature=0)
    other = client_of(server, "bob")
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        other.responses.input_tokens.count(input="hi", previous_response_id=before.id)


def test_a_response_goes_on_from_another_one(client):
    first = client.responses.create(input="say abc", temperature=0)
    assert first.store
    assert first.previous_response_id is None
    second = client.responses.create(
        input="and then", temperature=0, previous_response_id=first.id, instructions="Be short."
    )
    assert second.previous_response_id == first.id
    whole = client.responses.create(
        input=[
            {"role": "user", "content": "say abc"},
            *(item.model_dump(exclude_none=True) for item in first.output),
            {"role": "user", "content": "and then"},
        ],
        instructions="Be short.",
        temperature=0,
        store=False,
    )
    assert not whole.store
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output_text == whole.output_text
    third = client.responses.create(input="more", temperature=0, previous_response_id=second.id)
    assert third.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.retrieve(whole.id)
    assert error.value.code == "not_found"


def test_the_next_turn_finds_its_prompt_in_the_prefix_cache(client):
    first = client.responses.create(input="a prompt of some length " * 4, max_output_tokens=4)
    second = client.responses.create(input="on", max_output_tokens=4, previous_response_id=first.id)
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached > 0.9 * first.usage.input_tokens - 4


def test_a_store_may_retain_what_is_computed(tmp_path):
    with stored_server(tmp_path, **STORES["memory"](tmp_path)) as server:
        fields = {"input": "hi", "max_output_tokens": 4}
        ask = {"headers": {"authorization": "Bearer alice"}}
        first = server.post(PATH, fields, **ask).json()
        assert first["part_figures"]["retention"]["outcome"] == "accepted"
        second = server.post(PATH, {**fields, "previous_response_id": first["id"]}, **ask).json()
        assert second["part_figures"]["retention"]["seconds"] == 60
        unstored = server.post(PATH, {**fields, "store": False}, **ask).json()
        assert "part_figures" not in unstored
        session = first["id"]
        released = server.post(f"/v1/sessions/{session}/release", {}, **ask).json()
        assert released["outcome"] == "accepted"


def test_calls_and_reasoning_are_carried(client):
    thought = client.responses.create(input="think", temperature=0)
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    called = client.responses.create(
        input="weather", tools=[TOOL], temperature=0, previous_response_id=None
    )
    (*_, call) = called.output
    assert call.type == "function_call"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = client.responses.create(input=[output], tools=[TOOL], previous_response_id=called.id)
    items = client.responses.input_items.list(after.id, order="asc")
    assert [item.type for item in items] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert items.data[2].call_id == call.call_id
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(input=[output], previous_response_id=thought.id)
    assert "expected the call_id of a function_call before it, or of the previous response" in str(
        error.value
    )


@pytest.mark.parametrize("stream", [False, True])
def test_references_stand_for_stored_items(client, stream):
    fields = {"tools": [TOOL], "temperature": 0}
    called = client.responses.create(input="weather", **fields, stream=stream)
    if stream:
        called = [*called][-1].response
    asked = {"role": "user", "content": "weather"}
    output = {
        "type": "function_call_output",
        "call_id": called.output[-1].call_id,
        "output": "sunny",
    }
    references = [{"type": "item_reference", "id": item.id} for item in called.output]
    whole = [asked, *(item.model_dump(exclude_none=True) for item in called.output), output]
    referring = [asked, *references, output]
    first, second = (client.responses.create(input=i, **fields) for i in (whole, referring))
    assert second.usage.input_tokens == first.usage.input_tokens
    assert second.output_text == first.output_text
    counted = client.responses.input_tokens.count(input=referring, tools=[TOOL])
    assert counted.input_tokens == first.usage.input_tokens
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in items] == ["message", *(item["type"] for item in whole[1:])]


def test_unknown_references_are_refused(server, client):
    made = client.responses.create(input="hi", max_output_tokens=2)
    unsaved = client.responses.create(input="hi", max_output_tokens=2, store=False)
    reference = {"type": "item_reference", "id": made.output[0].id}
    unknown = [unsaved.output[0].id, f"{made.output[0].id}0", made.id, "msg_x_0", "x", "_" * 500]
    asks = [(client, reference | {"id": name}) for name in unknown]
    for asking, item in [*asks, (client_of(server, "bob"), reference)]:
        with pytest.raises(openai.BadRequestError) as error:
            asking.responses.create(input=[{"role": "user", "content": "hi"}, item])
        message = f"input[1].id: no item '{item['id'][:60]}"
        assert message in error.value.message
        assert "of a response is stored for this key" in error.value.message


def test_a_stream_is_stored_before_it_ends(client):
    events = client.responses.create(input="think", temperature=0, stream=True)
    (*_, last) = events
    assert last.type == "response.completed"
    stored = client.responses.retrieve(last.response.id)
    assert stored.output_text == last.response.output_text == "yes"
    assert stored.store


def test_one_that_is_cut_is_stored_as_incomplete(client):
    cut = client.responses.create(input="think", temperature=0, max_output_tokens=3)
    assert client.responses.retrieve(cut.id).status == "incomplete"


def test_responses_are_retrieved_and_deleted(client):
    made = client.responses.create(input="hi", temperature=0, metadata={"run": "7"})
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    client.responses.delete(made.id)
    for ask in (
        lambda: client.responses.retrieve(made.id),
        lambda: client.responses.delete(made.id),
        lambda: client.responses.input_items.list(made.id),
        lambda: client.responses.cancel(made.id),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            ask()
        assert error.value.param == "response_id"
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(input="hi", previous_response_id=made.id)
    assert error.value.code == "previous_response_not_found"
    assert error.value.param == "previous_response_id"
    assert made.id in error.value.message


def test_those_of_another_key_are_not_found(server, client):
    made = client.responses.create(input="hi", temperature=0)
    other = client_of(server, "bob")
    for ask in (
        lambda: other.responses.retrieve(made.id),
        lambda: other.responses.delete(made.id),
        lambda: other.responses.create(input="hi", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert client.responses.retrieve(made.id).id == made.id


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "resp_", "resp_" + "x" * 200, "a'--"])
def test_strange_ids_are_not_found(server, name):
    answer = server.client.get(f"{PATH}/{name}", headers={"authorization": "Bearer alice"})
    assert answer.status_code == 404


def test_input_items_come_in_pages(server, client):
    texts = [{"role": "user", "content": text} for text in "abcde"]
    made = client.responses.create(input=texts, max_output_tokens=2)
    newest = client.responses.input_items.list(made.id, limit=2)
    assert [item.content[0].text for item in newest.data] == ["e", "d"]
    assert newest.has_more
    assert [item.content[0].text for item in newest] == [*"edcba"]
    assert {(item.status, item.content[0].type) for item in newest} == {("completed", "input_text")}
    for query, message in (
        ("limit=0", "limit: expected a whole number from 1 to 100, got '0'"),
        ("after=x", "after: expected the id of an item, got 'x'"),
        ("order=up", 'order: expected "asc" or "desc", got \'up\''),
    ):
        path = f"{PATH}/{made.id}/input_items?{query}"
        answer = server.client.get(path, headers={"authorization": "Bearer alice"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_what_is_not_supported_is_refused(server, client):
    made = client.responses.create(input="hi", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.cancel(made.id)
    assert "expected one that runs in the background" in error.value.message
    key = {"headers": {"authorization": "Bearer alice"}}
    answer = server.client.get(f"{PATH}/{made.id}?stream=true", **key)
    assert answer.json()["error"]["message"].startswith("stream: expected false")


def test_a_conversation_has_limits(tmp_path):
    with stored_server(tmp_path, use="memory", max_response_bytes=2000) as server:
        client = client_of(server)
        settings = server.service.settings
        limits = msgspec.structs.replace(settings.limits, messages=5)
        msgspec.structs.force_setattr(settings, "limits", limits)
        texts = [{"role": "user", "content": "a"}] * 3
        first = client.responses.create(input=texts, max_output_tokens=1)
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(input=texts, previous_response_id=first.id)
        assert "expected a conversation of at most 5 items" in error.value.message
        assert error.value.param == "previous_response_id"
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(input="x" * 500 + "y" * 500, max_output_tokens=2)
        assert "store: expected a conversation of at most 2000 bytes" in error.value.message
        body = {"input": "x" * 1000, "max_output_tokens": 50, "stream": True}
        answer = server.post(PATH, body, headers={"authorization": "Bearer alice"})
        assert "store: expected a conversation" in answer.text
        if answer.status_code == 200:  # else all of it was there before its stream began
            *_, completed, failed, error = answer.text.strip().split("\n\n")
            assert "response.completed" not in completed
            assert failed.startswith("event: response.failed\n")
            assert "store: expected a conversation" in error


class Bad:
    """A store with functions of the test."""

    def __init__(self, put=None, get=None, deleted=True):
        self.put_error, self.content, self.deleted = put, get, deleted

    async def put(self, owner, response_id, content):
        if self.put_error is not None:
            raise self.put_error

    async def get(self, owner, response_id):
        return self.content

    async def delete(self, owner, response_id):
        return self.deleted

    def installed(self, name="bad"):
        store = ResponseStore(put=self.put, get=self.get, delete=self.delete)
        return InstalledExtension(name, name, store)


@pytest.mark.parametrize(
    ("bad", "method", "message"),
    [
        (Bad(put=OSError("secret")), "POST", "bad: its response store failed: OSError"),
        (Bad(get="text"), "GET", "bad: its response store failed: get returned a str, expected"),
        (Bad(get=b"{}"), "GET", "bad: its response store failed: get returned what was never put"),
        (Bad(deleted=None), "DELETE", "store failed: delete returned a NoneType, expected a bool"),
    ],
    ids=["put", "get", "content", "delete"],
)
def test_a_store_that_fails_is_named(bad, method, message):
    engine = DeltaEngine(config=configured())
    with running(engine, authenticators=[bad.installed()]) as server:
        path = PATH if method == "POST" else f"{PATH}/resp_1"
        body = {"json": {"input": "hi", "max_output_tokens": 2}} if method == "POST" else {}
        answer = server.client.request(method, path, **body)
        assert answer.status_code == 500
        assert message in answer.json()["error"]["message"]
        assert "secret" not in answer.text
        answer = server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200


def test_one_store_is_enough(tmp_path):
    engine = AsyncLLM(config=server_config(write_model(tmp_path)))
    several = [Bad().installed("one"), Bad().installed("two")]
    expected = pytest.raises(PluginConflictError, match="expected one ResponseStore, got that of")
    with expected, running(engine, authenticators=several):
        pass


def test_responses_in_a_file_outlive_the_server(tmp_path):
    options = STORES["sqlite"](tmp_path)
    with stored_server(tmp_path, **options) as server:
        made = client_of(server).responses.create(input="say abc", temperature=0)
    with stored_server(tmp_path, **options) as server:
        client = client_of(server)
        assert client.responses.retrieve(made.id).output_text == made.output_text
        again = client.responses.create(input="more", previous_response_id=made.id)
        assert again.previous_response_id == made.id


def test_a_store_of_one_process_is_refused_with_several():
    with pytest.raises(
        ConfigError, match=r"server\.workers: expected 1, because the ResponseStore"
    ):
        store_of([Bad().installed()], 2)
    shared = ResponseStore(put=Bad().put, get=Bad().get, delete=Bad().delete, is_shared=True)
    assert store_of([InstalledExtension("one", "one", shared)], 2).part is shared


@pytest.mark.nightly
def test_several_workers_share_a_file_and_refuse_memory(tmp_path):
    model = write_scripted_model(tmp_path / "model", {"user: hi\nassistant: ": "hello"})
    tables = ["server.workers = 2", 'plugin.response_stores.use = "sqlite"']
    tables.append('plugin.response_stores.path = "kept.db"')
    with serving(tmp_path, model, *tables) as server:
        made = [server.client.post(PATH, json={"input": "hi"}).json()["id"] for _ in range(4)]
        for name in made:
            for _ in range(3):  # connections of their own reach any worker
                fresh = server.client.get(f"{PATH}/{name}", headers={"connection": "close"})
                assert fresh.json()["id"] == name
    refused = [tables[0], 'plugin.response_stores.use = "memory"']
    with pytest.raises(AssertionError) as error, serving(tmp_path, model, *refused):
        pass
    assert "server.workers: expected 1, because the ResponseStore of" in str(error.value)


def bounded(**bounds):
    return Bounds(**{"seconds": 10.0, "max_bytes": 100, "max_response_bytes": 100, **bounds})


def store_of_kind(kind, tmp_path, clock):
    if kind == "memory":
        return MemoryResponseStore(bounded(), clock)
    return SQLiteStore(str(tmp_path / "kept.db"), bounded(), clock)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_store_keeps_its_bounds(tmp_path, kind):
    now = [1000.0]
    store = store_of_kind(kind, tmp_path, lambda: now[0])

    await store.put("a", "1", b"x" * 40)
    now[0] += 1
    await store.put("a", "2", b"y" * 40)
    now[0] += 1
    await store.put("b", "2", b"z" * 40)
    assert await store.get("a", "1") is None  # the oldest made room
    assert [await store.get(owner, "2") for owner in "ab"] == [b"y" * 40, b"z" * 40]
    await store.put("a", "2", b"w" * 50)
    assert await store.get("a", "2") == b"w" * 50
    assert await store.get("b", "2") == b"z" * 40
    with pytest.raises(RequestError, match="at most 100 bytes"):
        await store.put("a", "3", b"x" * 101)
    assert await store.delete("b", "2") is True
    assert await store.delete("b", "2") is False
    now[0] += 10
    assert await store.get("a", "2") is None
    assert await store.delete("a", "2") is False


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_no_owner_empties_a_store_for_others(tmp_path, kind):
    times = itertools.count(1000.0, 0.01)
    store = store_of_kind(kind, tmp_path, lambda: next(times))

    await store.put("a", "1", b"x" * 20)
    for index in range(8):
        await store.put("b", str(index), b"y" * 30)
    present = [await store.get("b", str(index)) is not None for index in range(8)]
    assert present == [False] * 6 + [True] * 2
    assert await store.get("a", "1") == b"x" * 20
    await store.put("c", "1", b"z" * 70)  # of the one who has most, and new: it stays
    present = [await store.get(*key) is not None for key in (("a", "1"), ("b", "7"), ("c", "1"))]
    assert present == [True, False, True]
    await store.put("c", "2", b"z" * 80)
    assert await store.get("a", "1") == b"x" * 20


def test_the_sizes_in_a_file_are_those_of_its_responses(tmp_path):
    path, now = tmp_path / "kept.db", [1000.0]

    def totals():
        with contextlib.closing(sqlite3.connect(path)) as database:
            sums = database.execute("SELECT coalesce(sum(size), 0), count(*) FROM responses")
            total = database.execute("SELECT coalesce(sum(size), 0) FROM owners")
            return (*total.fetchone(), *sums.fetchone())

    async def scenario():
        store = SQLiteStore(str(path), bounds, lambda: now[0])
        drawn = random.Random(3)
        for _ in range(40):
            now[0] += drawn.choice([0, 1, 4])
            name = str(drawn.randrange(4))
            if drawn.random() < 0.2:
                await store.delete(drawn.choice("ab"), name)
            else:
                await store.put(drawn.choice("ab"), name, bytes(drawn.randrange(60)))
            total, size, _ = totals()
            assert total == size <= 100

    bounds = bounded()
    asyncio.run(scenario())
    with contextlib.closing(sqlite3.connect(path)) as database:  # as of an earlier version
        database.executescript(
            "DROP TRIGGER owner_grew; DROP TRIGGER owner_shrank; DROP TABLE owners;"
            "CREATE TABLE total (size INTEGER);"
            "CREATE TRIGGER response_added AFTER INSERT ON responses"
            " BEGIN UPDATE total SET size = size + NEW.size; END;"
        )
    asyncio.run(SQLiteStore(str(path), bounds, lambda: now[0]).put("a", "5", b"x" * 7))
    total, size, number = totals()
    assert total == size
    assert number


@contextlib.contextmanager
def locked(path):
    """Keep the file locked for writers."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


def test_a_locked_file_is_waited_for_until_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "_WAIT_SECONDS", 0.1)

    async def scenario():
        store = SQLiteStore(str(tmp_path / "kept.db"), bounded())
        await store.put("a", "1", b"x")
        with locked(tmp_path / "kept.db"):
            calls = [store.put("a", str(n), b"y") for n in range(30)]
            results = await asyncio.gather(*calls, store.delete("a", "1"), return_exceptions=True)
            assert await store.get("a", "1") == b"x"
        await store.put("a", "2", b"z")
        return results

    for error in asyncio.run(scenario()):
        assert (type(error), error.status_code) == (HTTPException, 503)
        assert error.headers == {"retry-after": "5"}
        assert "the store of responses cannot be used now: it is locked" in error.detail


def test_a_full_disk_refuses_what_is_new_and_serves_the_rest(tmp_path, monkeypatch):
    connect = sqlite3.connect

    def full(*arguments, **options):
        database = connect(*arguments, **options)
        database.execute("PRAGMA max_page_count = 1")
        return database

    async def scenario():
        store = SQLiteStore(str(tmp_path / "kept.db"), Bounds(1000, 1 << 20, 1 << 20))
        await store.put("a", "1", b"x")
        monkeypatch.setattr(sqlite.sqlite3, "connect", full)
        with pytest.raises(HTTPException, match="503: the store .* or its disk is full"):
            await store.put("a", "2", b"y" * 100_000)
        return await store.get("a", "1"), await store.delete("a", "1")

    assert asyncio.run(scenario()) == (b"x", True)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_store_may_refuse_for_a_while(method):
    async def busy(*_):
        raise HTTPException(503, "it is locked", {"retry-after": "5"})

    store = ResponseStore(put=busy, get=busy, delete=busy)
    with running(DeltaEngine(config=configured(), extensions=(("acme", store),))) as server:
        path = "/v1/responses/resp_" + "0" * 32
        answer = server.client.request(method, path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["message"] == "it is locked"


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "kept.db"
    path.touch(0o644)
    with pytest.raises(ConfigError, match=r"expected a regular file with mode 0600, got mode 0644"):
        SQLiteStore(str(path), bounded())
    (tmp_path / "link.db").symlink_to(path)
    with pytest.raises(ConfigError, match=r"plugin\.response_stores\.path: .* cannot be used"):
        SQLiteStore(str(tmp_path / "link.db"), bounded())


def test_options_that_do_not_fit_are_refused(tmp_path):
    folder = write_model(tmp_path)
    for options, message in (
        ({"use": "sqlite"}, "path: expected the path of a file with use = 'sqlite'"),
        ({"use": "memory", "path": "x"}, "path: expected none with use = 'memory'"),
    ):
        config = server_config(folder, plugin={"response_stores": options})
        with pytest.raises(ConfigError, match=message):
            AsyncLLM(config=config)
