"""The server as a program: signals, draining, exit codes; and an engine that dies under load."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import psutil
import pytest
from support.http_server import client_of, running
from support.process.forked_python import forked_python
from support.process.harness import process_config
from support.processes import ROOT
from support.scripted_folder import write_config
from support.waiting import PATIENCE_S, wait_until

from hardpoint import AsyncLLM
from hardpoint.replicas.replicas import Replicas
from hardpoint.testing import write_scripted_model

ASK = {"messages": [{"role": "user", "content": "Hi"}]}
STREAM = {**ASK, "stream": True}


def popen_python(arguments, **options):
    return subprocess.Popen([sys.executable, *arguments], **options)


class Program:
    """A server in a process of its own; `url` is where it serves."""

    def __init__(self, *command, folder=None, forked=True):
        fork = functools.partial(forked_python().popen, is_torn_down=False)
        start = fork if forked else popen_python
        self.process = start(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*sys.path, ROOT]))},
        )
        self.url = None

    def loading(self):
        """Wait until the model loads."""
        assert self.process.stdout.readline() == "loading\n", self.process.stderr.read()
        return self

    def serving(self):
        """Wait until it serves; return a client."""
        line = self.process.stdout.readline()
        match = re.fullmatch(r"Serving \S+ at (\S+)\n", line)
        assert match, line + self.process.stderr.read()
        self.url = match[1]
        return client_of(self.url)

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        """Return the exit code, and its standard error."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


@contextlib.contextmanager
def program(*arguments, engine=None, forked=True, **server):
    """Run `hardpoint serve` with a fake engine."""
    fields = json.dumps({**(engine or {}), "server": {"access_log": "text", **server}})
    serve = str(ROOT / "tests/support/serve_fake.py")
    started = Program(serve, fields, *arguments, forked=forked)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


class Reader:
    """Reads an answer in a thread; `text` grows as it comes."""

    def __init__(self, client, body, path="/v1/chat/completions"):
        self.text, self.status, self.headers = "", None, {}
        self._thread = threading.Thread(target=self._read, args=(client, path, body))
        self._thread.start()

    def _read(self, client, path, body):
        with client.stream("POST", path, json=body) as response:
            self.status, self.headers = response.status_code, response.headers
            for part in response.iter_text():
                self.text += part

    def begun(self):
        """Wait until something has come."""
        wait_until(lambda: self.text)
        return self

    def end(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self

    def last_event(self):
        """Return the event before the end marker."""
        *_, event, end = self.end().text.strip().split("\n\n")
        assert end == "data: [DONE]"
        return json.loads(event.removeprefix("data: "))


@pytest.fixture
def held(tmp_path):
    """The path of a file that holds an engine while it exists."""
    path = tmp_path / "held"
    path.touch()
    return path


def test_a_drain_finishes_what_runs_and_sends_the_rest_away(held):
    words = {"text": "one two three four five six seven eight", "held": str(held)}
    with program(engine=words, drain_delay=0.1, drain_seconds=600) as server:
        client = server.loading().serving()
        assert client.get("/ready").status_code == 200
        stream = Reader(client, STREAM).begun()
        server.signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)

        def answer():
            return client.post("/v1/chat/completions", json=ASK)

        wait_until(lambda: answer().status_code == 503)
        refused = answer()
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "draining"
        assert client.get("/health").status_code == 200
        held.unlink()
        last = stream.last_event()
        assert last["choices"][0]["finish_reason"] == "stop"
        assert "eight" in stream.text
        code, errors = server.end()
    assert code == 0
    assert "SIGTERM: /ready says 503" not in errors  # a remark of the log, which is off here
    assert '"POST /v1/chat/completions" 503' in errors
    with pytest.raises(httpx.TransportError):
        client.get("/ready")


@pytest.mark.nightly
def test_what_does_not_finish_in_time_is_ended_and_its_clients_are_notified():
    words = {"text": "word " * 1000, "delay": 3600.0}
    with program(engine=words, drain_seconds=0.2, heartbeat_seconds=0.1) as server:
        client = server.loading().serving()
        stream, whole = Reader(client, STREAM).begun(), Reader(client, ASK)
        wait_until(lambda: client.get("/load").json()["server_load"] == 2)
        server.signal(signal.SIGINT)
        error = stream.last_event()["error"]
        assert (error["type"], error["code"]) == ("unavailable_error", "draining")
        assert error["message"] == (
            "the server ended before the answer did; send the request again"
        )
        assert whole.end().status == 503
        assert json.loads(whole.text)["error"]["code"] == "draining"
        assert int(whole.headers["retry-after"]) >= 1
        assert server.end()[0] == 0


