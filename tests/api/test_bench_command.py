"""`hardpoint bench serve`, `sweep` and `startup`: options, tables, JSON, pages, and errors."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_api_server import Answer, FakeServer, serving
from support.process.forked_python import forked_python
from support.waiting import PATIENCE_S

from hardpoint.bench import server_process
from hardpoint.builtin_plugins.commands.loads.options import combinations, split_values
from hardpoint.builtin_plugins.commands.loads.progress import ProgressLine
from hardpoint.cli import main
from hardpoint.plugins import ConfigError

SMALL = ["--input-tokens", "9", "--output-tokens", "4"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HARDPOINT_API_KEY", raising=False)
    return tmp_path


def run(capsys, *arguments):
    """Return exit code, output and errors of a command line."""
    code = main(["bench", *arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


class TestServe:
    def test_loads_by_concurrency(self, capsys):
        with serving(FakeServer()) as server:
            loads = ["--concurrency", "1", "3", "--requests", "6", *SMALL]
            given = ["--url", server.url, *loads, "--body", '{"top_p": 0.5}', "--json"]
            code, out, err = run(capsys, "serve", *given)
            assert (code, err) == (0, "")
            assert all(body["ignore_eos"] and body["top_p"] == 0.5 for body in server.bodies)
            assert {body["max_tokens"] for body in server.bodies} == {4}
            assert len(server.bodies) == 2 * 6 + 1 + 3
            assert len({body["messages"][0]["content"] for body in server.bodies}) == 16
        found = json.loads(out)
        assert list(found["loads"]) == ["1 stream", "3 streams"]
        for load in found["loads"].values():
            report = load["report"]
            assert (report["requests"], report["failed"]) == (6, 0)
            assert report["prompt_tokens"] == 6 * 9
        assert (found["model"], found["notes"], found["interrupted"]) == ("fake", [], False)

    def test_the_table(self, capsys):
        with serving(FakeServer(counts_tokens=False)) as server:
            loads = ["--load", "tenants=2", "--load", "turns=2", "--requests", "8", *SMALL]
            code, out, _ = run(capsys, "serve", "--url", server.url, *loads, "--concurrency", "2")
        assert code == 0
        lines = out.splitlines()
        assert lines[0].startswith('fake: synthetic {"tenants": 2, "turns": 2, "prompt": ')
        assert lines[1].split()[:5] == ["LOAD", "OK", "FAILED", "TTFT", "P50"]
        assert lines[2].split()[:4] == ["2", "streams", "8", "0"]
        assert re.search(r"by tenant\nLOAD.*\n2 streams +t[01] +\d+", out)
        assert re.search(r"by conversation\nLOAD.*\n2 streams +\d+", out)
        assert "/tokenize is not available: a term of a prompt counts as a token." in lines

    def test_arrivals(self, capsys):
        with serving(FakeServer()) as server:
            rate = ["--rate", "100", "--burstiness", "4", "--seconds", "0.2", *SMALL]
            given = ["--url", server.url, *rate, "--endpoint", "completions", "--warm-up", "0"]
            code, out, _ = run(capsys, "serve", *given)
            assert server.paths.count("/v1/completions") == len(server.bodies) < 100
        assert code == 0
        assert "100 requests/s, burstiness 4  " in out

    def test_a_trace_comes_at_its_times(self, capsys, folder):
        line = {"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [1, 2]}
        lines = "".join(json.dumps({**line, "timestamp": 100_000 * n}) + "\n" for n in range(6))
        (folder / "trace.jsonl").write_text(lines)
        with serving(FakeServer()) as server:
            given = ["--trace", "trace.jsonl", "--hash-tokens", "3", "--requests", "5"]
            code, out, _ = run(
                capsys, "serve", "--url", server.url, *given, "--speed", "2000", "--json"
            )
        assert code == 0
        found = json.loads(out)["loads"]["times of the load"]["report"]
        assert found["requests"] == 5
        assert 0.2 <= found["seconds"] < PATIENCE_S  # of 400

    def test_errors_are_counted_and_end_with_one(self, capsys):
        refused = Answer(status=429, body='{"error": {"message": "[full]"}}')
        with serving(FakeServer(lambda number, body: refused)) as server:
            given = ["--concurrency", "2", "--requests", "2", "--warm-up", "0"]
            code, out, _ = run(capsys, "serve", "--url", server.url, *given)
        assert code == 1
        assert "2 streams: 2 failed: 429 [full]" in out
        assert re.search(r"2 streams +0 +2 +- +-", out)

    def test_keys_come_from_a_file_or_the_environment(self, capsys, monkeypatch, folder):
        monkeypatch.setenv("HARDPOINT_API_KEY", "of-environment")
        (folder / "key").write_text("of-file\n")
        short = ["--concurrency", "1", "--requests", "1", "--warm-up", "0"]
        with serving(FakeServer()) as server:
            run(capsys, "serve", "--url", server.url, *short)
            assert all("Authorization: Bearer of-environment\r\n" in one for one in server.heads)
            server.heads.clear()
            given = ["--url", server.url, *short, "--api-key-file", "key", "--json"]
            _, out, _ = run(capsys, "serve", *given)
            assert all("Authorization: Bearer of-file\r\n" in head for head in server.heads)
        assert "of-file" not in out

    @pytest.mark.parametrize("key", ["\ufeffof-file", "of\nfile"], ids=["byte order mark", "lines"])
    def test_a_key_that_no_header_can_have(self, capsys, folder, key):
        (folder / "key").write_text(key)
        with serving(FakeServer()) as server:
            code, _, err = run(capsys, "serve", "--url", server.url, "--api-key-file", "key")
        assert code == 2
        assert "error: api_key: expected printable ASCII, got other characters" in err

    def test_an_interrupt_prints_what_there_is(self, capsys):
        def choose(number, body):
            if number == 3:
                threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
            return Answer(first=30.0 if number >= 3 else 0.0)

        with serving(FakeServer(choose)) as server:
            given = ["--url", server.url, "--concurrency", "1", "2", "--requests", "9", *SMALL]
            code, out, err = run(capsys, "serve", *given)
        assert (code, err) == (130, "")
        assert re.search(r"\n1 stream +2 +0 ", out)
        assert "1 stream: 1 were interrupted, and are in no figure" in out
        assert "2 streams" not in out

    def test_no_server(self, capsys):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # and does not listen
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            code, out, err = run(capsys, "serve", "--url", f"http://{address}")
        assert (code, out) == (2, "")
        assert err == f"hardpoint: error: no server at {address}: Connection refused\n"

    def test_progress_is_shown_on_a_terminal(self, capsys, monkeypatch):
        shown, show = threading.Event(), ProgressLine.show

        def note(progress, text):
            show(progress, text)
            if "0 of 2 requests" in text:
                shown.set()

        def choose(number, body):
            assert shown.wait(PATIENCE_S)
            return Answer()

        monkeypatch.setattr(ProgressLine, "show", note)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        with serving(FakeServer(choose)) as server:
            given = ["--concurrency", "1", "--requests", "2", "--warm-up", "0"]
            _, _, err = run(capsys, "serve", "--url", server.url, *given)
        assert re.search(r"\r1 stream: 0 of 2 requests, 0 failed, \d+ s", err)

    def test_the_page_needs_nothing_else(self, capsys, folder):
        with serving(FakeServer()) as server:
            given = ["--concurrency", "1", "2", "--requests", "4", "--html", "page.html", *SMALL]
            code, _, _ = run(capsys, "serve", "--url", server.url, *given)
        assert code == 0
        text = (folder / "page.html").read_text()
        assert not re.search(r"src=|<script|url\(|@import|href=", text)
        assert text.count("<figure>") == 5
        for plot in re.findall(r"<svg.*?</svg>", text):
            assert len(ElementTree.fromstring(plot).findall("polyline")) == 2
        assert "<h2>Loads</h2>" in text

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--url", "127.0.0.1:8000"], "url: expected http://HOST:PORT, "),
            (["--url", "http://x", "--concurrency", "0"], r"traffic\[0\].concurrency: expected a"),
            (["--url", "http://x", "--rate", "0"], r"traffic\[0\].rate: expected a number > 0"),
            (["--url", "http://x", "--body", "[]"], r"--body: expected a JSON object, got '\[\]'"),
            (
                ["--url", "http://x", "--rate", "1", "--concurrency", "1"],
                "--rate: expected no --con",
            ),
            (["--url", "http://x", "--load", "rat=3"], "load.synthetic.rat: unknown field"),
            (
                ["--url", "http://x", "--trace", "x", "--load", "rate=3"],
                "--load: expected no --tra",
            ),
            (["--url", "http://x", "--trace", "no.jsonl"], "no.jsonl: the trace cannot be read"),
            (["--url", "http://x", "--api-key-file", "no"], "--api-key-file: 'no' cannot be read"),
            (["--insecure"], "--insecure: expected --url as well"),
            (["--set", "scheduler.polici=fair"], "scheduler.polici: unknown field"),
            (["--url", "http://x", "--slo-ttft-ms", "0"], "--slo-ttft-ms: expected a number > 0"),
        ],
        ids=range(12),
    )
    def test_what_is_wrong_is_named(self, capsys, arguments, message):
        code, out, err = run(capsys, "serve", *arguments)
        assert (code, out) == (2, "")
        assert re.search(f"error: {message}", err), err


@pytest.fixture
def forked_servers(monkeypatch):
    """Let servers be forks of an interpreter that has imported the package."""

    def start(command, **options):
        return forked_python().popen(command[1:], cwd=Path.cwd(), **options)

    module = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    monkeypatch.setattr(server_process, "subprocess", module)


class TestSweep:
    @pytest.mark.usefixtures("forked_servers")
    def test_variants_of_a_server_that_is_started(self, capsys, folder):
        """With the scripted model, over real sockets; a second run measures nothing again."""
        settings = ["--set", "max_model_len=256", "--set", "kv_cache.num_blocks=64"]
        given = ["scripted", *settings, "--endpoint", "completions", "--requests", "4", *SMALL]
        given += ["--concurrency", "1", "--vary", "scheduler.policy=fair", "--json"]
        code, out, _ = run(capsys, "sweep", *given, "--html", "page.html")
        assert code == 0
        (point,) = json.loads(out)["points"]
        assert (point["variant"], point["load"], point["error"]) == ("fair", "1 stream", "")
        assert point["report"]["output_tokens"] == 16
        assert 4 * 5 < point["report"]["prompt_tokens"] <= 4 * 9  # terms have some bytes each
        assert (folder / "page.html").read_text().count("<figure>") == 9
        again = run(capsys, "sweep", *given, "--resume")[1]
        assert json.loads(again)["points"] == [point]
        assert json.loads((folder / "sweep.json").read_text())["points"] == [point]

    def test_loads_on_a_server_that_runs(self, capsys):
        with serving(FakeServer()) as server:
            given = ["--url", server.url, "--rate", "50", "90", "--requests", "4", *SMALL]
            code, out, _ = run(capsys, "sweep", *given, "--output", "x.json")
        assert code == 0
        lines = out.splitlines()
        assert lines[1].split()[:3] == ["VARIANT", "LOAD", "OK"]
        names = [re.split(r"  +", line)[:3] for line in lines[2:4]]
        assert names == [["as configured", f"{rate} requests/s", "4"] for rate in (50, 90)]

    def test_a_load_without_any_answer_ends_with_one(self, capsys):
        refused = Answer(status=500, body="{}", headers=("Retry-After: 0.001",))
        with serving(FakeServer(lambda number, body: refused)) as server:
            given = ["--url", server.url, "--concurrency", "1", "--requests", "2", "--warm-up", "0"]
            code, out, _ = run(capsys, "sweep", *given)
        assert code == 1
        assert "1 stream: 2 failed: 500 {}" in out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--vary", "x"], "--vary: expected PATH=VALUE"),
            (["--vary", "scheduler.policy=fair,none"], "scheduler.policy: no scheduling_policies"),
            (["--vary", "scheduler.policy=fair,fair"], "variants: 'fair' is given twice"),
            (["--url", "http://x", "--vary", "a=1"], "variants: expected no settings for a server"),
            (["--output", "no/x.json", "--url", "http://x"], "output: there is no folder 'no'"),
        ],
        ids=range(5),
    )
    def test_what_is_wrong_is_named(self, capsys, arguments, message):
        code, out, err = run(capsys, "sweep", *arguments)
        assert (code, out) == (2, "")
        assert re.search(f"error: {message}", err), err


class TestStartup:
    def test_the_table(self, capsys, monkeypatch):
        stages = ["interpreter", "engine", "to the first token"]
        values = {"median": 2.0, "low": 1.0, "high": 3.5}
        found = {
            "runs": 3,
            "seconds": dict.fromkeys(stages, values),
            "bytes": {"caller": {name: value * (1 << 20) for name, value in values.items()}},
        }
        records = [
            {"record": "progress", "run": 1, "of": 3, "caches": "cold"},
            {"record": "run", "caches": "cold", "seconds": {}, "bytes": {}},
            {
                "record": "result",
                "model": "x",
                "caches": {"cold": found, "warm": found},
                "interrupted": False,
            },
        ]
        monkeypatch.setattr("hardpoint.bench.measure_startup", lambda plan: iter(records))
        code, out, _ = run(capsys, "startup", "scripted")
        assert code == 0
        lines = [re.split(r"  +", line) for line in out.splitlines()]
        assert lines[0] == ["x: 3 cold, 3 warm starts; median, least and most"]
        assert lines[1] == ["STAGE", *["COLD", "LEAST", "MOST"], *["WARM", "LEAST", "MOST"]]
        assert lines[2] == ["interpreter, s", *["2.00", "1.00", "3.50"] * 2]
        assert lines[-1] == ["memory of the caller, MiB", *["2", "1", "4"] * 2]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["scripted", "--runs", "0"], "runs: expected a whole number"),
            (["scripted", "--caches", "hot"], "--caches: expected one of cold, warm, both"),
            (["scripted", "--set", "scheduler.policy=no"], "scheduler.policy: no scheduling_poli"),
        ],
        ids=range(3),
    )
    def test_what_is_wrong_is_named(self, capsys, arguments, message):
        code, out, err = run(capsys, "startup", *arguments)
        assert (code, out) == (2, "")
        assert re.search(f"error: {message}", err), err


def test_values_are_divided_by_commas_that_are_not_inside():
    assert split_values("fair,fcfs") == ["fair", "fcfs"]
    assert split_values('["a", "b"],[]') == ['["a", "b"]', "[]"]
    assert split_values('"a,b",{x = [1, 2], y = 3}') == ['"a,b"', "{x = [1, 2], y = 3}"]
    assert split_values("1") == ["1"]


@pytest.mark.nightly
def test_names_of_variants_have_what_differs():
    found = combinations({"a.b": ["1", "2"], "c": ["x"], "p": ["q", "r"]}, short=["p"])
    assert list(found) == ["a.b=1, q", "a.b=1, r", "a.b=2, q", "a.b=2, r"]
    assert found["a.b=1, q"] == {"a.b": "1", "c": "x", "p": "q"}
    assert combinations({}) == {"as configured": {}}
    with pytest.raises(ConfigError, match=r"^variants: 'c=1' is given twice"):
        combinations({"c": ["1", "1"]})
