"""The server's addresses, access log, figures and load, without a process of its own."""

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import stat

import msgspec
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.waiting import PATIENCE_S, wait_until

from hardpoint.builtin_plugins.server import serving as serving_module
from hardpoint.builtin_plugins.server.assembly import assemble
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.operations.addresses import allow_descriptors, bind
from hardpoint.builtin_plugins.server.operations.traffic import AccessEntry, as_json, as_text
from hardpoint.builtin_plugins.server.routes import models
from hardpoint.builtin_plugins.server.service import InFlightRequests, ServerPhase
from hardpoint.builtin_plugins.server.serving import Serving
from hardpoint.errors import EngineDeadError, QueueFullError
from hardpoint.plugins import ConfigError, OverloadedError, SamplingParams
from hardpoint.plugins.requests.stats import Health
from hardpoint.plugins.server import Authenticator, Client
from hardpoint.testing import ScriptedClock

ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def settings(**server):
    return configured(**server).server


# Addresses


def test_a_unix_socket_serves_and_is_its_owners_alone(tmp_path):
    path = tmp_path / "server.sock"
    with running(FakeEngine(config=configured(uds=str(path)))) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.post("/v1/chat/completions", ASK).status_code == 200
        assert server.client.get("/health", headers={"host": "proxy.example"}).status_code == 200
    assert not path.exists()


def test_a_unix_socket_has_the_mode_that_is_asked_for(tmp_path):
    path = tmp_path / "server.sock"
    bound = bind(settings(uds=str(path), uds_mode="0660"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    bound.close()


def test_a_stale_unix_socket_is_replaced(tmp_path):
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    bound = bind(settings(uds=str(path)))
    bound.check()
    bound.close()
    assert not path.exists()


def test_a_unix_socket_in_use_is_left_alone(tmp_path):
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match=r"server\.uds: another program listens on"):
            bind(settings(uds=str(path)))
    assert path.exists()


def test_a_file_in_the_place_of_a_unix_socket_is_left_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"server\.uds: expected no file, or a socket"):
        bind(settings(uds=str(path)))
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["no/such/folder/s", "x" * 200])
def test_paths_that_no_socket_can_have(tmp_path, name):
    with pytest.raises(ConfigError, match=r"server\.uds: .* cannot be bound: "):
        bind(settings(uds=str(tmp_path / name)))


def test_a_unix_socket_that_another_one_took_is_noticed_and_not_removed(tmp_path):
    path = tmp_path / "server.sock"
    first = bind(settings(uds=str(path)))
    second = bind(settings(uds=str(path)))  # no server listens there yet
    with pytest.raises(ConfigError, match="another program took the address"):
        first.check()
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_a_port_in_use_is_an_error_that_names_it():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as raised:
            bind(settings(port=port))
    assert str(raised.value) == (
        f"server.port: 127.0.0.1:{port} cannot be bound: Address already in use"
    )


def test_a_host_of_another_machine_is_an_error():
    with pytest.raises(ConfigError, match=r"server\.port: 192\.0\.2\.1:0 cannot be bound"):
        bind(settings(host="192.0.2.1"))


def test_ipv6():
    try:
        with running(FakeEngine(config=configured(host="::1"))) as server:
            assert server.url.startswith("http://[::1]:")
            assert server.client.get("/health").status_code == 200
    except ConfigError as error:
        if "cannot be bound" in str(error) and not os.path.exists("/proc/net/if_inet6"):
            pytest.skip("this machine has no IPv6")
        raise


def test_a_prefix_of_a_proxy_may_be_left_in_the_path_or_not():
    with running(FakeEngine(config=configured(root_path="/llm"))) as server:
        for path in ("/v1/chat/completions", "/llm/v1/chat/completions"):
            assert server.post(path, ASK).status_code == 200
        assert server.client.get("/llm/health").status_code == 200
        assert server.client.get("/llmhealth").status_code == 404