@pytest.mark.nightly
def test_a_second_signal_ends_it_at_once(held):
    """Until then requests are answered: the delay of the drain has not passed."""
    words = {"text": "word " * 1000, "held": str(held)}
    with program(engine=words, drain_delay=3600, drain_seconds=3600) as server:
        client = server.loading().serving()
        stream = Reader(client, STREAM).begun()
        server.signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)
        late = client.post("/v1/chat/completions", json={**ASK, "max_tokens": 1})
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        server.signal(signal.SIGTERM)
        assert stream.last_event()["error"]["code"] == "draining"
        assert server.end()[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_it_and_leaves_nothing(tmp_path, held, number):
    path = tmp_path / "server.sock"
    with program("--uds", str(path), engine={"loading": str(held)}) as server:
        server.loading()
        assert path.exists()
        server.signal(number)
        code, errors = server.end()
    if number == signal.SIGTERM:
        assert (code, errors) == (128 + number, "")
    assert not path.exists()


@pytest.mark.nightly
def test_a_sighup_while_the_model_loads_reads_the_keys_again(tmp_path, held):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "ann"\nkey = "ann-0123456789abcdef"\n')
    keys.chmod(0o600)
    with program("--keys-file", str(keys), engine={"loading": str(held)}) as server:
        server.loading()
        keys.write_text('[[key]]\nname = "bob"\nkey = "bob-0123456789abcdef"\n')
        server.signal(signal.SIGHUP)
        held.unlink()
        with server.serving() as client:
            assert client.get("/v1/models").status_code == 401
            bob = {"authorization": "Bearer bob-0123456789abcdef"}
            wait_until(lambda: client.get("/v1/models", headers=bob).status_code == 200)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0


@pytest.mark.nightly
def test_a_program_with_unread_output_serves_and_drains(tmp_path, held):
    admin = f"unix:{tmp_path}/admin.sock"
    # The interpreter's own end flushes the output: it is started, not forked.
    loading = {"loading": str(held)}
    with program("--admin", admin, engine=loading, drain_delay=0, forked=False) as server:
        server.loading().process.stdout.close()
        held.unlink()
        client = client_of(admin)
        wait_until(lambda: _answers(client))
        assert client.post("/drain", json={}).status_code == 200
        server.process.wait(PATIENCE_S)
        assert server.process.returncode == 0
        assert "Traceback" not in server.process.stderr.read()


def _answers(client):
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health").status_code == 200


def test_a_unix_socket_is_announced_and_removed(tmp_path):
    path = tmp_path / "server.sock"
    with program("--uds", str(path), engine={}) as server:
        client = server.loading().serving()
        assert server.url == f"unix:{path}"
        assert client.post("/v1/chat/completions", json=ASK).status_code == 200
        server.signal(signal.SIGTERM)
        code, errors = server.end()
    assert code == 0
    assert 'unix anybody "POST /v1/chat/completions" 200' in errors
    assert not path.exists()


def test_a_port_in_use_is_found_before_the_model_loads(held):
    with program(engine={}) as first:
        first.loading().serving()
        port = first.url.rpartition(":")[2]
        with program("--port", port, engine={"loading": str(held)}) as second:
            code, errors = second.end()
    assert code == 2
    assert f"server.port: 127.0.0.1:{port} cannot be bound: Address already in use" in errors


# Real engines


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endless")
    return write_scripted_model(folder, {"say abc": ABC}, max_position_embeddings=1 << 15)


ABC = " abc abc abc"
SAY = {"prompt": "say abc", "max_tokens": 20, "temperature": 0}
SLOW = {"plugins": {"enable": ["support.plugins.slow:Slow"]}, "server": {"port": 0}}
LONG = {
    "prompt": "long",
    "max_tokens": 30_000,
    "ignore_eos": True,
    "plugin_args": {"slow": {"seconds": 0.002}},
}
COMPLETIONS = "/v1/completions"


@contextlib.contextmanager
def engine_served(folder, restart):
    """Serve a real engine."""
    llm = AsyncLLM(config=process_config(folder, SLOW), restart=restart)
    with contextlib.closing(llm), running(llm) as server:
        yield llm, server


def test_an_engine_that_is_killed_under_load_is_replaced(endless, monkeypatch):
    is_dead, may_restart, reopen = threading.Event(), threading.Event(), Replicas.reopen

    def reopen_later(*arguments):
        is_dead.set()
        assert may_restart.wait(PATIENCE_S)
        reopen(*arguments)

    monkeypatch.setattr(Replicas, "reopen", reopen_later)
    with engine_served(endless, "on_failure") as (llm, server):
        streams = [
            Reader(server.client, {**LONG, "stream": True}, COMPLETIONS).begun() for _ in range(4)
        ]
        whole = Reader(server.client, LONG, COMPLETIONS)
        wait_until(lambda: server.service.load.open == 5)
        pid = llm.engines.pid
        os.kill(pid, signal.SIGKILL)
        assert is_dead.wait(PATIENCE_S)  # a request sent before is resumed, not refused
        assert server.client.get("/health").status_code == 503
        refused = server.post(COMPLETIONS, SAY)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "engine_restarting"
        may_restart.set()
        wait_until(lambda: server.client.get("/ready").status_code == 200)
        grown = [len(stream.text) for stream in streams]
        wait_until(lambda: all(len(s.text) > n for s, n in zip(streams, grown, strict=True)))
        assert whole.status is None  # its engine died, and it goes on
        assert llm.engines.pid != pid

        os.kill(llm.engines.pid, signal.SIGKILL)  # more often than engine.max_resumes
        for stream in streams:
            error = stream.last_event()["error"]
            assert error["type"] == "unavailable_error"
            assert error["code"] == "engine_restarting"
        assert whole.end().status == 503
        assert int(whole.headers["retry-after"]) >= 1
        wait_until(lambda: server.client.get("/ready").status_code == 200)
        answer = server.post(COMPLETIONS, SAY)
        assert answer.json()["choices"][0]["text"] == ABC
        assert server.client.get("/health").json()["restarts"] == 2


@pytest.mark.nightly
def test_a_client_that_goes_frees_its_request_in_the_engine(endless):
    with engine_served(endless, "never") as (llm, server):
        with server.client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
            next(response.iter_raw())
        wait_until(lambda: server.call(llm.engines.live_requests) == [])
        assert server.call(llm.engines.scheduler_stats).kv_cache_usage == 0.0
        os.kill(llm.engines.pid, signal.SIGKILL)
        server.thread.join(PATIENCE_S)
        assert server.code == 3


@pytest.mark.nightly
def test_the_program_ends_while_a_real_model_loads(scripted, tmp_path):
    write_config(tmp_path, scripted, "server.port = 0")
    # A fork has a child from the start on; this one's first child is the engine.
    server = Program("-m", "hardpoint", "-v", "serve", folder=tmp_path, forked=False)
    try:
        process = psutil.Process(server.process.pid)
        wait_until(lambda: process.children(recursive=True))
        children = process.children(recursive=True)
        server.signal(signal.SIGTERM)
        code, errors = server.end()
        assert code == 128 + signal.SIGTERM, errors
        wait_until(lambda: not any(child.is_running() for child in children))
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.nightly
def test_the_program_serves_a_real_model_and_drains(scripted, tmp_path):
    admin = tmp_path / "admin.sock"
    admin_address = f'server.admin = "unix:{admin}"'
    live = 'plugins.live = ["fair", "no-such"]'
    write_config(tmp_path, scripted, "server.port = 0", admin_address, live)
    server = Program("-m", "hardpoint", "serve", folder=tmp_path)
    try:
        client = server.serving()
        answer = client.post(COMPLETIONS, json=SAY)
        assert answer.json()["choices"][0]["text"] == ABC
        with client_of(f"unix:{admin}") as administrator:
            names = [plugin["name"] for plugin in administrator.get("/plugins").json()["plugins"]]
            assert "temperature" in names
            for path, body in (("/pause", {"mode": "keep"}), ("/resume", {}), ("/sleep", {})):
                assert administrator.post(path, json=body).status_code == 200
            assert client.post(COMPLETIONS, json=SAY).status_code == 503
            assert administrator.post("/wake_up", json={}).status_code == 200
            assert administrator.post("/plugins/policy", json={"use": "fair"}).status_code == 200
            assert administrator.post("/plugins/policy", json={"use": "no-such"}).status_code == 400
            assert administrator.post("/plugins/policy", json={"use": "fcfs"}).status_code == 400
            assert administrator.post("/reset_encoder_cache", json={}).status_code == 409
            assert administrator.get("/engines/stats").json()["num_running"] == 0
            assert administrator.get("/requests").json() == {"requests": []}
            call = {"method": "plugin_meters"}
            assert administrator.post("/collective_rpc", json=call).status_code in (200, 409)
        answer = client.post(COMPLETIONS, json=SAY)
        assert answer.json()["choices"][0]["text"] == ABC
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.signal(signal.SIGTERM)
        code, errors = server.end()
        assert code == 0, errors
        wait_until(lambda: not any(child.is_running() for child in children))
        assert not admin.exists()
    finally:
        server.process.kill()
        server.process.communicate()
