"""Every limit of `server.limits`, from the outside: at the limit, and one over it."""

import contextlib
import functools
import threading
import time

import httpx
import msgspec
import pytest
from support.fake_engine import FakeEngine, HeldEngine, configured
from support.http_server import running
from support.waiting import PATIENCE_S, wait_until

from hardpoint.builtin_plugins.server.access.keys import KeyStore, installed
from hardpoint.builtin_plugins.server.config import ServerLimits
from hardpoint.builtin_plugins.server.requests import bodies, reading

LIMITS = {
    "body_bytes": 20_000,
    "buffered_bytes": 30_000,
    "items": 30_000,
    "depth": 20,
    "requests": 3,
    "prompts": 3,
    "prompt_characters": 200,
    "n": 3,
    "max_tokens": 7,
    "logprobs": 2,
    "stop": 3,
    "bad_words": 3,
    "logit_bias": 3,
    "messages": 3,
    "tools": 3,
    "schema_bytes": 300,
    "timeout_seconds": 5.0,
}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
RENDER, TOKENIZE = f"{CHAT}/render", "/tokenize"
LOGPROBS = "message.output_text.logprobs"
MESSAGE = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(config=configured(limits=LIMITS))) as running_server:
        yield running_server


def tool(name, **schema):
    parameters = {"type": "object", **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def words(count):
    return ["w"] * count


def send(server, path, fields):
    base = {TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"}}.get(path, {"messages": [MESSAGE]})
    return server.post(path, {**base, **fields})


MORE = "expected at most {limit} on this server, got {over}"
CASES = [
    ("n", CHAT, lambda k: {"n": k}, "n", MORE),
    ("n", TEXT, lambda k: {"n": k}, "n", MORE),
    ("max_tokens", CHAT, lambda k: {"max_tokens": k}, "max_tokens", MORE),
    ("max_tokens", CHAT, lambda k: {"max_completion_tokens": k}, "max_completion_tokens", MORE),
    ("max_tokens", TEXT, lambda k: {"max_tokens": k}, "max_tokens", MORE),
    ("logprobs", TEXT, lambda k: {"logprobs": k}, "logprobs", MORE),
    ("logprobs", CHAT, lambda k: {"logprobs": True, "top_logprobs": k}, "top_logprobs", MORE),
    ("logprobs", CHAT, lambda k: {"prompt_logprobs": k}, "prompt_logprobs", MORE),
    ("logprobs", TEXT, lambda k: {"prompt_logprobs": k}, "prompt_logprobs", MORE),
    ("stop", CHAT, lambda k: {"stop": words(k)}, "stop", MORE),
    ("stop", CHAT, lambda k: {"stop_token_ids": [1] * k}, "stop_token_ids", MORE),
    ("bad_words", CHAT, lambda k: {"bad_words": words(k)}, "bad_words", MORE),
    (
        "logit_bias",
        CHAT,
        lambda k: {"logit_bias": {str(i): 1 for i in range(k)}},
        "logit_bias",
        MORE,
    ),
    (
        "logit_bias",
        CHAT,
        lambda k: {"allowed_token_ids": [*range(k)]},
        "allowed_token_ids",
        MORE,
    ),
    ("n", RENDER, lambda k: {"n": k}, "n", MORE),
    ("max_tokens", RENDER, lambda k: {"max_tokens": k}, "max_tokens", MORE),
    (
        "logprobs",
        RESPONSES,
        lambda k: {"include": [LOGPROBS], "top_logprobs": k},
        "top_logprobs",
        MORE,
    ),
    *(
        ("messages", path, lambda k: {"messages": [MESSAGE] * k}, "messages", MORE)
        for path in (CHAT, RENDER, TOKENIZE)
    ),
    *(
        ("tools", path, lambda k: {"tools": [tool(f"f{i}") for i in range(k)]}, "tools", MORE)
        for path in (CHAT, RENDER, TOKENIZE)
    ),
    (
        "prompts",
        TEXT,
        lambda k: {"prompt": words(k)},
        "prompt",
        "expected at most {limit} prompts, got {over}",
    ),
    (
        "prompt_characters",
        TEXT,
        lambda k: {"prompt": "x" * k},
        "prompt",
        "expected at most {limit} characters on this server, got {over}",
    ),
    (
        "prompt_characters",
        TEXT,
        lambda k: {"prompt": ["x" * (k - 20), "x" * 20]},
        "prompt",
        "expected at most {limit} characters on this server, got {over}",
    ),
]


@pytest.mark.parametrize(("name", "path", "fields", "param", "texts_of_it"), CASES)
def test_at_a_limit_and_one_over_it(server, name, path, fields, param, texts_of_it):
    limit = LIMITS[name]
    assert send(server, path, fields(limit)).status_code == 200
    response = send(server, path, fields(limit + 1))
    message = texts_of_it.format(limit=limit, over=limit + 1)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == f"{param}: {message}"
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_the_characters_of_a_conversation_count_together(server):
    def size(content):
        plain = {"role": "user", "content": content}
        return sum(map(len, [*plain, *plain.values()]))

    content = "x" * (LIMITS["prompt_characters"] - size(""))
    assert send(server, CHAT, {"messages": [{**MESSAGE, "content": content}]}).status_code == 200
    response = send(server, CHAT, {"messages": [{**MESSAGE, "content": content + "x"}]})
    assert response.json()["error"]["message"] == (
        "messages: expected at most 200 characters on this server, got 201"
    )


def padded(make, part=lambda value: value):
    """Return the value of exactly `schema_bytes` of JSON, and of one more, by a longer text.

    Args:
        part: the part of a value that is counted.
    """
    short = len(msgspec.json.encode(part(make(""))))
    room = LIMITS["schema_bytes"] - short
    return make("x" * room), make("x" * (room + 1))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (
            "response_format",
            lambda x: {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"title": x}, "strict": False},
            },
        ),
        ("structured_outputs", lambda x: {"json": {"title": x}}),
        ("guided_json", lambda x: {"title": x}),
        ("guided_regex", lambda x: f"a{x}"),
        ("guided_choice", lambda x: ["a", f"b{x}"]),
        ("guided_grammar", lambda x: f'start: "{x}"'),
    ],
)
def test_the_size_of_schemas_and_grammars(server, name, make):
    for path in (CHAT, TEXT):
        is_format = name == "response_format"
        part = (lambda value: value["json_schema"]["schema"]) if is_format else (lambda v: v)
        fits, over = padded(make, part)
        assert "bytes of JSON" not in send(server, path, {name: fits}).text
        response = send(server, path, {name: over})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(
            f"{name}: expected at most 300 bytes of JSON on this server, got "
        )