def test_open_routes_are_open_below_a_prefix_too():
    async def nobody(headers, path):
        return None

    engine = FakeEngine(
        config=configured(root_path="/llm"),
        extensions=(("keys", Authenticator(authenticate=nobody)),),
    )
    with running(engine) as server:
        assert server.client.get("/llm/health").status_code == 200
        assert server.client.get("/llm/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("limits", "raised", "message"),
    [
        ((1024, 4096), (1256, 4096), "the limit of open files was raised from 1024 to 1256"),
        ((1024, 1100), (1100, 1100), "1000 need 1256 open files; this process may have 1100"),
        ((2000, 4096), None, ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, ""),
    ],
)
def test_the_limit_of_open_files_is_raised_if_connections_need_it(
    monkeypatch, caplog, limits, raised, message
):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: set_to.append(pair))
    with caplog.at_level("INFO", "hardpoint"):
        allow_descriptors(1000)
    assert set_to == ([] if raised is None else [raised])
    assert message in caplog.text


# The access log


@pytest.fixture
def logged():
    """Return a function that makes requests with an access log, and returns its lines."""

    def log(form, requests, **engine):
        lines = []
        with running(FakeEngine(config=configured(access_log=form), **engine)) as server:
            server.service.traffic.write = lines.append
            requests(server)
        return lines

    return log


def test_a_line_of_json(logged):
    def requests(server):
        server.post(
            "/v1/chat/completions?secret=query",
            {**ASK, "stream": True},
            headers={"x-request-id": "mine", "authorization": "Bearer hush"},
        ).read()

    (line,) = logged("json", requests)
    entry = json.loads(line)
    assert entry.pop("address").startswith("127.0.0.1:")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("time"))
    assert 0 < entry.pop("first_byte_seconds") <= entry.pop("seconds") < 600
    assert entry.pop("bytes") > 100
    assert entry == {
        "client": "anybody",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "request_id": "mine",
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "finish_reasons": ["stop"],
    }


def test_a_line_of_text(logged):
    (line,) = logged("text", lambda server: server.post("/v1/chat/completions", ASK))
    assert re.fullmatch(
        r'\S+Z 127\.0\.0\.1:\d+ anybody "POST /v1/chat/completions" 200 \d+ B \d\.\d{3} s '
        r"first byte \d\.\d{3} s req-\w+ 9 \+ 4 tokens stop",
        line,
    )


@pytest.mark.parametrize("header", [None, "proxy-17", "of/a?path"])
@pytest.mark.parametrize("named", [None, "mine"])
def test_the_id_of_the_access_log_is_in_the_id_of_the_engine(logged, header, named):
    asked, answers = [], []

    def requests(server):
        generate = server.engine.generate

        def recorded(prompt, params=None, request_id=None, **options):
            asked.append(request_id)
            return generate(prompt, params, request_id, **options)

        server.engine.generate = recorded
        body = {"prompt": "hi", "max_tokens": 2, "request_id": named}
        headers = {} if header is None else {"x-request-id": header}
        answers.extend(server.post("/v1/completions", body, headers=headers) for _ in range(2))

    lines = logged("json", requests)
    assert len(set(asked)) == 2
    for line, engine_id, answer in zip(lines, asked, answers, strict=True):
        logged_id = json.loads(line)["request_id"]
        assert logged_id == answer.headers["x-request-id"]
        assert logged_id.removeprefix("req-") in engine_id
        answer_id = answer.json()["id"]
        assert engine_id.startswith(answer_id)
        if named is not None:
            assert answer_id == "cmpl-mine"
        elif header is None:
            assert answer_id == f"cmpl-{logged_id.removeprefix('req-')}"


def test_the_name_of_the_client_is_logged_and_nothing_of_its_key():
    async def known(headers, path):
        return Client(name="ada")

    lines = []
    engine = FakeEngine(
        config=configured(access_log="json"),
        extensions=(("keys", Authenticator(authenticate=known)),),
    )
    with running(engine) as server:
        server.service.traffic.write = lines.append
        server.post("/v1/chat/completions", ASK, headers={"authorization": "Bearer hush-hush"})
    assert json.loads(lines[0])["client"] == "ada"
    assert "hush" not in lines[0]


