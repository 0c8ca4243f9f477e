"""The load generator measures what a server of known times and faults does."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import subprocess
import time

import pytest
from fake_api_server import Answer, FakeServer, serving
from http_load import disconnects
from http_load.answers import EventReader
from http_load.calibrate import measure_costs
from http_load.clients import run_load, run_on_uvloop
from http_load.connection import Pool
from http_load.disconnects import Point, disconnect
from http_load.drive import Client, Load, Outcome, Part, arrivals, send
from http_load.figures import distribution, figures
from http_load.target import Target
from http_load.workload import VOCABULARY, Costs, Lengths, SharedPrefix, Workload

ONE = Load("one", concurrency=1, requests=1)


def measured(server: FakeServer, load: Load = ONE, **workload) -> dict:
    target = Target.parse(server.url, verify=False)
    (outcome,) = run_load(target, {}, Workload("fake", **workload), load)
    return figures([outcome])


def answered(answer: Answer, load: Load = ONE, **workload) -> dict:
    with serving(FakeServer(lambda number, body: answer)) as server:
        return measured(server, load, **workload)


def test_known_times_give_known_percentiles():
    # Ten streams at once; one of ten answers is slow to start.
    def choose(number, body):
        return Answer(first=0.3 if number == 4 else 0.1, gap=0.02, chunks=5)

    with serving(FakeServer(choose)) as server:
        found = measured(server, Load("ten", concurrency=10, requests=10))
    assert (found["requests"], found["failed"], found["errors"]) == (10, 0, {})
    ms = found["ms"]
    assert 100 <= ms["TTFT"]["p50"] < 300
    assert 100 <= ms["TTFT"]["p90"] < 300
    assert 300 <= ms["TTFT"]["p99"] < 1000
    assert 19 <= ms["ITL"]["p50"] < 80
    assert 19 <= ms["TPOT"]["p50"] < 80
    assert 175 <= ms["E2E"]["p50"] < 1000
    assert 375 <= ms["E2E"]["max"] < 1000
    assert found["output_tokens"] == 50
    assert found["tokens_per_chunk"] == 1.0
    assert found["output_tokens_per_second"] == pytest.approx(50 / found["seconds"])
    assert found["requests_per_second"] == pytest.approx(10 / found["seconds"])
    assert 0.375 <= found["seconds"] < 1


def test_percentiles_are_nearest_ranks():
    found = distribution(value / 1000 for value in range(1, 101))
    assert (found["p50"], found["p90"], found["p99"], found["max"]) == (50, 90, 99, 100)
    assert distribution([]) is None


def test_chunks_of_several_tokens_are_reported():
    found = answered(Answer(chunks=5, tokens=4, gap=0.04))
    assert found["output_tokens"] == 20
    assert 39 <= found["ms"]["ITL"]["p50"] < 150
    assert found["ms"]["TPOT"]["p50"] == pytest.approx(4 * found["ms"]["ITL"]["mean"] / 19)
    assert found["notes"] == ["A chunk has 4.00 tokens on average: ITL is the time between chunks."]


def test_without_usage_a_chunk_counts_as_a_token():
    found = answered(Answer(chunks=5, usage=False))
    assert found["output_tokens"] == 5
    assert "sent no usage" in found["notes"][0]


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("pieces", [0, 3])
@pytest.mark.parametrize("chat", [True, False])
def test_every_framing_is_read(framing, newline, pieces, chat):
    answer = Answer(framing=framing, newline=newline, pieces=pieces)
    found = answered(answer, Load("two", concurrency=1, requests=2), chat=chat)
    assert (found["requests"], found["errors"]) == (2, {})
    assert found["output_tokens"] == 8
    assert found["tokens_per_chunk"] == 1.0


def test_an_event_may_be_split_anywhere_and_have_several_lines():
    text = b": x\n\ndata: a\r\ndata: b\r\n\r\nevent: y\ndata:c\nid: 1\n\ndata: d\n\n"
    for first in range(len(text)):
        for second in range(first, len(text)):
            reader = EventReader()
            parts = text[:first], text[first:second], text[second:]
            assert [e for part in parts for e in reader.feed(part)] == [b"a\nb", b"c", b"d"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(status=500, body="Internal Server Error"), "500 Internal Server Error"),
        (
            Answer(
                status=400,
                body='{"error": {"message": "max_tokens: at most 8 fit here, and not 9"}}',
            ),
            "400 max_tokens: at most 8 fit here, and not...",
        ),
        (Answer(status=404, body='{"detail": "Not Found"}'), "404 Not Found"),
        (Answer(body='{"choices": []}'), "200, but no event stream"),
        (Answer(cut=2), "connection: closed before the answer's end"),
        (Answer(cut=0), "connection: closed before the answer's end"),
        (Answer(cut=2, framing="length"), "connection: closed before the answer's end"),
        (Answer(cut=2, framing="close"), "stream: ended without a finish_reason"),
        (Answer(finish=False), "stream: ended without a finish_reason"),
        (Answer(marker=False), "stream: ended without [DONE]"),
        (Answer(fault="the engine died"), "stream: the engine died"),
    ],
)
def test_what_failed_is_counted_by_its_kind_and_in_no_time(answer, kind):
    found = answered(answer)
    assert found["errors"] == {kind: 1}
    assert (found["requests"], found["failed"], found["output_tokens"]) == (1, 1, 0)
    assert found["requests_per_second"] == 0
    assert found["ms"] == {"TTFT": None, "TPOT": None, "ITL": None, "E2E": None}


def test_a_request_that_lasts_too_long_is_an_error():
    found = answered(Answer(first=5), Load("late", concurrency=1, requests=1, timeout=0.05))
    assert found["errors"] == {"timeout after 0.05 s": 1}


def test_no_server_is_an_error():
    with serving(FakeServer()) as server:
        pass
    assert measured(server)["errors"] == {"connection: ConnectionRefusedError": 1}


def test_fast_refusals_do_not_flatter():
    """Half of the requests are refused at once; the figures are those of the others."""

    def choose(number, body):
        if number % 2:
            headers = ("Retry-After: 0",)
            return Answer(status=429, body='{"error": {"message": "full"}}', headers=headers)
        return Answer(first=0.05)

    with serving(FakeServer(choose)) as server:
        found = measured(server, Load("half", concurrency=1, requests=4))
    assert found["errors"] == {"429 full": 2}
    assert found["ms"]["TTFT"]["p50"] >= 50
    assert found["output_tokens"] == 8


def test_a_stream_waits_for_retry_after():
    def choose(number, body):
        refused = Answer(status=429, body="{}", headers=("Retry-After: 0.2",))
        return Answer() if number else refused

    start = time.perf_counter()
    with serving(FakeServer(choose)) as server:
        found = measured(server, Load("wait", concurrency=1, requests=2))
    assert (found["failed"], found["requests"]) == (1, 2)
    assert 0.2 <= time.perf_counter() - start < 5


def test_warm_up_is_in_no_figure_and_connections_are_kept():
    def choose(number, body):
        return Answer(first=0.2 if number < 3 else 0.0)

    with serving(FakeServer(choose)) as server:
        found = measured(server, Load("warm", concurrency=3, requests=6, warm_up=3))
        assert len(server.bodies) == 9
        assert server.connections == found["client"]["connections"] == 3
    assert found["requests"] == 6
    assert found["ms"]["TTFT"]["max"] < 200


def test_a_connection_that_the_server_closes_is_replaced():
    with serving(FakeServer(lambda number, body: Answer(close=True))) as server:
        found = measured(server, Load("closing", concurrency=1, requests=3))
        assert server.connections == 3
    assert found["errors"] == {}


def test_seconds_end_a_load():
    found = answered(Answer(first=0.05), Load("short", concurrency=2, seconds=0.2))
    assert 2 <= found["requests"] <= 10
    assert found["failed"] == 0


def test_poisson_arrivals_come_at_their_times():
    load = Load("rate", rate=100.0, requests=25)
    times = list(arrivals(load, 0))
    assert times == list(arrivals(load, 0)) != list(arrivals(load, 1))
    many = list(arrivals(Load("rate", rate=50.0, requests=5000), 0))
    assert 4500 < 50 * many[-1] < 5500
    # They do not wait for the answers, which all take longer than the load.
    found = answered(Answer(first=0.4), load)
    assert found["requests"] == 25
    assert found["seconds"] < times[-1] - times[0] + 5


def test_the_client_reports_that_it_was_the_limit():
    busy = Outcome(cpu_share=0.82, lags=[0.001] * 90 + [0.03] * 10, late=[0.05] * 10)
    idle = Outcome(cpu_share=0.1, lags=[0.001], late=[0.0] * 10)
    found = figures([idle, busy])["client"]
    assert found["limits"] == [
        "it used 82% of a core (up to 70% is sound)",
        "its event loop woke up 30 ms late (p99)",
        "it sent arrivals 50 ms late (p99)",
    ]
    assert figures([idle])["client"]["limits"] == []


def test_a_blocked_event_loop_is_noticed():
    class Blocking(list):
        def __setitem__(self, index, value):
            time.sleep(0.05)
            super().__setitem__(index, value)

    with serving(FakeServer()) as server:
        load = Load("blocked", concurrency=1, requests=5)
        target = Target.parse(server.url)
        client = Client(target, {}, Workload("fake"), load, Part(), Blocking([0, 0]))
        outcome = run_on_uvloop(client.run(lambda: None))
    assert max(outcome.lags) > 0.03
    assert any("event loop" in limit for limit in figures([outcome])["client"]["limits"])


def test_several_processes_share_a_load():
    with serving(FakeServer()) as server:
        target, workload = Target.parse(server.url), Workload("fake")
        load = Load("shared", concurrency=4, requests=10)
        outcomes = run_load(target, {}, workload, load, processes=2)
        asked = {body["messages"][0]["content"] for body in server.bodies}
        few = run_load(target, {}, workload, ONE, processes=2)
    assert [len(outcome.timelines) for outcome in outcomes] == [5, 5]
    assert len(asked) == 10
    assert figures(outcomes)["failed"] == 0
    assert [len(outcome.timelines) for outcome in few] == [1]


def test_other_addresses(tmp_path):
    with serving(FakeServer(), uds=tmp_path / "socket") as server:
        assert measured(server)["errors"] == {}
        assert "Host: localhost\r\n" in server.heads[0]
    with serving(FakeServer(), host="::1") as server:
        server.url += "/gateway/v1/"
        assert measured(server)["errors"] == {}
        assert server.paths == ["/gateway/v1/chat/completions"]
        assert "Host: [::1]:" in server.heads[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x"
    files = ["-keyout", tmp_path / "key", "-out", tmp_path / "certificate"]
    subprocess.run([*make.split(), *files], check=True, capture_output=True)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    with serving(FakeServer(), tls=context) as server:
        assert measured(server)["errors"] == {}
        (outcome,) = run_load(Target.parse(server.url), {}, Workload("fake"), ONE)
        assert outcome.timelines[0].error == "connection: SSLCertVerificationError"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http+unix://"])
def test_bad_addresses(url):
    with pytest.raises(ValueError, match=r"^URL: expected http://HOST:PORT, .*got "):
        Target.parse(url)


def test_lengths():
    rng = random.Random(0)
    assert {Lengths.parse("5").draw(rng) for _ in range(9)} == {5}
    drawn = [Lengths.parse("3-6").draw(rng) for _ in range(99)]
    assert set(drawn) == {3, 4, 5, 6}
    drawn = [Lengths.parse("normal:128:40").draw(rng) for _ in range(999)]
    assert 120 < sum(drawn) / 999 < 136
    assert 600 < sum(88 <= value <= 168 for value in drawn) < 760
    assert min(Lengths.parse("normal:1:9").draw(rng) for _ in range(99)) == 1
    for text in ("0", "6-3", "x", "normal:5", "normal:0:1", "-4"):
        with pytest.raises(ValueError, match=rf"expected a count such as 128, .* got '{text}'"):
            Lengths.parse(text)
    for text in ("0x4", "4x0", "x4", "4x"):
        with pytest.raises(ValueError, match=rf"expected TOKENSxGROUPS, such as .*'{text}'"):
            SharedPrefix.parse(text)


@pytest.mark.parametrize("chat", [True, False])
def test_prompts_have_the_tokens_that_the_server_counts(chat):
    async def costs(server):
        pool = Pool(Target.parse(server.url), {})
        try:
            return await measure_costs(pool, "fake", chat=chat)
        finally:
            pool.close()

    with serving(FakeServer()) as server:
        known = run_on_uvloop(costs(server))
        assert known.measured
        found = measured(server, Load("five", concurrency=1, requests=5), chat=chat, costs=known)
    assert found["input_tokens"] == 5 * 128
    with serving(FakeServer(counts_tokens=False)) as server:
        assert run_on_uvloop(costs(server)) == Costs()


def test_prompts_are_distinct_and_determined_by_the_seed():
    workload = Workload("fake", chat=False, input_tokens=Lengths.parse("64-512"))
    prompts = [workload.body("load", index) for index in range(300)]
    assert prompts == [workload.body("load", index) for index in range(300)]
    assert workload.body("other", 0) != prompts[0]
    beginnings = {prompt[prompt.index(b'"prompt"') :][:30] for prompt in prompts}
    assert len(beginnings) == 300
    assert len(VOCABULARY) > 150


def test_prefixes_are_shared_by_groups():
    shared = SharedPrefix.parse("50x3")
    workload = Workload("fake", chat=False, input_tokens=Lengths.parse("10"), shared=shared)
    texts = [json.loads(workload.body("x", index))["prompt"].split() for index in range(60)]
    assert {len(text) for text in texts} == {60}
    assert len({tuple(text[:50]) for text in texts}) == 3
    assert len({tuple(text[50:]) for text in texts}) == 60


@pytest.mark.parametrize("point", list(Point))
def test_clients_that_go_away(point, monkeypatch):
    monkeypatch.setattr(disconnects, "_HALF_CLOSED_S", 0.2)

    async def go_away(server):
        pool = Pool(Target.parse(server.url))
        request = pool.request("POST", "/v1/completions", Workload("fake", False).body("x", 0))
        await disconnect(pool, request, point, random.Random(1), 4)
        assert (await send(pool, request, 30)).chunks == 50
        pool.close()

    with serving(FakeServer(lambda number, body: Answer(chunks=50, gap=0.001))) as server:
        run_on_uvloop(go_away(server))
        assert len(server.bodies) == 1 + (point is not Point.IN_BODY)
        assert server.connections == 2


def test_bytes_that_are_no_http():
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-x\r\n\r\n")
        await writer.drain()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = Pool(Target.parse(f"http://127.0.0.1:{port}"))
        with pytest.raises(ConnectionError, match=r"^the answer is not HTTP/1\.1$"):
            await pool.ask(pool.request("GET", "/"), None)
        server.close()

    asyncio.run(ask())