def test_the_schemas_of_all_tools_count_together(server):
    def tools(x):
        return [tool("a", title="y" * 20), tool("b", title=x)]

    limits = {**LIMITS, "prompt_characters": 10_000}
    with running(FakeEngine(config=configured(limits=limits))) as other:
        fits, over = padded(tools)
        assert send(other, CHAT, {"tools": fits}).status_code == 200
        response = send(other, CHAT, {"tools": over})
    assert response.json()["error"]["message"] == (
        "tools: expected at most 300 bytes of JSON on this server, got 301"
    )


def test_a_timeout_is_bounded_and_given_to_all(server):
    assert send(server, CHAT, {"timeout": 5.0}).status_code == 200
    assert server.engine.asked[-1][2]["timeout"] == 5.0
    assert send(server, CHAT, {}).status_code == 200
    assert server.engine.asked[-1][2]["timeout"] == 5.0
    response = send(server, CHAT, {"timeout": 5.01})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "timeout: expected at most 5 s on this server, got 5.01"
    )


def test_max_tokens_is_given_to_requests_without(server):
    assert send(server, CHAT, {}).status_code == 200
    assert server.engine.asked[-1][1].max_tokens == 7
    assert send(server, RENDER, {}).json()["sampling_params"]["max_tokens"] == 7


def body_of(size):
    """Return a body of that many bytes."""
    start = b'{"messages": [{"role": "user", "content": "Hi"}]'
    return start + b" " * (size - len(start) - 1) + b"}"


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("chunked", [False, True])
def test_the_size_of_bodies(server, chunked):
    def content(size):
        body = body_of(size)
        return iter([body[:5000], body[5000:]]) if chunked else body

    limit = LIMITS["body_bytes"]
    assert server.client.post(CHAT, content=content(limit), headers=JSON).status_code == 200
    response = server.client.post(CHAT, content=content(limit + 1), headers=JSON)
    assert response.status_code == 413
    message = "body: expected at most 20000 bytes (server.limits.body_bytes)"
    assert response.json()["error"]["message"] == message