def test_probes_are_logged_only_if_they_fail(logged):
    def requests(server):
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert server.client.get(path).status_code == 200
        server.service.paused = "paused"
        assert server.client.get("/ready").status_code == 503

    assert [json.loads(line)["path"] for line in logged("json", requests)] == ["/version", "/ready"]


def test_nothing_is_logged_if_it_is_off(logged):
    assert logged("off", lambda server: server.post("/v1/chat/completions", ASK)) == []


def test_refusals_are_logged_with_their_reason(logged):
    def requests(server):
        server.post("/v1/chat/completions", {**ASK, "model": "other"})
        server.client.get("/nowhere")
        with server.socket() as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            connection.recv(1000)

    entries = [json.loads(line) for line in logged("json", requests)]
    assert [(entry["path"], entry["status"], entry["reason"]) for entry in entries] == [
        ("/v1/chat/completions", 404, "model_not_found"),
        ("/nowhere", 404, "not_found"),
        ("-", 400, "malformed"),
    ]


def test_a_client_that_goes_is_logged_as_499(logged):
    def requests(server):
        with server.socket() as connection:
            body = json.dumps(ASK)
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            wait_until(lambda: server.engine.open)
        wait_until(lambda: not server.service.traffic.open)

    (line,) = logged("json", requests, delay=3600.0)
    assert json.loads(line)["status"] == 499


def entry(**fields):
    return AccessEntry(
        **{
            "time": "t",
            "address": "unix",
            "method": "GET",
            "path": "/",
            "status": 200,
            "bytes": 1,
            "seconds": 0.5,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/a\nGET /forged", "/a\\nGET /forged"),
        ("/\x1b[31mred\r", "/\\x1b[31mred\\r"),
        ('/" 200 "', '/\\" 200 \\"'),
        ("/back\\slash\n", "/back\\\\slash\\n"),
        ("/\u202eright to left\u2028", "/\\u202eright to left\\u2028"),
        ("/é 日本", "/é 日本"),
    ],
)
def test_control_characters_are_escaped(path, shown):
    text = as_text(entry(path=path))
    assert f'"GET {shown}"' in text
    assert "\n" not in text
    assert "\n" not in as_json(entry(path=path, client="a\nb"))
    assert json.loads(as_json(entry(path=path)))["path"] == path


def test_a_control_character_in_a_request_makes_no_second_line(logged):
    lines = logged("text", lambda server: server.client.get("/a%0aforged%1b[0m"))
    assert len(lines) == 1
    assert '"GET /a\\nforged\\x1b[0m" 404' in lines[0]


# Figures


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completion", "/v1/chat/completions"),
        ("/v1/v1/completion", "/v1/completions"),
        ("/v1/model/", "/v1/models"),
        ("/v1/health", "/health"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/nothing/at/all", None),
    ],
)
def test_a_path_that_is_not_there_leads_to_the_one_that_is_meant(path, meant):
    with running(FakeEngine(config=configured())) as server:
        answer = server.client.get(path)
    hint = f" (did you mean {meant!r}?)" if meant else ""
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == (
        f"path: there is no route {path!r}{hint}",
        "not_found",
    )


def test_platforms_may_ask_for_health_and_load_by_their_own_names():
    with running(FakeEngine(config=configured())) as server:
        assert server.client.get("/ping").json() == server.client.get("/health").json()
        assert server.client.post("/ping").status_code == 200
        assert server.client.get("/load").json()["server_load"] == 0
        for _ in range(3):
            assert server.service.counts.add_below("held requests", 1024)
        assert server.client.get("/load").json()["server_load"] == 3
        load = server.client.get("/load").json()["load"]
        assert (load["waiting_prompt_tokens"], load["waiting_prompt_seconds"]) == (6, 0.5)
        assert [engine["state"] for engine in load["engines"]] == ["serving"]
        server.engine.is_running = False
        assert server.client.get("/ping").status_code == 503
        assert server.client.get("/ready").status_code == 503


