"""The load generator measures what a server of known times and faults does."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import time
from types import SimpleNamespace

import msgspec
import pytest
from support.fake_api_server import Answer, FakeServer, serving
from support.waiting import PATIENCE_S

from hardpoint.bench import RequestFields, Traffic, client
from hardpoint.bench.answers import Document, EventReader, RequestTimeline, StreamAnswer, message_of
from hardpoint.bench.client import NOT_SENT, LoadMeasurements
from hardpoint.bench.connection import Pool
from hardpoint.bench.load import LoadPart
from hardpoint.bench.measures import client_report, report
from hardpoint.bench.processes import LoadRun, run_on_uvloop, send_load
from hardpoint.bench.prompts import Costs
from hardpoint.bench.server_facts import measure_costs
from hardpoint.bench.target import Target
from hardpoint.plugins import ConfigError
from hardpoint.simulation import Lengths, Objective, SimulatedLoad, SyntheticLoad
from hardpoint.testing import ScriptedClock

ONE = Traffic(concurrency=1, warm_up=0)


def load(requests: int = 1, **fields) -> SimulatedLoad:
    fields = {"prompt": Lengths(median=20), "output": Lengths(median=9)} | fields
    return SimulatedLoad(synthetic=SyntheticLoad(**fields), limit=requests)


def outcomes(server, traffic=ONE, requests=1, costs=None, fields=None, **form):
    target = Target.parse(server.url, verify=False)
    form = RequestFields(model="fake", **form)
    run = LoadRun(target, {}, form, costs or Costs(), load(requests, **(fields or {})), traffic)
    *_, sent = send_load(run)
    return sent.outcomes


def measured(server: FakeServer, traffic=ONE, requests=1, **more) -> dict:
    made, _ = report(outcomes(server, traffic, requests, **more), Objective())
    return msgspec.to_builtins(made)


def answered(answer: Answer, traffic=ONE, requests=1, **more) -> dict:
    with serving(FakeServer(lambda number, body: answer)) as server:
        return measured(server, traffic, requests, **more)


@pytest.mark.timing
def test_known_times_give_known_percentiles():
    # Ten streams at once; one of ten answers is slow to start.
    def choose(number, body):
        return Answer(first=0.3 if number == 4 else 0.1, gap=0.02, chunks=5)

    with serving(FakeServer(choose)) as server:
        found = measured(server, Traffic(concurrency=10, warm_up=0), 10)
    assert (found["requests"], found["failed"], found["errors"]) == (10, 0, {})
    assert 0.1 <= found["ttft"]["p50"] < 0.3
    assert 0.28 <= found["ttft"]["p99"] < 1
    assert 0.019 <= found["itl"]["p50"] < 0.08
    assert 0.019 <= found["tpot"]["p50"] < 0.08
    assert 0.175 <= found["e2e"]["p50"] < 1
    assert found["output_tokens"] == 50
    assert found["tokens_per_chunk"] == 1.0
    assert found["output_rate"] == pytest.approx(50 / found["seconds"])
    assert found["request_rate"] == pytest.approx(10 / found["seconds"])
    assert found["goodput_share"] == 1.0
    assert 0.375 <= found["seconds"] < 1.5


def streamed(first: float) -> RequestTimeline:
    """Return the timeline of an answer whose chunks arrive at known times."""
    timeline = RequestTimeline(sent=100.0)
    answer = StreamAnswer(timeline)
    answer.head(200, {"content-type": "text/event-stream"})
    for number in range(5):
        answer.body(b'data: {"choices": [{"text": "x"}]}\n\n', 100.0 + first + 0.02 * number)
    end = b'data: {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 5}}\n\n'
    answer.body(end + b"data: [DONE]\n\n", 100.0 + first + 0.1)
    answer.finish(101.0)
    return timeline


def test_times_of_arrival_give_percentiles():
    timelines = [streamed(0.3 if number == 4 else 0.1) for number in range(10)]
    made, curves = report([LoadMeasurements(timelines=timelines, start=99.9)], Objective())
    found = msgspec.to_builtins(made)
    assert (found["requests"], found["failed"], found["errors"]) == (10, 0, {})
    assert found["ttft"]["p50"] == pytest.approx(0.1)
    assert 0.28 <= found["ttft"]["p99"] < 0.3
    assert found["itl"]["p50"] == pytest.approx(0.02)
    assert found["tpot"]["p50"] == pytest.approx(0.02)
    assert found["seconds"] == pytest.approx(0.5)
    assert found["output_rate"] == pytest.approx(50 / 0.5)
    assert len(curves["ttft"]) == 101
    assert curves["ttft"][0] == pytest.approx(0.1)
    assert curves["ttft"][-1] == pytest.approx(0.3)


def test_the_objective_is_met_or_not():
    def choose(number, body):
        return Answer(first=0.1 * number)

    with serving(FakeServer(choose)) as server:
        sent = outcomes(server, ONE, 4)
    times = sorted(one.first - one.sent for one in sent[0].timelines)
    found, curves = report(sent, Objective(ttft=sum(times[1:3]) / 2))
    assert (found.goodput_share, found.finished) == (0.5, 4)
    assert found.goodput == pytest.approx(found.request_rate / 2)
    assert len(curves["ttft"]) == 101
    assert (curves["ttft"][0], curves["ttft"][-1]) == pytest.approx((times[0], times[-1]))
    assert times[-1] >= 0.3


def test_chunks_of_several_tokens_are_reported():
    found = answered(Answer(chunks=5, tokens=4, gap=0.01))
    assert found["output_tokens"] == 20
    assert found["tpot"]["p50"] == pytest.approx(4 * found["itl"]["mean"] / 19)
    assert found["notes"] == ["A chunk has 4.00 tokens on average: ITL is the time between chunks."]


def test_without_usage_a_chunk_counts_as_a_token():
    found = answered(Answer(chunks=5, usage=False))
    assert found["output_tokens"] == 5
    assert "sent no usage" in found["notes"][0]


def test_cached_tokens_are_those_of_the_usage():
    found = answered(Answer(cached=10))
    assert found["reuse"] == pytest.approx(10 / found["prompt_tokens"])
    assert answered(Answer())["reuse"] is None


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("pieces", [0, 3])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_framing_is_read(framing, newline, pieces, endpoint):
    answer = Answer(framing=framing, newline=newline, pieces=pieces)
    found = answered(answer, ONE, 2, endpoint=endpoint)
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
    ids=range(11),
)
def test_what_failed_is_counted_by_its_kind_and_in_no_time(answer, kind):
    found = answered(answer)
    assert found["errors"] == {kind: 1}
    assert (found["requests"], found["failed"], found["output_tokens"]) == (1, 1, 0)
    assert (found["finished"], found["request_rate"], found["goodput"]) == (0, 0, 0)


@pytest.mark.parametrize("text", [b'"\xff"', b"[" * 5000], ids=["no UTF-8", "deep"])
def test_what_cannot_be_read_is_an_error_of_its_request(text):
    timeline = RequestTimeline()
    answer = StreamAnswer(timeline)
    answer.head(200, {"content-type": "text/event-stream"})
    answer.body(b'data: {"choices": [{"text": %b}]}\n\n' % text, 1.0)
    answer.finish(2.0)
    assert timeline.error == "stream: an event is not the JSON of a chunk"
    assert message_of(b'{"error": %b}' % text).startswith('{"error": ')
    document = Document()
    document.head(200, {})
    document.body(b'{"data": %b}' % text, 1.0)
    assert document.json() is None


def test_a_request_that_lasts_too_long_is_an_error():
    found = answered(Answer(first=5), Traffic(concurrency=1, warm_up=0, timeout=0.05))
    assert found["errors"] == {"timeout after 0.05 s": 1}


def test_no_server_is_an_error():
    with socket.socket() as silent:  # it does not listen
        silent.bind(("127.0.0.1", 0))
        server = FakeServer(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        found = measured(server)
    assert found["errors"] == {"connection: ConnectionRefusedError": 1}


def test_fast_refusals_do_not_flatter():
    """Half of the requests are refused at once; the figures are those of the others."""

    def choose(number, body):
        if number % 2:
            headers = ("Retry-After: 0",)
            return Answer(status=429, body='{"error": {"message": "full"}}', headers=headers)
        return Answer(first=0.05)

    with serving(FakeServer(choose)) as server:
        found = measured(server, ONE, 4)
    assert found["errors"] == {"429 full": 2}
    assert found["ttft"]["p50"] >= 0.05
    assert found["output_tokens"] == 8
    assert found["goodput_share"] == 0.5


def test_a_stream_waits_for_retry_after():
    def choose(number, body):
        refused = Answer(status=429, body="{}", headers=("Retry-After: 0.2",))
        return Answer() if number else refused

    start = time.perf_counter()
    with serving(FakeServer(choose)) as server:
        found = measured(server, ONE, 2)
    assert (found["failed"], found["requests"]) == (1, 2)
    assert time.perf_counter() - start >= 0.2


def test_warm_up_is_in_no_figure_and_connections_are_kept():
    def choose(number, body):
        return Answer(chunks=9 if number < 3 else 4)

    with serving(FakeServer(choose)) as server:
        found = measured(server, Traffic(concurrency=3), 6)
        texts = [body["messages"][0]["content"] for body in server.bodies]
        assert len(texts) == len(set(texts)) == 9
        assert server.connections == found["client"]["connections"] == 3
    assert found["requests"] == 6
    assert found["output_tokens"] == 6 * 4


def test_a_connection_that_the_server_closes_is_replaced():
    with serving(FakeServer(lambda number, body: Answer(close=True))) as server:
        found = measured(server, ONE, 3)
        assert server.connections == 3
    assert found["errors"] == {}


def test_seconds_end_a_load(monkeypatch):
    traffic = Traffic(concurrency=1, seconds=2.5, warm_up=0)
    assert traffic.num_requests(SimulatedLoad()) is None
    clock = ScriptedClock()
    clocks = SimpleNamespace(perf_counter=clock, process_time=time.process_time)
    monkeypatch.setattr(client, "time", clocks)

    def choose(number, body):
        clock.advance(1.0)
        return Answer()

    with serving(FakeServer(choose)) as server:
        run = LoadRun(
            Target.parse(server.url),
            {},
            RequestFields(model="fake"),
            Costs(),
            SimulatedLoad(),
            traffic,
        )
        outcome = run_on_uvloop(run.client(LoadPart(), [0, 0, 0]).run(lambda: None))
    assert [one.error for one in outcome.timelines] == [""] * 3
    assert outcome.unfinished == 0


def test_arrivals_do_not_wait_for_answers():
    traffic = Traffic(rate=100.0, warm_up=0)
    at, _ = zip(*traffic.timed(range(25)), strict=True)
    found = answered(Answer(first=0.4), traffic, 25)
    assert found["requests"] == 25
    assert at[-1] <= found["seconds"] < 25 * 0.4
    assert found["client"]["connections"] > 5


def test_a_load_has_its_own_times():
    synthetic = {"rate": 50.0}
    found = answered(Answer(), Traffic(warm_up=0), 20, fields=synthetic)
    *_, last = load(20, **synthetic).requests()[1]
    assert found["requests"] == 20
    assert last.at <= found["seconds"]


def test_turns_go_on_from_the_answers():
    def choose(number, body):
        return Answer(chunks=2, gap=0.01)

    for traffic in (Traffic(concurrency=2, warm_up=0), Traffic(rate=1000.0, warm_up=0)):
        with serving(FakeServer(choose)) as server:
            fields = {"turns": 3.0, "think_seconds": 0.001}
            found = measured(server, traffic, 12, fields=fields)
            bodies = [body["messages"] for body in server.bodies]
        assert found["failed"] == 0
        assert found["conversations"]["count"] < 12
        later = [messages for messages in bodies if len(messages) > 1]
        assert later
        for messages in later:
            roles = [message["role"] for message in messages]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
            assert {m["content"] for m in messages[1::2]} == {"né0 né1 "}
            assert messages[:-2] in bodies


def test_turns_after_a_failed_one_are_not_sent():
    def choose(number, body):
        return Answer(status=500, body="{}", headers=("Retry-After: 0.001",))

    with serving(FakeServer(choose)) as server:
        found = measured(server, ONE, 9, fields={"turns": 3.0})
        sent = len(server.bodies)
    assert sent < 9
    assert found["errors"] == {"500 {}": sent, NOT_SENT: 9 - sent}


def test_tenants_are_reported_and_sent_as_tags():
    with serving(FakeServer()) as server:
        found = measured(server, ONE, 12, fields={"tenants": 2, "priorities": 3})
        tags = [body["tags"]["tenant"] for body in server.bodies]
        priorities = {body.get("priority", 0) for body in server.bodies}
        server.bodies.clear()
        outcomes(server, ONE, 12, fields={"tenants": 2, "priorities": 3}, only_openai=True)
        plain = [set(body) for body in server.bodies]
    assert {name: one["finished"] for name, one in found["tenants"].items()} == {
        name: tags.count(name) for name in ("t0", "t1")
    }
    assert priorities <= {0, 1, 2} != {0}
    fields = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
    assert plain == [fields] * 12


def test_fields_of_requests():
    with serving(FakeServer()) as server:
        form = {"ignore_eos": False, "retain_seconds": 5.0, "body": {"top_p": 0.5}}
        outcomes(server, ONE, 4, fields={"turns": 2.0}, **form)
        for body in server.bodies:
            assert "ignore_eos" not in body
            assert (body["retain_seconds"], body["top_p"]) == (5.0, 0.5)
            assert body["session"].startswith("s")
            assert body["max_tokens"] == 9


def test_the_client_reports_that_it_was_the_limit():
    busy = LoadMeasurements(cpu_share=0.82, lags=[0.001] * 90 + [0.03] * 10, late=[0.05] * 10)
    idle = LoadMeasurements(cpu_share=0.1, lags=[0.001], late=[0.0] * 10)
    assert client_report([idle, busy]).limits == [
        "it used 82% of a core (up to 70% is sound)",
        "its event loop woke up 30 ms late (p99)",
        "it sent arrivals 50 ms late (p99)",
    ]
    assert client_report([idle]).limits == []


def test_a_blocked_event_loop_is_noticed():
    class Blocking(list):
        def __setitem__(self, index, value):
            time.sleep(0.2)
            super().__setitem__(index, value)

    with serving(FakeServer()) as server:
        target = Target.parse(server.url)
        run = LoadRun(target, {}, RequestFields(model="fake"), Costs(), load(5), ONE)
        outcome = run_on_uvloop(run.client(LoadPart(), Blocking([0, 0, 0])).run(lambda: None))
    assert max(outcome.lags) > 0.03


@pytest.mark.nightly
def test_several_processes_share_a_load():
    with serving(FakeServer()) as server:
        traffic = Traffic(concurrency=4, processes=2, warm_up=0)
        found = outcomes(server, traffic, 10)
        asked = {body["messages"][0]["content"] for body in server.bodies}
    assert [len(outcome.timelines) for outcome in found] == [5, 5]
    assert len(asked) == 10


@pytest.mark.nightly
def test_several_processes_share_conversations():
    with serving(FakeServer()) as server:
        traffic = Traffic(concurrency=4, processes=2, warm_up=0)
        turns = measured(server, traffic, 10, fields={"turns": 2.0})
    assert (turns["failed"], turns["requests"]) == (0, 10)
    assert turns["client"]["processes"] == 2


def test_what_is_interrupted_is_in_no_figure():
    def choose(number, body):
        return Answer(first=0.0 if number < 2 else 3600.0)

    with serving(FakeServer(choose)) as server:
        target = Target.parse(server.url)
        run = LoadRun(target, {}, RequestFields(model="fake"), Costs(), load(5), ONE)
        counters = [0, 0, 0]

        async def stop_after_two():
            sending = asyncio.ensure_future(run.client(LoadPart(), counters).run(lambda: None))
            while len(server.bodies) < 3:
                await asyncio.sleep(0.01)
            counters[-1] = 1
            return await asyncio.wait_for(sending, PATIENCE_S)

        outcome = run_on_uvloop(stop_after_two())
    assert (len(outcome.timelines), outcome.unfinished) == (2, 1)
    assert counters[:2] == [2, 0]


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
        target = Target.parse(server.url)
        run = LoadRun(target, {}, RequestFields(model="fake"), Costs(), load(), ONE)
        *_, sent = send_load(run)
        assert sent.outcomes[0].timelines[0].error == "connection: SSLCertVerificationError"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://", "http+unix://", "http://[", "http://x:y"]
)
def test_bad_addresses(url):
    with pytest.raises(ConfigError, match=r"^url: expected http://HOST:PORT, .*got "):
        Target.parse(url)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_prompts_have_the_tokens_that_the_server_counts(endpoint):
    async def costs(server):
        pool = Pool(Target.parse(server.url), {})
        try:
            return await measure_costs(pool, "fake", chat=endpoint == "chat")
        finally:
            pool.close()

    with serving(FakeServer()) as server:
        known = run_on_uvloop(costs(server))
        assert known.measured
        fields = {"prompt": Lengths(median=128)}
        found = measured(server, ONE, 5, costs=known, fields=fields, endpoint=endpoint)
    assert found["prompt_tokens"] == 5 * 128
    with serving(FakeServer(counts_tokens=False)) as server:
        assert run_on_uvloop(costs(server)) == Costs()


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