def test_the_items_of_bodies(server):
    """Bodies over the limit are refused before there are objects of them."""
    start = '{"prompt": "x", "tags": "' + "[" * 3748  # with the first one, 29992 items
    fits = server.client.post(TEXT, content=start + "," * 6 + '",}', headers=JSON)
    assert fits.status_code == 400
    response = server.client.post(TEXT, content=start + "," * 7 + '",}', headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["message"] == (
        "body: expected at most 30000 items (server.limits.items), which are its commas and 8 for "
        "each opening bracket; it has 9 commas and 3749 brackets"
    )


def test_the_bytes_of_all_bodies_together():
    """Large bodies that stop keep out only other large ones, until they end."""
    size = 100_000
    limits = {"body_bytes": size, "buffered_bytes": 2 * size}
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with running(FakeEngine(config=configured(limits=limits))) as server:
        receiver = server.service.requests.receiver
        stopped = [server.socket() for _ in range(2)]
        for connection in stopped:
            start = (head + f"content-length: {size}\r\n\r\n").encode()
            connection.sendall(start + b" " * (size - 1))
        wait_until(lambda: receiver.held == 2 * size - 2)
        response = server.client.post(CHAT, content=body_of(size), headers=JSON)
        assert response.status_code == 503
        assert "(server.limits.buffered_bytes); try again" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1
        assert server.client.post(CHAT, content=body_of(60_000), headers=JSON).status_code == 200
        for connection in stopped:
            connection.close()
        wait_until(lambda: receiver.held == 0)
        assert server.client.post(CHAT, content=body_of(size), headers=JSON).status_code == 200
        assert receiver.held == 0


@pytest.mark.timing
@pytest.mark.parametrize(
    ("path", "start", "part", "end"),
    [
        ("/v1/responses", '{"input":[', "{}", "]}"),
        (CHAT, '{"messages":[', "{}", "]}"),
        ("/detokenize", '{"tokens":[', "5", ',"x"]}'),
    ],
)
@pytest.mark.parametrize("size", [500_000, 8_000_000])
def test_a_large_wrong_body_does_not_stop_the_others(path, start, part, end, size):
    """Bodies of 8 MB stopped them for 2 to 12 seconds."""
    body = start + ",".join([part] * (size // (len(part) + 1))) + end
    longest = 0.0
    with running(FakeEngine(config=configured())) as server:
        sending = Sending(server, path, body)
        while sending.is_alive():
            begun = time.monotonic()
            server.client.get("/health")
            longest = max(longest, time.monotonic() - begun)
    assert sending.response.status_code in (400, 413)
    assert longest < 1.0


class Sending(threading.Thread):
    """Sends a body at the same time."""

    def __init__(self, server, path, body):
        super().__init__()
        self.server, self.path, self.body = server, path, body
        self.start()

    def run(self):
        with httpx.Client(base_url=self.server.url, timeout=PATIENCE_S) as client:
            self.response = client.post(self.path, content=self.body, headers=JSON)


def test_large_bodies_are_checked_outside_the_event_loop(monkeypatch):
    threads = []

    def noting(*args):
        threads.append(threading.current_thread())
        return bodies.decode_object(*args)

    monkeypatch.setattr(reading, "decode_object", noting)
    limits = {"body_bytes": 200_000}
    with running(FakeEngine(config=configured(limits=limits))) as other:
        for size in (1000, 100_000):
            response = other.client.post(CHAT, content=body_of(size), headers=JSON)
            assert response.status_code == 200
        assert threads[0] is other.thread
        assert threads[1] is not other.thread


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (TEXT, {"prompt": [[1]] * 4}, "prompt: expected at most 3 prompts, got 4"),
        (CHAT, {"messages": [{}] * 4}, "messages: expected at most 3 on this server, got 4"),
        (CHAT, {"tools": [{}] * 4}, "tools: expected at most 3 on this server, got 4"),
        (
            "/v1/responses",
            {"input": [{}] * 4, "prompt": None, "messages": None},
            "input: expected at most 3 on this server, got 4",
        ),
        (TEXT, {"stop": [1] * 4}, "stop: expected at most 3 on this server, got 4"),
    ],
)
def test_lists_are_counted_before_what_is_in_them_is_checked(server, path, fields, message):
    assert send(server, path, fields).json()["error"]["message"] == message


@pytest.mark.parametrize("inputs", [[65] * 4, ["a"] * 4, [[65] * 4] * 4])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/classify", "/pooling"])
def test_pooled_inputs_are_no_messages(server, path, inputs):
    answer = server.post(path, {"input": inputs})
    assert answer.status_code == 200, answer.text


def test_a_declared_length_is_refused_before_the_body_comes(server):
    with server.socket() as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall((head + "content-length: 99999999999999999999\r\n\r\n{").encode())
        answer = connection.makefile("rb").readline()
    assert answer.split()[1] in (b"413", b"400")


def nested(depth, pattern):
    """Return a body of that many arrays and objects in one another."""
    opened = ('{"a":' if pattern == "{" else "[") * (depth - 1)
    closed = ("}" if pattern == "{" else "]") * (depth - 1)
    inner = f"{opened}1{closed}"
    return f'{{"messages": [{{"role": "user", "content": "Hi"}}], "plugin_args": {inner}}}'


@pytest.mark.parametrize(
    ("path", "field", "count"),
    [(TEXT, "bad_words", 1024), (CHAT, "stop", 4), (TEXT, "stop", None), (CHAT, "bad_words", 2)],
)
def test_the_characters_of_words(path, field, count):
    """The tokens of long ones, a copy for each completion, stopped the engine for a minute."""
    with running(FakeEngine(config=configured())) as server:
        for more in (0, 1):
            parts = ["x" * (65_536 // (count or 1))] * (count or 1)
            value = [*parts[1:], parts[0] + "x" * more] if count else parts[0] + "x" * more
            response = send(server, path, {field: value})
            assert response.status_code == (400 if more else 200)
        assert response.json()["error"]["message"] == (
            f"{field}: expected at most 65536 characters in all texts together, got 65537"
        )


@pytest.mark.parametrize("pattern", ["{", "["])
def test_the_depth_of_bodies(server, pattern):
    limit = LIMITS["depth"]
    fits = server.client.post(CHAT, content=nested(limit, pattern), headers=JSON)
    assert "in one another" not in fits.text
    for depth in (limit + 1, 500, 3000):
        response = server.client.post(CHAT, content=nested(depth, pattern), headers=JSON)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == (
            "body: expected at most 20 arrays and objects in one another (server.limits.depth)"
        )


def test_many_brackets_are_not_deep(server):
    bias = {"messages": [MESSAGE], "tags": {f"k{i}": "[{" * 20 for i in range(20)}}
    assert server.post(CHAT, bias).status_code == 200


def test_requests_at_once():
    """One more is 429, and is answered when there is room again."""
    engine = HeldEngine(config=configured(limits={"requests": 3}))
    with running(engine) as server:
        streams = [threading.Thread(target=send, args=(server, CHAT, {})) for _ in range(3)]
        for stream in streams:
            stream.start()
        wait_until(lambda: server.service.load.open == 3)
        response = send(server, CHAT, {})
        engine.go_on.set()
        for stream in streams:
            stream.join()
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        error = response.json()["error"]
        assert error["code"] == "overloaded"
        assert error["message"].startswith("the server answers 3 requests, its maximum (server.")
        assert send(server, CHAT, {}).status_code == 200


@contextlib.contextmanager
def server_with_keys(tmp_path, engine_type, limits):
    """Serve with two keys; yield the engine, the server, and headers by name of the key."""
    secrets = {name: name * 20 for name in ("evil", "good")}
    keys = tmp_path / "keys.toml"
    tables = [f'[[key]]\nname = "{name}"\nkey = "{key}"\n' for name, key in secrets.items()]
    keys.write_text("".join(tables))
    keys.chmod(0o600)
    engine = engine_type(config=configured(limits=limits))
    headers = {name: {**JSON, "x-api-key": key} for name, key in secrets.items()}
    with running(engine, authenticators=[installed(KeyStore(str(keys)))]) as server:
        yield engine, server, headers


@pytest.mark.parametrize(("limit", "most"), [(None, 3), (2, 2)])
def test_requests_of_one_key_at_once(tmp_path, limit, most):
    """By default, one key leaves a quarter of all requests to others."""
    limits = {"requests": 4, "requests_per_key": limit}
    body = msgspec.json.encode({"messages": [MESSAGE]})
    with server_with_keys(tmp_path, HeldEngine, limits) as (engine, server, headers):

        def ask(name):
            return server.client.post(CHAT, content=body, headers=headers[name])

        evil = [threading.Thread(target=ask, args=("evil",)) for _ in range(most)]
        for thread in evil:
            thread.start()
        wait_until(lambda: server.service.load.open == most)
        refused = ask("evil")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["message"] == (
            f"the server answers {most} requests of this key, its maximum "
            "(server.limits.requests_per_key); try again later"
        )
        good = threading.Thread(target=ask, args=("good",))
        good.start()
        wait_until(lambda: server.service.load.open == most + 1)
        engine.go_on.set()
        for thread in (*evil, good):
            thread.join()
        assert ask("evil").status_code == 200


def test_bytes_of_bodies_of_one_key(tmp_path):
    """One key may have half of them, so that another one's large bodies have room."""
    size = 100_000
    limits = {"body_bytes": size, "buffered_bytes": 4 * size}
    with server_with_keys(tmp_path, FakeEngine, limits) as (_, server, headers):
        receiver = server.service.requests.receiver
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers["evil"].items())
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{lines}content-length: {size}\r\n\r\n"
        stopped = [server.socket() for _ in range(2)]
        for connection in stopped:
            connection.sendall(head.encode() + b" " * (size - 1))
        wait_until(lambda: receiver.held == 2 * size - 2)
        statuses = {
            name: server.client.post(CHAT, content=body_of(size), headers=headers[name]).status_code
            for name in headers
        }
        assert statuses == {"evil": 503, "good": 200}
        for connection in stopped:
            connection.close()
        wait_until(lambda: receiver.held == 0)
        response = server.client.post(CHAT, content=body_of(size), headers=headers["evil"])
        assert response.status_code == 200


def test_a_large_body_waits_for_one_of_each_other_key(tmp_path, monkeypatch):
    order, go_on, decode = [], threading.Event(), reading.decode_object

    def held(body, *args):
        order.append("good" if b"good" in body else "evil")
        assert go_on.wait(PATIENCE_S)
        return decode(body, *args)

    monkeypatch.setattr(reading, "decode_object", held)
    with server_with_keys(tmp_path, FakeEngine, {}) as (_, server, headers):
        held_bytes, threads = 0, []
        for name in ("evil", "evil", "evil", "good"):
            tags = {"tags": {"a": name * 20_000}}
            body = msgspec.json.encode({"messages": [MESSAGE], **tags})
            held_bytes += len(body)
            ask = functools.partial(server.client.post, CHAT, content=body, headers=headers[name])
            threads.append(threading.Thread(target=ask))
            threads[-1].start()
            wait_until(lambda: server.service.requests.receiver.held == held_bytes)  # noqa: B023
        go_on.set()
        for thread in threads:
            thread.join()
    assert order == ["evil", "good", "evil", "evil"]


def test_every_limit_is_tested_here():
    """Header bytes and connections are the HTTP protocol's, conversations have their own route."""
    elsewhere = {"header_bytes", "connections", "conversations", "requests_per_key"}
    assert {*LIMITS, *elsewhere} == {*ServerLimits.__struct_fields__}


def test_negative_numbers_are_no_way_around(server):
    """llama.cpp's CVE-2026-21869, and all of the vocabulary by -1."""
    for name in ("n", "max_tokens", "max_completion_tokens", "top_logprobs", "prompt_logprobs"):
        for value in (-1, -(2**31), -(2**63)):
            response = send(server, CHAT, {name: value, "logprobs": name == "top_logprobs"})
            assert response.status_code == 400, (name, value)
            assert response.json()["error"]["param"] == name
    for name in ("logprobs", "prompt_logprobs", "n", "max_tokens"):
        response = send(server, TEXT, {name: -1})
        assert response.status_code == 400, name
        assert response.json()["error"]["param"] == name