@pytest.mark.parametrize(
    ("admin", "live_view"),
    [
        (None, None),
        ("unix:/run/admin.sock", None),
        ("127.0.0.1:9", "http://127.0.0.1:9/"),
        ("0.0.0.0:9", "http://*:9/"),
    ],
)
def test_a_page_learns_where_the_live_view_is(admin, live_view):
    with running(FakeEngine(config=configured())) as server:
        server.service.settings = msgspec.structs.replace(server.service.settings, admin=admin)
        assert server.client.get("/version").json().get("live_view") == live_view


def test_a_page_learns_which_parameters_a_model_recommends():
    class Recommending(FakeEngine):
        def default_sampling_params(self):
            return SamplingParams(temperature=0.2, top_p=0.9)

    with running(Recommending(config=configured())) as server:
        (model,) = server.client.get("/v1/models").json()["data"]
    assert model["default_sampling"] == {
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def test_figures_of_requests():
    engine = FakeEngine(config=configured(), metrics_text="engine_says 1\n")
    with running(engine) as server:
        server.post("/v1/chat/completions", ASK)
        server.post("/v1/chat/completions", {**ASK, "n": 0})
        server.client.get("/v1/models/no-such")
        server.client.get("/nowhere")
        text = server.client.get("/metrics").text
    assert text.startswith("engine_says 1\n")
    for line in (
        'hardpoint:http_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'hardpoint:http_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        'hardpoint:http_requests_total{route="/v1/models/{model:path}",status="404"} 1.0',
        'hardpoint:http_requests_total{route="none",status="404"} 1.0',
        'hardpoint:http_rejected_total{reason="model_not_found"} 1.0',
        "hardpoint:http_requests_open 1.0",
        "hardpoint:http_connections_open 1.0",
    ):
        assert line in text.splitlines()


# Load


def in_loop(function):
    async def run():
        return function()

    return asyncio.run(run())


def test_retry_after_follows_the_rate_at_which_requests_end():
    clock = ScriptedClock(100.0)

    def run():
        load = InFlightRequests(100, 4, clock)
        open_ones = [load.one_more() for _ in range(14)]
        for count in open_ones:
            count.__enter__()
        assert load.retry_after() == 1.0  # nothing is known yet
        for count in open_ones[:4]:
            clock.now += 2.0
            count.__exit__(None, None, None)
        return load.retry_after()

    assert in_loop(run) == pytest.approx(6 * 2.0)  # six wait, one ends in two seconds


def test_retry_after_forgets_idle_times():
    clock = ScriptedClock(100.0)

    def run():
        load = InFlightRequests(100, 2, clock)
        for _ in range(3):
            with load.one_more():
                clock.now += 4.0
        clock.now += 3600.0
        busy = [load.one_more() for _ in range(6)]
        for count in busy:
            count.__enter__()
        first = load.retry_after()
        for count in busy[:2]:
            clock.now += 1.0
            count.__exit__(None, None, None)
        return first, load.retry_after()

    first, later = in_loop(run)
    assert first == pytest.approx(2 * 4.0)  # four wait for two at a time, of 4 s each
    assert later == pytest.approx(2 * 1.0)


def test_refused_requests_do_not_count_as_quick_ones():
    clock = ScriptedClock(100.0)

    def run():
        load = InFlightRequests(100, 1, clock)
        for _ in range(50):
            with pytest.raises(AnswerError), load.one_more():
                raise AnswerError(429, "full")
        with load.one_more():
            clock.now += 10.0
        return load.retry_after()

    assert in_loop(run) == pytest.approx(10.0)


def test_retry_after_is_bounded():
    clock = ScriptedClock(100.0)

    def run():
        load = InFlightRequests(100, 1, clock)
        with load.one_more():
            clock.now += 1000.0
        return load.retry_after()

    assert in_loop(run) == 60.0


def test_more_requests_than_may_wait_are_answered_429():
    error = OverloadedError("scheduler.max_waiting: 8 requests wait")
    with running(FakeEngine(config=configured(), error=error)) as server:
        for stream in (False, True):
            answer = server.post("/v1/chat/completions", {**ASK, "stream": stream})
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1


def test_more_prompt_tokens_than_may_wait_are_answered_503():
    error = QueueFullError.of(900, 200, 1000, 17)
    with running(FakeEngine(config=configured(), error=error)) as server:
        for stream in (False, True):
            answer = server.post("/v1/chat/completions", {**ASK, "stream": stream})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "17")
            assert answer.json()["error"]["code"] == "overloaded"
            assert answer.json()["error"]["message"] == str(error)


