"""OpenAI's files and batches over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import io
import json
import os
import signal
import time
from types import SimpleNamespace

import openai
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import server_config, user, write_model
from support.serve_program import enabling, serving
from support.waiting import HeldSteps, alive, wait_until

from hardpoint import AsyncLLM
from hardpoint.builtin_plugins.batch_routes import file_route, runner
from hardpoint.builtin_plugins.batch_routes.folder import BatchFolder, BatchPlace, OwnerFolder
from hardpoint.builtin_plugins.batch_routes.records import BatchObject, BatchRecord, FileObject
from hardpoint.builtin_plugins.batch_routes.runner import Slots
from hardpoint.builtin_plugins.server.batches.lines import BatchReader
from hardpoint.errors import ConfigError, EngineDeadError
from hardpoint.plugins.server import Authenticator, Client, InstalledExtension

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
KEY = {"headers": {"authorization": "Bearer alice"}}


async def by_name(headers, path):
    """The client has the name that its key is."""
    name = headers.get("authorization", "").removeprefix("Bearer ")
    return Client(name=name, max_priority=5000) if name else None


NAMED = InstalledExtension("names", "names", Authenticator(authenticate=by_name))


@contextlib.contextmanager
def batch_server(folder, model=None, scheduler=None, server=None, **options):
    """Run a server with the routes, for any key."""
    options = {"folder": str(folder / "batches"), **options}
    config = server_config(
        model or write_model(folder),
        plugin={"batch_routes": options},
        scheduler={"policy": "priority", **(scheduler or {})},
        server={
            "port": 0,
            "access_log": "off",
            "unknown_fields": "error",
            **(server or {}),
        },
        plugins={"enable": ["support.plugins.slow:Slow"]},
    )
    with running(AsyncLLM(config=config), authenticators=[NAMED]) as server:
        yield server


def client_of(server, key="alice"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(folder):
    with batch_server(folder, owner_files=200) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def line(number, url=COMPLETIONS, **body):
    fields = {"prompt": "say abc", "max_tokens": 4, "temperature": 0} if url == COMPLETIONS else {}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {**fields, **body}}


def endless(number):
    """Return a line that is not answered before its batch is cancelled, or expires."""
    slow = {"slow": {"seconds": 0.1}}
    return line(number, prompt="loop", max_tokens=900, ignore_eos=True, plugin_args=slow)


def upload(client, lines, name="in.jsonl"):
    content = b"".join(
        entry if isinstance(entry, bytes) else json.dumps(entry).encode() + b"\n" for entry in lines
    )
    return client.files.create(file=(name, content), purpose="batch")


def begin(client, lines, endpoint=COMPLETIONS, **fields):
    return client.batches.create(
        input_file_id=upload(client, lines).id,
        endpoint=endpoint,
        completion_window="24h",
        **fields,
    )


def ended(client, batch):
    """Return a batch once it has ended."""
    states = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch.id).status in states)
    return client.batches.retrieve(batch.id)


def lines_of(client, file_id):
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


class TestFiles:
    def test_a_file_is_kept_shown_and_deleted(self, client):
        made = upload(client, [line(1)], "mine.jsonl")
        assert (made.filename, made.purpose, made.status) == ("mine.jsonl", "batch", "processed")
        assert client.files.retrieve(made.id) == made
        assert json.loads(client.files.content(made.id).text) == line(1)
        assert made.id in [file.id for file in client.files.list(purpose="batch")]
        assert client.files.delete(made.id).deleted
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="this key has no file"):
                ask(made.id)

    def test_a_large_file_comes_in_parts(self, client):
        content = os.urandom(12 << 20)  # more than a body of JSON may have
        made = client.files.create(file=("large.jsonl", content), purpose="batch")
        assert made.bytes == len(content)
        assert client.files.content(made.id).content == content
        client.files.delete(made.id)

    def test_lists_come_in_pages(self, server):
        client = client_of(server, "pages")
        made = [upload(client, [line(1)], f"{number}.jsonl").id for number in range(5)]
        assert [file.id for file in client.files.list(limit=2)] == made[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc")] == made
        page = client.files.list(limit=2, order="asc")
        assert (len(page.data), page.has_more) == (2, True)
        for query, message in (
            ("limit=0", "limit: expected a whole number from 1 to 10000, got '0'"),
            ("after=file-1", "after: expected the id of one of them, got 'file-1'"),
            ("colour=red", "colour: unknown field"),
        ):
            answer = server.client.get(f"/v1/files?{query}", **KEY)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message)

    def test_those_of_another_key_are_not_found(self, server, client):
        made = upload(client, [line(1)])
        other = client_of(server, "bob")
        assert not other.files.list().data
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError, match="expected a file of this key"):
            other.batches.create(
                input_file_id=made.id, endpoint=COMPLETIONS, completion_window="24h"
            )

    @pytest.mark.parametrize("name", ["../../etc/passwd", "a\\b", "..", "x" * 256])
    def test_names_that_look_like_paths_are_refused(self, client, name):
        with pytest.raises(openai.BadRequestError, match="file: expected a name of at most 255"):
            client.files.create(file=(name, b"{}"), purpose="batch")

    @pytest.mark.parametrize(
        "name", ["..%2f..%2flock", "%2e%2e", "lock", "file-../../lock", "file-" + "0" * 32]
    )
    def test_strange_ids_are_not_found(self, server, name):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert server.client.get(path, **KEY).status_code == 404

    @pytest.mark.parametrize(
        ("form", "message"),
        [
            ({"data": {"purpose": "batch"}, "files": {"other": b"{}"}}, "'other': unknown field"),
            ({"data": {"purpose": "tune"}, "files": {"file": b"{}"}}, "purpose: expected 'batch'"),
            ({"files": {"file": b"{}"}}, "purpose: expected 'batch', got None"),
            ({"data": {"purpose": "batch"}, "files": {"file": b""}}, "file: expected 1 to"),
            (
                {"data": {"purpose": "batch"}, "files": {"file": b"{}", "other": b"{}"}},
                "body: expected a multipart/form-data with one file and the field purpose",
            ),
            (
                {
                    "data": {"purpose": "batch", "expires_after[anchor]": "now"},
                    "files": {"file": b"{}"},
                },
                "expires_after.anchor: expected 'created_at', got 'now'",
            ),
            (
                {
                    "data": {
                        "purpose": "batch",
                        "expires_after[anchor]": "created_at",
                        "expires_after[seconds]": "5",
                    },
                    "files": {"file": b"{}"},
                },
                "expires_after.seconds: expected 3600 to 2592000, got '5'",
            ),
            (
                {
                    "data": {
                        "purpose": "batch",
                        "expires_after[anchor]": "created_at",
                        "expires_after[seconds]": "9" * 5000,
                    },
                    "files": {"file": b"{}"},
                },
                "expires_after.seconds: expected 3600 to 2592000, got '999",
            ),
        ],
        ids=["field", "purpose", "no purpose", "empty", "two", "anchor", "seconds", "digits"],
    )
    def test_a_wrong_form_is_refused(self, server, form, message):
        answer = server.client.post("/v1/files", **form, **KEY)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(message)

    def test_other_bodies_are_refused(self, server):
        answer = server.client.post("/v1/files", json={}, **KEY)
        assert answer.status_code == 415
        assert "content-type: expected multipart/form-data, got" in answer.text
        headers = {**KEY["headers"], "content-type": "multipart/form-data; boundary=x"}
        answer = server.client.post("/v1/files", content=b"nothing", headers=headers)
        assert answer.status_code == 400
        chat = server.client.post(CHAT, files={"file": b"{}"}, **KEY)
        assert chat.status_code == 415

    def test_a_key_is_needed(self, server):
        assert server.client.get("/v1/files").status_code == 401


class TestBatches:
    def test_a_batch_is_answered(self, server, client):
        texts = ["hi", "fox", "hi"]
        lines = [line(n, CHAT, messages=user(text)) for n, text in enumerate(texts)]
        began = begin(client, [*lines, b"\n"], CHAT, metadata={"run": "7"})
        assert began.status == "validating"
        assert began.metadata == {"run": "7"}
        batch = ended(client, began)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 3, 0)
        assert batch.error_file_id is None
        answers = {item["custom_id"]: item for item in lines_of(client, batch.output_file_id)}
        assert answers.keys() == {"r0", "r1", "r2"}
        for number, text in enumerate(texts):
            body = {"messages": user(text)}
            alone = server.post(CHAT, body, **KEY).json()["choices"][0]["message"]
            response = answers[f"r{number}"]["response"]
            assert response["status_code"] == 200
            assert response["body"]["choices"][0]["message"] == alone
        assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
        assert batch.id in [item.id for item in client.batches.list()]

    def test_requests_that_fail_are_in_the_error_file(self, client):
        lines = [line(0), line(1, temperature=-1), line(2, priority=0)]
        batch = ended(client, begin(client, lines))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 1, 2)
        wrong, important = sorted(
            lines_of(client, batch.error_file_id), key=lambda item: item["custom_id"]
        )
        assert wrong["response"]["status_code"] == 400
        message = important["response"]["body"]["error"]["message"]
        assert message == "priority: expected 1000 to 5000 for this key, got 0"

    @pytest.mark.parametrize(
        ("lines", "code", "message"),
        [
            ([line(0), b"{\n"], "invalid_json_line", ":2: expected a line of JSON"),
            ([line(0), line(0)], "invalid_file", ":2: custom_id: expected a new one, got 'r0'"),
            (
                [line(0), b"\n \n", line(0)],
                "invalid_file",
                ":4: custom_id: expected a new one, got 'r0'",
            ),
            (
                [line(0, CHAT)],
                "mismatched_url",
                ":1: url: expected '/v1/completions', the endpoint",
            ),
            ([{**line(0), "url": "/v1/files"}], "invalid_value", ":1: url: expected"),
            ([{**line(0), "url": "/../load"}], "invalid_value", ":1: url: expected"),
            ([b"\n"], "empty_file", ": expected a request per line, got none"),
            ([b"\xff\n"], "invalid_file", ":1: expected UTF-8"),
        ],
        ids=["json", "twice", "after-blanks", "endpoint", "route", "path", "empty", "bytes"],
    )
    def test_a_file_with_wrong_lines_fails(self, client, lines, code, message):
        batch = ended(client, begin(client, lines))
        assert (batch.status, batch.output_file_id) == ("failed", None)
        (error,) = batch.errors.data
        assert error.code == code
        assert message in error.message
        if (number := message.split(":")[1]).isdecimal():
            assert error.line == int(number)

    def test_a_file_that_cannot_be_checked_fails(self, client, monkeypatch):
        def read(reader, number, text):
            raise OverflowError("a number is too large")

        monkeypatch.setattr(BatchReader, "read", read)
        batch = ended(client, begin(client, [line(0)]))
        assert batch.status == "failed"
        (error,) = batch.errors.data
        assert (error.code, error.line) == ("server_error", 1)
        assert "requests cannot be read: OverflowError: a number is too large" in error.message

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"endpoint": "/v1/files"}, "endpoint: expected '/v1/chat/completions' or"),
            ({"completion_window": "1h"}, "completion_window: expected"),
            ({"input_file_id": "../lock"}, "input_file_id: expected a file of this key with the"),
            ({"metadata": {"k": 5}}, "metadata.k: expected a string, got 5"),
            ({"colour": "red"}, "colour: unknown field"),
        ],
    )
    def test_a_wrong_body_is_refused(self, server, client, fields, message):
        body = {
            "input_file_id": upload(client, [line(0)]).id,
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
        }
        answer = server.post("/v1/batches", {**body, **fields}, **KEY)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(message)

    def test_the_file_may_be_deleted_and_others_see_nothing(self, server, client):
        file = upload(client, [line(n) for n in range(4)])
        batch = client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        )
        client.files.delete(file.id)
        other = client_of(server, "bob")
        for ask in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="this key has no batch"):
                ask(batch.id)
        assert not other.batches.list().data
        assert ended(client, batch).request_counts.completed == 4

    def test_a_batch_is_cancelled(self, client):
        began = begin(client, [line(100), *map(endless, range(40))])
        wait_until(lambda: client.batches.retrieve(began.id).status == "in_progress")
        assert client.batches.cancel(began.id).status in ("cancelling", "cancelled")
        batch = ended(client, began)
        assert batch.status == "cancelled"
        assert batch.cancelled_at >= batch.cancelling_at
        counts = batch.request_counts
        assert counts.total == counts.completed + counts.failed == 41
        errors = lines_of(client, batch.error_file_id)
        assert {item["error"]["code"] for item in errors} == {"batch_cancelled"}
        with pytest.raises(openai.ConflictError, match="got one that is cancelled"):
            client.batches.cancel(began.id)


async def test_users_come_before_batches():
    waiting = [1]

    class Engines:
        async def load(self):
            if waiting[0] is None:
                raise EngineDeadError("it restarts")
            return SimpleNamespace(num_waiting=waiting[0])

    slots, begun = Slots(SimpleNamespace(engines=Engines()), 2), []

    async def line(number):
        async with slots.one():
            begun.append(number)
            await asyncio.sleep(0.05)

    lines = [asyncio.create_task(line(number)) for number in range(4)]
    for number in (1, None):  # a request of a user waits; the engine is restarted
        waiting[0] = number
        await asyncio.sleep(0.15)
        assert not begun
    waiting[0] = 0
    await asyncio.gather(*lines)
    assert begun == [0, 1, 2, 3]


def test_bounds_of_a_key(tmp_path):
    bounds = {"file_bytes": 1000, "owner_files": 3, "owner_bytes": 1500, "requests": 2}
    with batch_server(tmp_path, **bounds) as server:
        client = client_of(server)
        upload(client, [b"x" * 900])
        with pytest.raises(openai.BadRequestError, match="at most 1500 bytes in all files"):
            upload(client, [b"x" * 900])
        with pytest.raises(openai.BadRequestError, match="file: expected 1 to 1000 bytes"):
            upload(client, [b"x" * 1001])
        with pytest.raises(openai.APIStatusError, match="expected at most 66536 bytes"):
            upload(client, [b"x" * 100_000])
        bob = client_of(server, "bob")
        for _ in range(2):
            upload(bob, [line(0)])
        batch = ended(bob, begin(bob, [line(n) for n in range(3)]))
        assert batch.errors.data[0].code == "too_many_requests"
        with pytest.raises(openai.BadRequestError, match="at most 3 files of a key"):
            upload(bob, [line(0)])


FORM = b"""--B\r
Content-Disposition: form-data; name="purpose"\r
\r
batch\r
--B\r
Content-Disposition: form-data; name="file"; filename="a"\r
\r
{}\r
--B--\r
"""


def kept_bytes(folder):
    """Return the bytes of a server's folder, links counted once, without reserved bytes.

    The reservation of a batch, an empty file with a size, is removed after the record has its end.
    """
    files = [path for path in (folder / "batches").rglob("*") if path.is_file()]
    statuses = [path.stat() for path in files if path.suffix != ".room"]
    return sum({stat.st_ino: stat.st_size for stat in statuses}.values())


def test_inputs_of_deleted_files_count_while_their_batches_run(tmp_path):
    lines = [line(number, prompt="x" * 1000) for number in range(40)]
    with batch_server(tmp_path, owner_bytes=100_000) as server:
        client = client_of(server)
        server.call(server.engine.engines.pause)
        for _ in range(2):
            client.files.delete(begin(client, lines).input_file_id)
        with pytest.raises(openai.BadRequestError, match="expected at most 100000 bytes in all f"):
            begin(client, lines)
        assert kept_bytes(tmp_path) < 110_000
        assert client_of(server, "bob").files.list().data == []
        upload(client_of(server, "bob"), lines)


def test_a_batch_whose_answers_have_no_room_fails(tmp_path):
    lines = [line(number, max_tokens=20, logprobs=5) for number in range(40)]
    with batch_server(tmp_path, owner_bytes=20_000) as server:
        client = client_of(server)
        done = ended(client, begin(client, lines))
        assert kept_bytes(tmp_path) <= 20_000
        assert (done.status, done.errors.data[0].code) == ("failed", "no_room")
        message = "expected at most 20000 bytes in all files and batches of a key, and the answers"
        assert message in done.errors.data[0].message
        answers = lines_of(client, done.output_file_id)
        assert 0 < len(answers) == done.request_counts.completed < 40


def test_answers_of_several_batches_stay_within_the_bytes_of_a_key(tmp_path):
    lines = [line(number, max_tokens=20, logprobs=5) for number in range(40)]
    with batch_server(tmp_path, owner_bytes=40_000) as server:
        client = client_of(server)
        server.call(server.engine.engines.pause)
        begun = [begin(client, lines) for _ in range(2)]
        server.call(server.engine.engines.resume)
        done = [ended(client, batch) for batch in begun]
        assert kept_bytes(tmp_path) <= 40_000
        assert "failed" in {batch.status for batch in done}
        assert sum(batch.request_counts.completed for batch in done) > 0
        with pytest.raises(openai.BadRequestError, match="at most 40000 bytes in all files"):
            upload(client, [b"x" * 10_000])


def test_the_first_batches_that_ended_give_way(tmp_path):
    with batch_server(tmp_path, owner_batches=3) as server:
        client = client_of(server)
        file = upload(client, [b"{\n"]).id
        fields = {"endpoint": COMPLETIONS, "completion_window": "24h", "input_file_id": file}
        ids = [ended(client, client.batches.create(**fields)).id for _ in range(5)]
        assert [batch.id for batch in client.batches.list()] == ids[:1:-1]


def test_errors_of_lines_are_short(client):
    long = "n" * 1_000_000
    bad = [{long: 1}, line(1) | {"url": long}, line(2) | {"method": long}, {"a\nb": 1}]
    errors = ended(client, begin(client, bad)).errors.data
    assert [error.code for error in errors] == ["invalid_value"] * 4
    assert all(len(error.message) < 300 and len(error.param) < 150 for error in errors)
    assert "more characters" in errors[0].message
    assert errors[3].param == "'a\\nb'"


def test_answers_have_no_line_ends_of_unicode(client):
    ids = ["a\x85b", "c\u2028d", "e\u2029f", "é"]
    done = ended(client, begin(client, [line(1) | {"custom_id": name} for name in ids]))
    content = client.files.content(done.output_file_id).text
    assert sorted(json.loads(text)["custom_id"] for text in content.splitlines()) == sorted(ids)
    assert "\\u2028" in content
    assert "é" in content


@contextlib.contextmanager
def sending(server, key, body, length):
    """Open a connection on which an upload of a key has begun."""
    head = f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: multipart/form-data; boundary=B\r\nContent-Length: {length}\r\n\r\n"
    with server.socket() as connection:
        connection.sendall(head.encode() + body)
        yield connection


def test_slow_uploads_hold_up_those_of_no_other_key(tmp_path, monkeypatch):
    with batch_server(tmp_path) as server, contextlib.ExitStack() as slow:

        def answer(key):
            form = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
            headers = {"authorization": f"Bearer {key}"}
            return server.client.post("/v1/files", **form, headers=headers)

        for _ in range(4):
            slow.enter_context(sending(server, "alice", FORM[:20], 1000))
        wait_until(lambda: answer("alice").status_code == 429)
        refused = answer("alice")
        assert int(refused.headers["retry-after"]) >= 1
        assert "expected at most 4 uploads of a key at once, got one more" in refused.text
        assert refused.json()["error"]["code"] == "overloaded"
        assert answer("bob").status_code == 200
        monkeypatch.setattr(file_route, "_UPLOADS", 4)
        refused = answer("bob")
        assert refused.status_code == 429
        assert "the server takes 4 uploads at once, its maximum" in refused.text
        slow.close()
        wait_until(lambda: answer("alice").status_code == 200)


@pytest.mark.parametrize(
    ("limit", "seconds"), [(10.0, 0.1), pytest.param(0.4, 0.6, marks=pytest.mark.timing)]
)
def test_a_slow_disk_has_its_time(tmp_path, monkeypatch, limit, seconds):
    add, begun = OwnerFolder.add_file, []

    def slow(*arguments):
        begun.append(1)
        time.sleep(seconds)
        add(*arguments)

    monkeypatch.setattr(OwnerFolder, "add_file", slow)
    with batch_server(tmp_path, server={"extension_seconds": limit}) as server:
        client = client_of(server)
        upload(client, [line(0)])
        with sending(server, "alice", FORM, len(FORM)):
            wait_until(lambda: len(begun) > 1)
        wait_until(lambda: len(client.files.list().data) > 1)  # although its client is gone
        assert client.files.content(client.files.list().data[0].id).text == "{}"
        assert "faults" not in server.client.get("/health").json()


def test_a_batch_expires(tmp_path):
    with batch_server(tmp_path, window_seconds=1.0, concurrency=1) as server:
        client = client_of(server)
        batch = ended(client, begin(client, map(endless, range(60))))
        assert batch.status == "expired"
        assert batch.expired_at >= batch.expires_at
        errors = lines_of(client, batch.error_file_id)
        assert {item["error"]["code"] for item in errors} == {"batch_expired"}
        assert batch.request_counts.failed == len(errors) > 0


def test_a_line_that_is_larger_than_the_queue_fails(tmp_path, monkeypatch):
    """It is refused alone as well, so that no wait helps; the others are answered."""
    monkeypatch.setattr(runner, "_FIRST_WAIT", 0.02)
    with batch_server(tmp_path, scheduler={"max_waiting": 4, "max_num_seqs": 4}) as server:
        client = client_of(server)
        batch = ended(client, begin(client, [line(0, n=20, temperature=1), line(1), line(2)]))
        assert batch.status == "completed"
        (refused,) = lines_of(client, batch.error_file_id)
    assert refused["custom_id"] == "r0"
    assert refused["response"]["status_code"] == 429
    assert "4 requests are waiting" in refused["response"]["body"]["error"]["message"]
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)


def test_a_batch_goes_on_after_a_restart_and_answers_each_line_once(tmp_path):
    model = write_model(tmp_path)
    held = HeldSteps(tmp_path)  # so that it is not at its end when the first line is
    loop = {"prompt": "loop", "max_tokens": 200, "ignore_eos": True}
    lines = [line(n, **loop, plugin_args=held.slow(0.1)) for n in range(1, 40)]
    lines.insert(0, line(0, **{**loop, "max_tokens": 5}))
    with batch_server(tmp_path, model, concurrency=1) as server:
        client = client_of(server)
        began = begin(client, lines)
        wait_until(lambda: client.batches.retrieve(began.id).request_counts.completed > 0)
    (cut,) = (tmp_path / "batches").glob("*/batches/*.out")
    before = [json.loads(text)["id"] for text in cut.read_text().splitlines()]
    assert 0 < len(before) < 40
    with cut.open("a") as file:
        file.write('{"id": "half a li{"id": "a"}\n')  # as of a disk that was full
        file.write('{"id": "half a li')  # as of a machine that stopped
    held.let_go()
    with batch_server(tmp_path, model) as server:
        client = client_of(server)
        batch = ended(client, began)
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)
        answers = lines_of(client, batch.output_file_id)
        assert [item["id"] for item in answers[: len(before)]] == before
        assert sorted(item["custom_id"] for item in answers) == sorted(f"r{n}" for n in range(40))
    assert not [*(tmp_path / "batches").glob("*/batches/*.out")]


def test_no_line_is_read_in_the_event_loop(tmp_path, monkeypatch):
    """A long line, or many that have answers already, would hold up all requests."""
    read, in_loop = BatchReader.read, []

    def watched(reader, number, text):
        with contextlib.suppress(RuntimeError):  # there is no loop in this thread
            asyncio.get_running_loop()
            in_loop.append(number)
        return read(reader, number, text)

    monkeypatch.setattr(BatchReader, "read", watched)
    with batch_server(tmp_path) as server:
        client = client_of(server)
        batch = ended(client, begin(client, [line(n) for n in range(20)]))
    assert (batch.status, batch.request_counts.completed) == ("completed", 20)
    assert not in_loop


@pytest.mark.nightly
def test_several_workers_and_a_kill(tmp_path):
    model = write_model(tmp_path / "model")
    settings = ["server.workers = 2", 'plugin.batch_routes.folder = "kept"']
    enabled = enabling('"support.plugins.slow:Slow"')
    loop = {"prompt": "loop", "ignore_eos": True}
    held = HeldSteps(tmp_path)
    lines = [line(n, **loop, max_tokens=5) for n in range(5)]
    slow = held.slow(0.1)
    lines += [line(n, **loop, max_tokens=200, plugin_args=slow) for n in range(5, 100)]
    with serving(tmp_path, model, *settings, **enabled) as program:
        client = client_of(program)
        began = begin(client, lines)
        wait_until(lambda: client.batches.retrieve(began.id).request_counts.completed > 3)
        killed = program.processes()
        for process in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not any(alive(process.pid) for process in killed))
    held.let_go()
    with serving(tmp_path, model, *settings, **enabled) as program:
        client = client_of(program)
        batch = ended(client, began)
        assert (batch.status, batch.request_counts.completed) == ("completed", 100)
        answers = lines_of(client, batch.output_file_id)
        assert sorted(item["custom_id"] for item in answers) == sorted(f"r{n}" for n in range(100))


def test_a_record_is_written_once_at_a_time(tmp_path, monkeypatch):
    """On a slow disk, too, also where the batch is cancelled during a write."""
    write, going, counted = BatchPlace.write, [], []

    def slow(place, record):
        going.append(place)
        counted.append((record.batch.status, len(going)))
        time.sleep(0.1)
        going.remove(place)
        write(place, record)

    monkeypatch.setattr(BatchPlace, "write", slow)
    monkeypatch.setattr(runner, "_KEPT_SECONDS", 0.0)
    monkeypatch.setattr(runner, "_CHECK_SECONDS", 0.01)
    with batch_server(tmp_path) as server:
        client = client_of(server)
        began = begin(client, [*map(line, range(6)), *map(endless, range(10, 40))])
        counts = ("in_progress", 1)
        wait_until(lambda: counted.count(counts) > 1, what="a write of the counts")
        client.batches.cancel(began.id)
        assert ended(client, began).status == "cancelled"
    states = [status for status, _ in counted]
    last = states.index("finalizing")
    assert states[last:] == ["finalizing", "cancelled"]
    assert {number for _, number in counted} == {1}


def failing_once(monkeypatch, owner, name):
    """Let the first call of a function raise, as of a process without a free descriptor."""
    function, errors = getattr(owner, name), [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def call(*arguments):
        if errors:
            raise errors.pop()
        return function(*arguments)

    monkeypatch.setattr(owner, name, call)
    return errors


def test_an_error_that_passes_ends_no_batch(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(runner, "_RETRY_SECONDS", 0.05)
    failing_once(monkeypatch, BatchFolder, "locked")
    failing_once(monkeypatch, BatchFolder, "forget_old")  # which is not logged once more
    with batch_server(tmp_path) as server:
        client = client_of(server)
        began = begin(client, [line(0, prompt="loop", max_tokens=900, ignore_eos=True), line(1)])
        wait_until(lambda: [*(tmp_path / "batches").glob("*/batches/*.out")])
        left = failing_once(monkeypatch, BatchFolder, "open_batches")
        wait_until(lambda: not left)
        failing_once(monkeypatch, runner, "ids_of")  # of a second batch
        other = begin(client, [line(n) for n in range(3)])
        for batch, total in (began, 2), (other, 3):
            end = ended(client, batch)
            assert (end.status, end.request_counts.completed) == ("completed", total)
        assert "faults" not in server.client.get("/health").json()
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    failed = "batches: the folder cannot be used now, and is tried again"
    assert logged == [failed] * 2 + [f"batch {other.id} stops, and goes on in 0.05 s"]


class FullDisk:
    """A file on a disk that is full for a moment, amid the third line, as the kernel does it."""

    def __init__(self, file):
        self._file, self._lines = file, 0

    def write(self, data):
        if self._lines == 3:  # the rest of it
            self._lines += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._lines += 1
        return self._file.write(data[: len(data) // 2] if self._lines == 3 else data)

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_disk_that_is_full_for_a_moment_joins_no_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(runner, "_RETRY_SECONDS", 0.05)
    appending = runner.appending

    @contextlib.contextmanager
    def on_full_disk(path):
        with appending(path) as file:
            yield FullDisk(file) if path.suffix == ".out" else file

    monkeypatch.setattr(runner, "appending", on_full_disk)
    with batch_server(tmp_path) as server:
        client = client_of(server)
        batch = ended(client, begin(client, [line(n) for n in range(12)]))
        assert (batch.status, batch.request_counts.completed) == ("completed", 12)
        answers = lines_of(client, batch.output_file_id)
    assert sorted(item["custom_id"] for item in answers) == sorted(f"r{n}" for n in range(12))


def test_a_record_that_cannot_be_read_is_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.05)
    with batch_server(tmp_path) as server:
        client = client_of(server)
        first = ended(client, begin(client, [line(0)]))
        (record_file,) = (tmp_path / "batches").glob("*/batches/*.json")
        damaged = [record_file.with_name(f"batch_{'0' * 32}.json")]
        damaged.append(record_file.parents[1] / "files" / f"file-{'0' * 32}.json")
        for path in damaged:
            path.write_text('{"half a rec')
        damaged[0].with_suffix(".in").touch()
        second = ended(client, begin(client, [line(0)]))
        assert second.status == "completed"
        assert [batch.id for batch in client.batches.list()] == [second.id, first.id]
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert sorted(text.partition(" ")[0] for text in logged) == sorted(map(str, damaged))
    assert all("cannot be read, and is left out: DecodeError: " in text for text in logged)


def test_there_are_no_routes_without_a_folder():
    with running(FakeEngine(config=configured())) as server:
        assert server.client.get("/v1/files").status_code == 404
        assert server.post("/v1/batches", {}).status_code == 404


def test_a_folder_that_others_can_read_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="expected a folder of this user with mode 0700, got"):
        BatchFolder(str(tmp_path / "open"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"plugin\.batch_routes\.folder: .*: File exists"):
        BatchFolder(str(tmp_path / "file"))


def test_what_is_kept_is_private(folder, client):
    ended(client, begin(client, [line(0)]))
    paths = [*(folder / "batches").rglob("*")]
    assert len(paths) > 5
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


def test_files_expire(tmp_path):
    with batch_server(tmp_path, seconds=1.0) as server:
        client = client_of(server)
        made = client.files.create(file=("in.jsonl", io.BytesIO(b"{}")), purpose="batch")
        wait_until(lambda: not client.files.list().data)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(made.id)
        assert not [*(tmp_path / "batches").glob("*/files/*.jsonl")]


def new_file(seconds=3600):
    """Return a file that is created now."""
    created = int(time.time())
    return FileObject(
        id=f"file-{'1' * 32}",
        bytes=2,
        created_at=created,
        expires_at=created + seconds,
        filename="in.jsonl",
        purpose="batch",
    )


def batch_record(input_file_id="", **fields):
    """Return the record of a batch that was created two hours ago."""
    created = int(time.time()) - 7200
    batch = BatchObject(
        id=f"batch_{'1' * 32}",
        endpoint=COMPLETIONS,
        input_file_id=input_file_id,
        completion_window="24h",
        created_at=created,
        expires_at=created + 86400,
        **{"status": "validating", **fields},
    )
    return BatchRecord(batch=batch, order=1, client=Client(name="alice"), output_seconds=3600)


@pytest.fixture
def owner(tmp_path):
    """Return the part of a client with one file."""
    owner = BatchFolder(str(tmp_path)).owner("alice")
    with owner.reserving():
        owner.reserve_file(new_file())
    owner.add_file(new_file(), 1, io.BytesIO(b"{}"))
    return owner


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "cancelled", "in_progress"])
@pytest.mark.parametrize(("age", "is_kept"), [(3500, True), (3700, False)])
def test_a_batch_is_forgotten_by_the_time_of_its_end(tmp_path, owner, status, age, is_kept):
    ended = {} if status == "in_progress" else {f"{status}_at": int(time.time()) - age}
    record = batch_record(new_file().id, status=status, **ended)
    owner.add_batch(record)
    BatchFolder(str(tmp_path)).forget_old(3600)
    found = owner.find_batch(record.batch.id)
    assert (found is not None) == (is_kept or not ended)


def parts(owner_path):
    return sorted(path.name for path in owner_path.glob("*/*") if path.suffix != ".jsonl")


def test_a_record_without_room_leaves_no_parts(tmp_path, owner, monkeypatch):
    (owner_path,) = (path for path in tmp_path.iterdir() if path.is_dir())
    before, used = parts(owner_path), owner.used_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        owner.add_batch(batch_record(new_file().id))
    assert (parts(owner_path), owner.used_bytes()) == (before, used)


def test_parts_of_killed_processes_are_removed(tmp_path, owner):
    """Parts of records and of an upload that goes on are not."""
    owner.add_batch(batch_record(new_file().id))
    (owner_path,) = (path for path in tmp_path.iterdir() if path.is_dir())
    batches, files, two = owner_path / "batches", owner_path / "files", "2" * 32
    kept = [files / f"file-{'3' * 32}.part", files / f"file-{'3' * 32}.new", files / "other"]
    unfinished = [files / f"file-{two}.part", files / f"file-{two}.new", batches / "batch_2.new"]
    parts = [batches / f"batch_{two}.{suffix}" for suffix in ("in", "out", "err", "room", "cancel")]
    left = [files / f"file-{two}.jsonl", *parts, *unfinished]
    expected = {*owner_path.rglob("*"), *kept}
    for path in (*kept, *left):
        path.write_bytes(b"x" * 100)
    for path, age in (*((path, 3700) for path in unfinished), (kept[0], 3500)):
        os.utime(path, (time.time() - age,) * 2)
    BatchFolder(str(tmp_path)).forget_old(3600)
    assert {*owner_path.rglob("*")} == expected


def test_new_records_are_written_while_bytes_are_reserved(tmp_path, monkeypatch):
    """Until then, their parts look like leftovers."""
    reserved = []

    def checked(name):
        call = getattr(OwnerFolder, name)

        def checked_call(owner, *arguments):
            with (owner.content("x").parents[1] / "lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    reserved.append(name)
            return call(owner, *arguments)

        monkeypatch.setattr(OwnerFolder, name, checked_call)

    checked("add_batch")
    checked("take_file")
    with batch_server(tmp_path) as server:
        client = client_of(server)
        ended(client, begin(client, [line(0)]))
    assert reserved == ["take_file", "add_batch", "take_file"]
