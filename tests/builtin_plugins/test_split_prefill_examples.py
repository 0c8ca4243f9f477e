"""The example programs that share the work between two engines, and between two servers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import threading
import urllib.error
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from support.builtins.split import DECODE, PREFILL, split_config
from support.http_server import running
from support.processes import ROOT
from support.scripted_server import server_config, write_model

from hardpoint import AsyncLLM, EngineDeadError, OverloadedError, SamplingParams
from hardpoint.builtin_plugins.server.access.keys import KeyStore, installed
from hardpoint.testing import scripted_config, write_scripted_model

KEY = "a-key-of-some-length"


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_engines(tmp_path, capsys):
    config = scripted_config(write_scripted_model(tmp_path / "m", {"say abc" * 10: " abc"}))
    prompts = ["say abc" * 10, "The quick brown fox jumps over the lazy dog. " * 3]
    main = example("split_prefill").main
    outputs = asyncio.run(main(config.pop("model"), prompts, **config))
    assert outputs[0].outputs[0].text == " abc"
    assert [output.num_cached_tokens for output in outputs] == [64, 128]
    assert "64 of 70 prompt tokens from the other engine" in capsys.readouterr().out


@pytest.mark.parametrize("error", [EngineDeadError, OverloadedError])
def test_an_engine_that_cannot_compute_is_left_out(error):
    class Failing:
        async def generate(self, *_, **__):
            raise error("no")
            yield

    assert asyncio.run(example("split_prefill").compute(Failing(), "a", SamplingParams())) is None


@pytest.fixture
def server():
    """A server with answers from the test: `answers` has status, body and length of each."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            request_body = self.rfile.read(int(self.headers["content-length"]))
            status, body, length = server.answers.pop(0)
            server.asked.append(json.loads(request_body))
            self.send_response(status)
            self.send_header("content-length", str(length or len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    server.asked, server.answers = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


GIVEN = {"kv_transfer_params": {"num_tokens": 16}}
FIRST = {
    "parameters": ((200, json.dumps(GIVEN).encode(), None), GIVEN),
    "a timeout": ((200, b"{}", None), {}),
    "too many requests": ((429, b"", None), {}),
    "a request timeout": ((408, b"", None), {}),
    "an error": ((503, b"", None), {}),
    "half an answer": ((200, b"{}", 50), {}),
}


@pytest.mark.parametrize(("answer", "fields"), FIRST.values(), ids=FIRST)
def test_the_second_server_goes_on_whatever_the_first_one_answers(
    server, monkeypatch, answer, fields
):
    monkeypatch.setenv("HARDPOINT_API_KEY", KEY)
    server.answers += [answer, (200, b'{"choices": []}', None)]
    url = f"http://127.0.0.1:{server.server_port}"
    complete = example("split_prefill_servers").complete
    assert complete(url, url, {"prompt": "a"}) == {"choices": []}
    assert server.asked[1] == {"prompt": "a", **fields}


def test_a_request_that_is_wrong_is_not_sent_to_the_second_server(server, monkeypatch):
    monkeypatch.setenv("HARDPOINT_API_KEY", KEY)
    server.answers.append((400, b"", None))
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        example("split_prefill_servers").complete(url, url, {"prompt": "a"})


@pytest.mark.nightly
def test_two_servers(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text(f'[[key]]\nname = "router"\nkey = "{KEY}"\nkv_transfer = true\n')
    base = server_config(write_model(tmp_path / "model"))

    def server(name):
        llm = AsyncLLM(config=split_config(base, tmp_path / "s", name))
        return running(llm, authenticators=[installed(KeyStore(str(keys)))])

    def program(*urls):
        path = ROOT / "examples" / "split_prefill_servers.py"
        done = subprocess.run(
            [sys.executable, str(path), *urls, "0123456789" * 10],
            env={**os.environ, "HARDPOINT_API_KEY": KEY},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout, done.stderr

    with server(DECODE) as decode:
        with server(PREFILL) as prefill:
            text, usage = program(str(prefill.client.base_url), str(decode.client.base_url))
            assert "'cached_tokens': 96" in usage
        alone, _ = program("http://127.0.0.1:9", str(decode.client.base_url))
        assert alone == text