# A dead engine


@pytest.fixture
def hurried(monkeypatch):
    """Servers take little time for their last answers, and wait little for their engine."""
    monkeypatch.setattr(serving_module, "_LAST_ANSWERS_SECONDS", 0.1)
    monkeypatch.setattr(models, "_LONGEST_WAIT", 0.1)


def test_a_dead_engine_ends_the_server_with_3(monkeypatch):
    """After its last answers; without these, the test of a closed output has it end by itself."""
    monkeypatch.setattr(serving_module, "_LAST_ANSWERS_SECONDS", 3600.0)
    with running(FakeEngine(config=configured())) as server:
        server.engine.dead_error = EngineDeadError("the engine was killed by SIGKILL")
        server.engine.is_running = False
        answer = server.post("/v1/chat/completions", ASK)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_ended"
        assert server.client.get("/health").status_code == 503
        wait_until(lambda: server.service.phase is ServerPhase.REFUSING)
        server.call(server.serving.stop)
        server.thread.join(PATIENCE_S)
        assert server.code == 3


def test_an_engine_that_is_being_restarted():
    with running(FakeEngine(config=configured())) as server:
        server.engine.is_running = False
        answer = server.post("/v1/chat/completions", ASK)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.json()["error"]["code"] == "engine_restarting"
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").status_code == 503
        server.engine.is_running = True
        assert server.post("/v1/chat/completions", ASK).status_code == 200


def test_an_engine_in_a_long_step_does_not_keep_health_waiting(hurried):
    engine = FakeEngine(config=configured(), health_now=Health(quarantined={}, faults={"acme": 3}))
    with running(engine) as server:
        before = server.client.get("/health").json()

        async def late():
            await asyncio.sleep(3600)

        engine.health = late
        answer = server.client.get("/health")
    assert before == {"status": "ok", "faults": {"acme": 3}}
    assert (answer.status_code, answer.json()) == (200, {**before, "busy": True})


# The task that watches the engine


def served(engine, announce=None):
    """Serve an engine until its server ends; return the exit code."""

    async def run():
        with contextlib.closing(bind(engine.config.server)) as bound:
            serving = Serving(assemble(engine, "9.9", bound=bound.host), bound)
            return await asyncio.wait_for(
                serving.run(handle_signals=False, announce=announce), PATIENCE_S
            )

    return asyncio.run(run())


def test_a_server_whose_output_is_closed_still_sees_that_its_engine_is_dead(hurried):
    def announce():
        raise BrokenPipeError

    engine = FakeEngine(config=configured(), dead_error=EngineDeadError("it died"))
    assert served(engine, announce) == 3


def test_a_server_that_cannot_watch_its_engine_ends_with_the_error():
    class Odd(FakeEngine):
        @property
        def is_running(self):
            raise ValueError("the engine is odd")

        @is_running.setter
        def is_running(self, value):
            pass

    with pytest.raises(ValueError, match="the engine is odd"):
        served(Odd(config=configured()))
