"""`benchmarks/serve.py` from its arguments to its table and its JSON."""

from __future__ import annotations

import json
import sys

import pytest
import serve
from fake_api_server import Answer, FakeServer, serving


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the script; returns its exit code, its output, its errors and what it wrote as JSON."""
    monkeypatch.delenv("HARDPOINT_API_KEY", raising=False)

    def run(*arguments):
        path = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", ["serve.py", *arguments, "--json", str(path)])
        code = 0
        try:
            serve.main()
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        found = json.loads(path.read_text()) if path.exists() else None
        return code, printed.out, printed.err, found

    return run


def test_loads_by_concurrency(run):
    with serving(FakeServer(lambda number, body: Answer(gap=0.002))) as server:
        loads = ("--concurrency", "1", "3", "--requests", "6", "--ignore-eos")
        code, output, _, found = run(server.url, *loads, "--body", '{"top_p": 0.5}')
        assert all(body["ignore_eos"] and body["top_p"] == 0.5 for body in server.bodies)
        assert {body["max_tokens"] for body in server.bodies} == {64}
        assert len(server.bodies) == 2 * 6 + 1 + 3
        assert len({body["messages"][0]["content"] for body in server.bodies}) == 16
    assert code == 0
    assert [load["load"]["name"] for load in found["loads"]] == ["1 stream", "3 streams"]
    for load in found["loads"]:
        assert (load["requests"], load["failed"]) == (6, 0)
        assert load["input_tokens"] == 6 * 128
        assert load["ms"].keys() == {"TTFT", "TPOT", "ITL", "E2E"}
        assert {"p50", "p90", "p99"} < load["ms"]["TTFT"].keys()
    assert found["settings"]["model"] == "fake"
    assert found["notes"] == []
    for part in ("fake: 128 in / 64 out", "1 stream", "3 streams", "p99", "TPOT", "all tok/s"):
        assert part in output


def test_a_load_of_arrivals(run):
    with serving(FakeServer()) as server:
        rate = ("--rate", "100", "--seconds", "0.2", "--endpoint", "completions")
        code, output, _, found = run(server.url, *rate, "--shared-prefix", "20x1")
        beginnings = {tuple(body["prompt"].split()[:5]) for body in server.bodies}
        assert server.paths.count("/v1/completions") == len(server.bodies)
    (load,) = found["loads"]
    assert code == 0
    assert 5 <= load["requests"] <= 50
    assert load["load"]["rate"] == 100
    assert len(beginnings) == 1
    assert "100 requests/s" in output
    assert "after one of 1 prefixes of 20" in output


def test_missing_routes_of_the_server_are_reported(run):
    server = FakeServer(lambda number, body: Answer(usage=False), counts_tokens=False)
    with serving(server):
        _, output, _, found = run(server.url, "--concurrency", "1", "--requests", "2")
    assert found["notes"] == ["/tokenize is not available: a term of a prompt counts as a token."]
    assert "/tokenize is not available" in output
    assert "The server sent no usage" in output


def test_errors_are_printed_and_end_with_one(run):
    refused = Answer(status=429, body='{"error": {"message": "[full]"}}')
    with serving(FakeServer(lambda number, body: refused)) as server:
        arguments = ("--concurrency", "2", "--requests", "2", "--warm-up", "0")
        code, output, _, found = run(server.url, *arguments)
    assert code == 1
    assert "2 streams: 2 failed: 429 [full]" in output
    assert found["loads"][0]["errors"] == {"429 [full]": 2}


def test_keys_come_from_a_file_or_the_environment(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HARDPOINT_API_KEY", "of-environment")
    (tmp_path / "key").write_text("of-file\n")
    short = ("--concurrency", "1", "--requests", "1", "--warm-up", "0")
    with serving(FakeServer()) as server:
        run(server.url, *short)
        assert all("Authorization: Bearer of-environment\r\n" in head for head in server.heads)
        server.heads.clear()
        _, output, _, found = run(server.url, *short, "--api-key-file", str(tmp_path / "key"))
        assert all("Authorization: Bearer of-file\r\n" in head for head in server.heads)
    assert "of-file" not in output + json.dumps(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["127.0.0.1:8000"], "URL: expected http://HOST:PORT, "),
        (["http://x", "--input-tokens", "9-3"], "argument --input-tokens: expected a count such"),
        (["http://x", "--shared-prefix", "x"], "argument --shared-prefix: expected TOKENSxGROUPS"),
        (["http://x", "--concurrency", "0"], "expected a whole number >= 1, got '0'"),
        (["http://x", "--rate", "0"], "argument --rate: expected numbers above 0, got 0"),
        (["http://x", "--body", "[]"], "argument --body: expected a JSON object, got '[]'"),
        (["http://x", "--rate", "1", "--concurrency", "1"], "not allowed with argument"),
    ],
)
def test_wrong_arguments(run, arguments, message):
    code, _, error, found = run(*arguments)
    assert code == 2
    assert message in error
    assert found is None


def test_no_server(run):
    with serving(FakeServer()) as server:
        pass
    code, _, _, found = run(server.url)
    assert code.startswith(f"serve.py: no server at {server.url.removeprefix('http://')}: ")
    assert found is None


def test_progress_is_shown_on_a_terminal(run, monkeypatch):
    from http_load import clients

    monkeypatch.setattr(clients, "_PROGRESS_PERIOD_S", 0.05)
    monkeypatch.setattr(clients.sys.stderr, "isatty", lambda: True)
    with serving(FakeServer(lambda number, body: Answer(first=0.15))) as server:
        _, _, error, _ = run(server.url, "--concurrency", "1", "--requests", "2", "--warm-up", "0")
    assert "1 stream: 1 of 2 requests, 0 failed, 0 s" in error
    assert error.endswith("\r\033[K")
