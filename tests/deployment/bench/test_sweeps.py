"""Sweeps: a point that fails is a row, what was measured stays, and an interrupted one goes on."""

from __future__ import annotations

import json
import signal
import threading
from types import SimpleNamespace

import pytest
from support.fake_api_server import Answer, FakeServer, serving
from support.waiting import wait_until

from hardpoint.bench import server_process, sweep, sweeping
from hardpoint.bench.server_process import ServerStart, running_server
from hardpoint.plugins import ConfigError, HardpointError
from hardpoint.testing import ScriptedClock

LOAD = {"synthetic": {"prompt": {"median": 9}, "output": {"median": 4}}, "limit": 4}


def plan(server: FakeServer | None, *traffic: dict, **more) -> dict:
    traffic = traffic or ({"concurrency": 1}, {"concurrency": 2})
    found = {"plan": {"load": LOAD, "traffic": list(traffic)}, "variants": {"one": []}, **more}
    return found if server is None else {**found, "address": {"url": server.url}}


def points(records):
    return [(one["point"]["load"], one["kept"]) for one in records if one["record"] == "point"]


def test_points_are_kept_in_a_file(tmp_path):
    output = tmp_path / "sweep.json"
    with serving(FakeServer()) as server:
        first = list(sweep(plan(server), output=output))
        assert points(first) == [("1 stream", False), ("2 streams", False)]
        assert first[-1] == {"record": "end", "interrupted": False}
        asked = len(server.bodies)
        more = {"concurrency": 1}, {"concurrency": 2}, {"concurrency": 3}
        again = list(sweep(plan(server, *more), output=output, resume=True))
        assert points(again) == [("1 stream", True), ("2 streams", True), ("3 streams", False)]
        assert len(server.bodies) == asked + 3 + 4
        other = list(
            sweep(plan(server, {"concurrency": 1, "warm_up": 0}), output=output, resume=True)
        )
        assert points(other) == [("1 stream", False)]
    kept = json.loads(output.read_text())["points"]
    assert [point["load"] for point in kept] == ["1 stream", "2 streams", "3 streams"]
    assert [point["report"]["finished"] for point in kept] == [4, 4, 4]


def test_a_server_that_does_not_start_is_a_row(tmp_path, monkeypatch):
    def measure(server, plan):
        if "bad=1" in server.settings:
            raise HardpointError("the server ended before it was ready")
        return measured(address, plan)

    measured = sweeping.measure_server
    monkeypatch.setattr(sweeping, "measure_server", measure)
    output = tmp_path / "sweep.json"
    variants = {"good": [], "bad": ["bad=1"]}
    with serving(FakeServer()) as server:
        address = sweeping.ServerAddress(url=server.url)
        found = list(sweep(plan(None, variants=variants), output=output))
        assert points(found) == [("1 stream", False), ("2 streams", False)] * 2
        errors = [one["point"]["error"] for one in found if one["record"] == "point"]
        assert errors == ["", "", *["the server ended before it was ready"] * 2]
        again = list(sweep(plan(None, variants=variants), output=output, resume=True))
        kept = [kept for _, kept in points(again)]
        assert kept == [True, True, False, False]


def test_a_load_without_an_answer_is_measured_again(tmp_path):
    output = tmp_path / "sweep.json"
    refused = Answer(status=500, body="{}", headers=("Retry-After: 0.001",))
    with serving(FakeServer(lambda number, body: refused)) as server:
        (point, *_) = [
            one for one in sweep(plan(server), output=output) if one["record"] == "point"
        ]
        assert point["point"]["report"]["errors"] == {"500 {}": 4}
        server.choose = lambda number, body: Answer()
        again = list(sweep(plan(server), output=output, resume=True))
        assert [kept for _, kept in points(again)] == [False, False]


