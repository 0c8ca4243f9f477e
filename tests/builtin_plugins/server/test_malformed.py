"""Malformed requests to a real server: no 500, nothing hangs, and another's stream goes on."""

import json
import threading
import time

import httpx
import pytest
from support.waiting import PATIENCE_S, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
LONG = 10 << 20


def chat(**fields):
    return CHAT, json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})


def text(**fields):
    return TEXT, json.dumps({"prompt": "hi", "max_tokens": 2, **fields})


def conversation(*contents, **message):
    messages = [{"role": "user", "content": content, **message} for content in contents]
    return CHAT, json.dumps({"messages": messages, "max_tokens": 2})


def raw(body, path=CHAT):
    return path, body


def with_raw(field, value, path=TEXT):
    """A number that no JSON library writes."""
    return path, f'{{"prompt": "hi", "messages": [], "{field}": {value}}}'.replace(
        '"messages": [], ' if path == TEXT else '"prompt": "hi", ', ""
    )


def tool(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(arguments):
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def deep(levels, key="a"):
    value = {}
    for _ in range(levels):
        value = {key: value}
    return value


REFUSED = {
    "empty body": (raw(""), 400, "body: expected JSON"),
    "not JSON": (raw("{"), 400, "body: expected JSON"),
    "Python": (raw("{'messages': None}"), 400, "body: expected JSON"),
    "two values": (raw("{}{}"), 400, "body: expected JSON"),
    "array": (raw("[]"), 400, "body: expected a JSON object, got an array"),
    "string": (raw('"x"'), 400, "body: expected a JSON object, got a string"),
    "number": (raw("5"), 400, "body: expected a JSON object, got a number"),
    "null": (raw("null"), 400, "body: expected a JSON object, got null"),
    "true": (raw("true"), 400, "body: expected a JSON object, got a boolean"),
    "no fields": (raw("{}"), 400, "messages: missing"),
    "BOM": (raw(b"\xef\xbb\xbf{}"), 400, "body: expected JSON"),
    "UTF-16": (raw('{"messages": []}'.encode("utf-16")), 400, "body: expected JSON"),
    "invalid UTF-8": (raw(b'{"messages": "\xff\xfe"}'), 400, "body: expected JSON"),
    "invalid UTF-8 in a key": (raw(b'{"\xc3\x28": 1}'), 400, "body: expected JSON"),
    "lone surrogate": (raw('{"prompt": "a\\ud800b"}', TEXT), 400, "body: expected JSON"),
    "lone surrogate in a message": (
        raw('{"messages": [{"role": "user", "content": "\\udfff"}]}'),
        400,
        "body: expected JSON",
    ),
    "NUL byte": (raw(b'{"prompt": "\0"}', TEXT), 400, "body: expected JSON"),
    "deep arrays": (raw("[" * 100_000), 400, "in one another (server.limits.depth)"),
    "deep objects": (raw('{"a":' * 100_000), 400, "in one another (server.limits.depth)"),
    "deep extra": (chat(plugin_args=deep(300)), 400, "in one another"),
    "deep schema": (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": deep(300)}}),
        400,
        "in one another",
    ),
    "deep tool": (chat(tools=[tool(deep(200))]), 400, "in one another"),
    "deep content": (conversation([deep(150)]), 400, "in one another"),
    "fairly deep content": (conversation([deep(100)]), 400, "messages[0].content[0]"),
    "NaN": (with_raw("temperature", "NaN"), 400, "body: expected JSON"),
    "Infinity": (with_raw("temperature", "Infinity"), 400, "body: expected JSON"),
    "-Infinity": (with_raw("min_p", "-Infinity"), 400, "body: expected JSON"),
    "1e999": (with_raw("temperature", "1e999"), 400, ""),
    "-1e999": (with_raw("frequency_penalty", "-1e999"), 400, ""),
    "huge whole number": (with_raw("seed", "9" * 30), 400, "seed"),
    "very huge whole number": (with_raw("max_tokens", "9" * 5000), 400, ""),
    "huge fraction": (with_raw("n", "1e300"), 400, "n: "),
    "text for a number": (text(max_tokens="5"), 400, "max_tokens: expected"),
    "text for a fraction": (text(temperature="0.5"), 400, "temperature: expected"),
    "boolean for a number": (text(max_tokens=True), 400, "max_tokens: expected"),
    "boolean for a fraction": (text(temperature=False), 400, "temperature: expected"),
    "number for a boolean": (chat(stream=1), 400, "stream: expected"),
    "fraction for a whole number": (text(n=1.5), 400, "n: expected"),
    "token ids that are fractions": (text(prompt=[1.5]), 400, "prompt"),
    "token ids that are booleans": (text(prompt=[True]), 400, "prompt"),
    "token ids that are negative": (text(prompt=[-1]), 400, "prompt[0]"),
    "token ids that are huge": (text(prompt=[2**62]), 400, "prompt[0]"),
    "stop token of no vocabulary": (text(stop_token_ids=[2**40]), 400, "stop_token_ids[0]"),
    "allowed token of no vocabulary": (text(allowed_token_ids=[2**40]), 400, "allowed_token_ids"),
    "bias of no token": (text(logit_bias={"999999999": 1}), 400, "logit_bias"),
    "bias of a word": (text(logit_bias={"word": 1}), 400, "logit_bias: expected token ids as keys"),
    "bias too large": (text(logit_bias={"5": 1e9}), 400, "logit_bias"),
    "empty prompt": (text(prompt=""), 400, "prompt: expected at least one token"),
    "no prompts": (text(prompt=[]), 400, "prompt: expected at least one prompt"),
    "mixed prompts": (text(prompt=["a", 5]), 400, "prompt[1]: expected a text"),
    "prompt in prompts": (text(prompt=[["a"]]), 400, "prompt[0]"),
    "object as prompt": (text(prompt={"a": 1}), 400, "prompt: expected"),
    "long prompt": (text(prompt="x" * (5 << 20)), 400, "prompt: expected at most"),
    "huge body": (text(prompt="x" * LONG), 413, "body: expected at most 8388608 bytes"),
    "too long for the model": (
        text(prompt="x" * 40_000),
        400,
        "prompt: the prompt is too long: 40000 tokens",
    ),
    "no messages": (conversation(), 400, "messages: expected"),
    "message of text": (chat(messages=["hi"]), 400, "messages[0]: expected"),
    "messages of text": (chat(messages="hi"), 400, "messages: expected"),
    "unknown role": (chat(messages=[{"role": "root", "content": "x"}]), 400, "messages[0].role"),
    "role of a list": (
        chat(messages=[{"role": ["user"], "content": "x"}]),
        400,
        "messages[0].role",
    ),
    "content of a number": (conversation(5), 400, "messages[0].content"),
    "part without type": (conversation([{"text": "x"}]), 400, "messages[0].content[0].type"),
    "part of text": (conversation(["x", 5]), 400, "messages[0].content"),
    "image by URL": (
        conversation([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]),
        400,
        "messages[0].content[0].type: expected \"text\", got 'image_url'",
    ),
    "file": (
        conversation([{"type": "file", "file": {"file_id": "file:///etc/passwd"}}]),
        400,
        "messages[0].content[0].type",
    ),
    "unknown model": (chat(model="gpt-4"), 404, "model: expected"),
    "model of a path": (chat(model="../../etc/passwd"), 404, "model: expected"),
    "model of a number": (chat(model=5), 400, "model: expected"),
    "unknown field": (chat(temprature=1), 400, "temprature: unknown field (did you mean"),
    "template of the request": (
        chat(chat_template="{{ 1 }}"),
        400,
        "chat_template: expected the name of a template of the model (default), got '{{ 1 }}'; "
        "templates themselves come from the operator alone",
    ),
    "template arguments that nobody allowed": (
        chat(chat_template_kwargs={"tokenize": True}),
        400,
        "chat_template_kwargs.tokenize: expected a variable that is allowed",
    ),
    "messages as a template argument": (
        chat(chat_template_kwargs={"messages": []}),
        400,
        "chat_template_kwargs.messages: expected a variable that is allowed",
    ),
    "the template as its argument": (
        chat(chat_template_kwargs={"chat_template": "x"}),
        400,
        "chat_template_kwargs.chat_template: expected a variable that is allowed",
    ),
    "template arguments of a list": (chat(chat_template_kwargs=[]), 400, "chat_template_kwargs"),
    "embeddings as a prompt": (text(prompt_embeds="gASVAA=="), 400, "prompt_embeds: expected none"),
    "unknown plugin": (chat(plugin_args={"nobody": {}}), 400, "plugin_args"),
    "wrong plugin argument": (chat(plugin_args={"min_p": {"x": 1}}), 400, "plugin_args"),
    "plugin arguments of text": (chat(plugin_args="x"), 400, "plugin_args: expected"),
    "processors from the request": (
        chat(logits_processors=["os:system"]),
        400,
        "logits_processors: not supported",
    ),
    "both formats": (
        chat(guided_regex="a", guided_choice=["b"]),
        400,
        "guided_regex and guided_choice: expected one of them",
    ),
    "no regex": (chat(guided_regex="("), 400, "guided_regex: at 1"),
    "no regex, streamed": (chat(guided_regex="(", stream=True), 400, "guided_regex: at 1"),
    "grammar of nothing": (chat(guided_grammar="start: start"), 400, "grammar"),
    "schema of a wrong type": (chat(guided_json={"type": "nothing"}), 400, "guided_json"),
    "schema from elsewhere": (
        chat(guided_json={"$ref": "http://169.254.169.254/"}),
        400,
        "",
    ),
    "schema from a file": (chat(guided_json={"$ref": "file:///etc/passwd"}), 400, ""),
    "schema of itself": (chat(guided_json={"$ref": "#"}), 400, ""),
    "unknown backend": (
        chat(structured_outputs={"regex": "a", "backend": "os"}),
        400,
        "backend",
    ),
    "no format": (chat(structured_outputs={}), 400, "structured_outputs: expected one of"),
    "unknown format": (chat(response_format={"type": "xml"}), 400, "response_format"),
    "tool without a name": (
        chat(tools=[{"type": "function", "function": {}}]),
        400,
        "tools[0].function.name: missing",
    ),
    "tool with a line end in its name": (
        chat(tools=[tool({}, "f\n")]),
        400,
        "tools[0].function.name",
    ),
    "two tools of one name": (
        chat(tools=[tool({}), tool({})]),
        400,
        "is the name of tools[0], too",
    ),
    "tool of a wrong schema": (
        chat(tools=[tool({"type": "object", "properties": []})]),
        400,
        "tools[0].function.parameters",
    ),
    "a choice without tools": (chat(tool_choice="required"), 400, "tool_choice"),
    "a choice of no tool": (
        chat(tools=[tool({})], tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "",
    ),
    "control characters in an id": (chat(request_id="a\r\nb"), 400, "request_id: expected"),
    "long id": (chat(request_id="a" * 129), 400, "request_id: expected"),
    "negative timeout": (chat(timeout=-1), 400, "timeout: expected"),
    "huge timeout": (with_raw("timeout", "1e400"), 400, ""),
    "priority out of bounds": (chat(priority=-(2**40)), 400, "priority: expected 0 to"),
    "tags of numbers": (chat(tags={"a": 1}), 400, "tags"),
    "empty salt": (chat(cache_salt=""), 400, "cache_salt: expected"),
    "transfer parameters": (
        chat(kv_transfer_params={"a": 1}),
        403,
        "kv_transfer_params: needs a key",
    ),
}

TAKEN = {
    "unknown field of a message": conversation("x", secret=1),
    "NUL character": text(prompt="a\0b"),
    "NUL in a message": conversation("a\0b"),
    "control characters": conversation("\x1b[2J\x07\x7f\x85\u2028"),
    "right to left": conversation("\u202e\u2066abc"),
    "characters beyond 16 bits": conversation("\U0001f600\U0010ffff\ufffe\ufdd0"),
    "duplicate keys: the last one counts": raw(
        '{"prompt": 5, "prompt": "hi", "max_tokens": 2}', TEXT
    ),
    "nulls": text(temperature=None, stop=None, logit_bias=None, user=None),
    "special tokens of the model": conversation("<eos><eos>"),
    "a template in a message": conversation("{{ 7 * 7 }}{% raw %}{{ messages }}{% for"),
    "a format in a message": conversation("%s%n{0.__class__}${jndi:ldap://127.0.0.1/a}"),
    "a regex of many states": chat(guided_regex="((a{1,1000}){1,1000}){1,1000}", max_tokens=2),
    "a call whose arguments are too deep to be an object": conversation(
        "hi", role="assistant", tool_calls=[call('{"a":' * 5000)]
    ),
    "a pickle in a message": conversation(
        "gASVJAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjARscyAvlIWUUpQu"
    ),
}


class Neighbour:
    """Streams of somebody else, one after another, and the longest time without an event."""

    def __init__(self, url, headers):
        self._url, self._headers = url, headers
        self._stop = threading.Event()
        self.events, self.gap, self.error = 0, 0.0, None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        wait_until(lambda: self.events or self.error)
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self):
        body = {"prompt": "go", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        try:
            with httpx.Client(
                base_url=self._url, headers=self._headers, timeout=PATIENCE_S
            ) as client:
                while not self._stop.is_set():
                    with client.stream("POST", TEXT, json=body) as response:
                        assert response.status_code == 200
                        self._read(response)
        except Exception as error:
            self.error = error

    def _read(self, response):
        last = time.monotonic()
        for line in response.iter_lines():
            if self._stop.is_set():
                return
            now = time.monotonic()
            self.gap, last = max(self.gap, now - last), now
            assert '"error"' not in line
            self.events += line.startswith("data: {")


@pytest.mark.parametrize("in_time", [False, pytest.param(True, marks=pytest.mark.timing)])
def test_none_is_a_500_and_a_neighbours_stream_goes_on(program, in_time):
    wrong = []
    with Neighbour(program.url, dict(program.client.headers)) as neighbour:
        before = neighbour.events
        assert before, neighbour.error
        for name, ((path, content), status, expected) in REFUSED.items():
            begun = time.monotonic()
            response = program.client.post(path, content=content, headers=JSON)
            took = time.monotonic() - begun
            error = response.json().get("error", {})
            message = error.get("message", response.text)
            is_late = in_time and took > 5
            if response.status_code != status or expected not in message or is_late:
                wrong.append(f"{name}: {response.status_code} in {took:.1f} s: {message[:300]}")
        for name, (path, content) in TAKEN.items():
            response = program.client.post(path, content=content, headers=JSON)
            if response.status_code != 200:
                wrong.append(f"{name}: {response.status_code}: {response.text[:300]}")
        if not in_time:
            wait_until(lambda: neighbour.events > before + 100 or neighbour.error)
        after = neighbour.events
    assert not wrong, "\n".join(wrong)
    assert neighbour.error is None
    assert after > before + 100
    assert not in_time or neighbour.gap < 2.0


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/9.9\r\nhost: localhost\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nxyz",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: a\0b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n bad: folded\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http(program, head):
    """The connection is answered or ended, never with a 500, and the server goes on."""
    import socket

    host, port = program.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert b" 500 " not in answer.partition(b"\r\n")[0]
    assert program.client.get("/health").status_code == 200