def test_an_interrupt_ends_the_sweep_and_its_point_is_measured_again(tmp_path):
    output = tmp_path / "sweep.json"

    def choose(number, body):
        if number == 3:
            threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        return Answer(first=3600.0 if number >= 3 else 0.0)

    with serving(FakeServer(choose)) as server:
        found = list(sweep(plan(server, {"concurrency": 1}), output=output))
        (point,) = [one["point"] for one in found if one["record"] == "point"]
        assert found[-1] == {"record": "end", "interrupted": True}
        assert (point["is_whole"], point["report"]["unfinished"]) == (False, 1)
        assert point["report"]["finished"] == 2
        server.choose = lambda number, body: Answer()
        again = list(sweep(plan(server, {"concurrency": 1}), output=output, resume=True))
    assert points(again) == [("1 stream", False)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected a file of `hardpoint bench sweep`, "),
        ("{}", "expected a file of `hardpoint bench sweep`: format: .*missing"),
        ('{"format": "other"}', "expected a file of .*format: expected .hardpoint sweep."),
    ],
    ids=range(3),
)
def test_files_that_are_no_sweep(tmp_path, content, message):
    output = tmp_path / "x.json"
    output.write_text(content)
    with pytest.raises(ConfigError, match=f"^output: '.*x.json'.*{message}"):
        list(sweep(plan(FakeServer(url="http://x")), output=output, resume=True))
    assert output.read_text() == content


def test_what_is_wrong_is_named(tmp_path):
    output = tmp_path / "sweep.json"
    with serving(FakeServer()) as server:
        list(sweep(plan(server, {"concurrency": 1}), output=output))
        with pytest.raises(ConfigError, match=r"^output: '.*' exists: resume goes on with it"):
            list(sweep(plan(server), output=output))
        other = plan(server)
        other["plan"]["load"] = {**LOAD, "synthetic": {"seed": 3}}
        message = r"was made with load.synthetic.prompt.median = 9, and not 512: name another file"
        with pytest.raises(ConfigError, match=message):
            list(sweep(other, output=output, resume=True))
    fake = FakeServer(url="http://x")
    with pytest.raises(ConfigError, match=r"^variants: expected at least one, got none"):
        list(sweep(plan(fake, variants={}), output=output))
    with pytest.raises(
        ConfigError, match=r"^variants: expected no settings for a server that runs"
    ):
        list(sweep(plan(fake, variants={"x": ["a=1"]}), output=output))
    with pytest.raises(ConfigError, match=r"^output: there is no folder '.*none'"):
        list(sweep(plan(fake), output=tmp_path / "none" / "x.json"))


@pytest.mark.nightly
def test_a_server_that_ends_early_is_reported_with_its_error(tmp_path, monkeypatch):
    program = tmp_path / "python"
    lines = ["#!/bin/sh", "echo 'a remark'", 'echo "hardpoint: error: no $6"', "exit 2"]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    start = ServerStart(model="m", config="c", settings=["a=1"])
    assert start.command("p")[1:] == [
        *["-m", "hardpoint", "serve", "--port", "0", "--model=m", "--config=c"],
        *["--set=server.access_log=off", "--set=a=1"],
    ]
    message = r"^the server ended before it was ready, with exit code 2: no --model=m$"
    with (
        pytest.raises(HardpointError, match=message),
        running_server(start, python=str(program)),
    ):
        pass
    wrote, clock = tmp_path / "wrote", ScriptedClock()
    program.write_text(f"#!/bin/sh\necho 'hello there'\ntouch {wrote}\nexec sleep 60")

    def sleep(seconds):
        wait_until(wrote.exists)
        clock.advance(1.0)

    clocks = SimpleNamespace(monotonic=clock, perf_counter=clock, sleep=sleep)
    monkeypatch.setattr(server_process, "time", clocks)
    slow = ServerStart(seconds=0.5)
    message = r"^the server is not ready after 0.5 s: hello there$"
    with pytest.raises(HardpointError, match=message), running_server(slow, python=str(program)):
        pass
