"""`hardpoint calibrate` and `hardpoint simulate`: files, variants, tables, pages, and errors."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest
from support.costs import made_up_cost

from hardpoint.cli import main
from hardpoint.plugins import StepCost
from hardpoint.simulation import read_cost

COST = made_up_cost(
    max_model_len=2048,
    num_blocks=256,
    step_cost=StepCost(step=5.0, single_query=0.1, prompt_token=0.05, is_trained=True),
)
SYNTHETIC = ["simulate", "synthetic", "--processes", "1"]
for setting in (
    "requests=80",
    "rate=40",
    "prompt.median=60",
    "prompt.sigma=0.8",
    "output.median=8",
):
    SYNTHETIC += ["--load", setting]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calibrated.json").write_bytes(msgspec.json.encode(COST))
    return tmp_path


def run(capsys, *arguments):
    """Return exit code, output and errors of a command line."""
    code = main([*arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


class TestSimulate:
    def test_policies_are_compared(self, capsys):
        code, out, err = run(capsys, *SYNTHETIC, "--policy", "fcfs", "--policy", "shortest_first")
        assert (code, err) == (0, "")
        lines = out.splitlines()
        assert [line.split()[:2] for line in lines[1:3]] == [
            ["fcfs", "80"],
            ["shortest_first", "80"],
        ]
        assert "compared with fcfs" in lines
        assert re.search(r"shortest_first +[+-]\d+\.\d %", out)

    def test_one_variant_is_not_compared(self, capsys):
        code, out, _ = run(capsys, *SYNTHETIC)
        assert code == 0
        assert out.splitlines()[1].startswith("as configured  80")
        assert "compared" not in out

    def test_json_has_all_figures(self, capsys):
        replicas = ["--replicas", "1", "--replicas", "3", "--balancer", "round_robin"]
        code, out, _ = run(capsys, *SYNTHETIC, *replicas, "--json", "--slo-ttft-ms", "7.5")
        assert code == 0
        found = json.loads(out)
        assert list(found["variants"]) == ["1 replicas", "3 replicas"]
        one, three = (each["report"] for each in found["variants"].values())
        assert (one["engines"], three["engines"], three["balancer"]) == (1, 3, "round_robin")
        assert one["objective"] == {"ttft": 0.0075, "tpot": 0.05}
        assert one["goodput_share"] < three["goodput_share"] < 1
        change = three["ttft"]["p50"] / one["ttft"]["p50"] - 1
        assert found["comparison"]["changes"]["3 replicas"]["ttft.p50"] == pytest.approx(change)

    def test_other_settings_vary(self, capsys):
        vary = [f"--vary=scheduler.max_num_seqs={count}" for count in (1, 8)]
        code, out, _ = run(capsys, *SYNTHETIC, *vary, "--policy", "fair", "--json")
        assert code == 0
        few, many = (each["report"] for each in json.loads(out)["variants"].values())
        assert few["ttft"]["p50"] > 2 * many["ttft"]["p50"]

    def test_the_configuration_is_the_base(self, capsys, folder):
        (folder / "hardpoint.toml").write_text(
            '[scheduler]\nmax_num_seqs = 1\npolicy = "shortest_first"\n'
            "[kv_cache]\nnum_blocks = 99\n"
        )
        _, out, _ = run(capsys, *SYNTHETIC, "--json")
        configured = json.loads(out)["variants"]["as configured"]["report"]
        _, out, _ = run(
            capsys, *SYNTHETIC, "--json", "--policy", "shortest_first", "--policy", "fcfs"
        )
        variants = json.loads(out)["variants"]
        assert variants["shortest_first"]["report"] == configured
        assert variants["fcfs"]["report"] != configured

    def test_options_of_a_policy_are_those_of_its_variant(self, capsys, folder):
        (folder / "hardpoint.toml").write_text("[plugin.fair]\noutput_cost = 5.0\n")
        code, out, _ = run(capsys, *SYNTHETIC, "--policy", "fcfs", "--policy", "fair")
        assert code == 0
        assert [line.split()[:2] for line in out.splitlines()[1:3]] == [
            ["fcfs", "80"],
            ["fair", "80"],
        ]

    @pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.nightly)])
    def test_a_policy_by_its_class(self, capsys, folder, monkeypatch, processes):
        (folder / "latest.py").write_text(
            "from hardpoint.plugins import SchedulingPolicy\n"
            "class Latest(SchedulingPolicy):\n"
            "    contract = 1\n"
            "    def key(self, request):\n"
            "        return -request.arrival_time\n"
        )
        monkeypatch.syspath_prepend(folder)
        policies = ["--policy", "fcfs", "--policy", "latest:Latest"]
        policies += ["--set", "scheduler.max_num_seqs=1"]
        code, out, err = run(capsys, *SYNTHETIC, *policies, "--json", "--processes", processes)
        assert (code, err) == (0, "")
        one, other = (each["report"]["ttft"] for each in json.loads(out)["variants"].values())
        assert one["p99"] < other["p99"]

    def test_a_trace(self, capsys, folder):
        line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
        lines = "".join(json.dumps({**line, "timestamp": 500 * n}) + "\n" for n in range(6))
        (folder / "trace.jsonl").write_text(lines)
        given = ["simulate", "trace.jsonl", "--json", "--requests", "5", "--speed", "2"]
        code, out, _ = run(capsys, *given)
        assert code == 0
        (found,) = json.loads(out)["variants"].values()
        assert found["report"]["prompt_tokens"] == 3000
        assert found["report"]["reuse"] > 0.7
        assert 1.0 < found["report"]["virtual_seconds"] < 1.2

    def test_tenants_and_conversations_have_tables(self, capsys):
        some = ["--load", "tenants=2", "--load", "turns=2", "--load", "think_seconds=0.5"]
        _, out, _ = run(capsys, *SYNTHETIC, *some)
        assert re.search(r"by tenant\nVARIANT.*\nas configured +t0 +\d+", out)
        assert re.search(r"by conversation\nVARIANT.*\nas configured +\d+", out)

    def test_requests_that_are_refused_are_reported(self, capsys):
        _, out, _ = run(capsys, *SYNTHETIC, "--set", "max_model_len=64")
        assert re.search(r"as configured: \d+ requests were refused: .*64", out)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["simulate", "none.jsonl"], "none.jsonl: the trace cannot be read: No such file"),
            (
                [*SYNTHETIC, "--load", "rat=3"],
                "load.synthetic.rat: unknown field .did you mean 'rate'",
            ),
            ([*SYNTHETIC, "--load", "rate=0"], "load.synthetic.rate: expected a number > 0, got 0"),
            ([*SYNTHETIC, "--load", "prompt=3"], "--load prompt.*|load.synthetic.prompt: expected"),
            (
                [*SYNTHETIC, "--policy", "nope"],
                "scheduler.policy: no scheduling_policies component is called 'nope'.*"
                "from argument --set scheduler.policy",
            ),
            ([*SYNTHETIC, "--balancer", "nope"], "parallel.balancer: no balancers component"),
            ([*SYNTHETIC, "--replicas", "0"], "parallel.data: expected a whole number >= 1, got 0"),
            ([*SYNTHETIC, "--policy=fair", "--policy=fair"], "variants: 'fair' is given twice"),
            ([*SYNTHETIC, "--vary", "x"], "--vary: expected PATH=VALUE"),
            (
                [*SYNTHETIC, "--cost", "none.json"],
                "none.json: there is no such file; `hardpoint cali",
            ),
            ([*SYNTHETIC, "--slo-ttft-ms", "0"], "--slo-ttft-ms: expected a number > 0, got 0"),
            (
                [*SYNTHETIC, "--html", "no/such/page.html"],
                "--html: 'no/such/page.html' cannot be wri",
            ),
            (["simulate", "x", "--load", "rate=3"], "--load: expected synthetic as TRACE, got 'x'"),
            ([*SYNTHETIC, "--form=guidellm"], "--form: expected a file as TRACE, got 'guidellm'"),
            ([*SYNTHETIC, "--hash-tokens=9"], "--hash-tokens: expected a file as TRACE, got 9"),
        ],
        ids=range(15),
    )
    def test_what_is_wrong_is_named(self, capsys, arguments, message):
        code, _, err = run(capsys, *arguments)
        assert code == 2
        assert re.search(message, err), err

    def test_a_wrong_line_of_a_trace_is_named(self, capsys, folder):
        (folder / "trace.jsonl").write_text(
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n'
            '{"timestamp": 0, "input_length": 9, "output_length": "x", "hash_ids": [1]}\n'
        )
        code, _, err = run(capsys, "simulate", "trace.jsonl")
        assert code == 2
        assert "trace.jsonl:2: output_length: expected a whole number from 1" in err


class TestPage:
    def test_it_needs_nothing_else(self, capsys, folder):
        policies = ["--policy", "fcfs", "--policy", "fair", "--load", "tenants=2"]
        code, _, _ = run(capsys, *SYNTHETIC, *policies, "--html", "page.html")
        assert code == 0
        text = (folder / "page.html").read_text()
        assert not re.search(r"https?:|src=|<script|url\(|@import", text)
        assert text.count("<figure>") == 5
        for plot in re.findall(r"<svg.*?</svg>", text):
            assert len(ElementTree.fromstring(plot).findall("polyline")) == 2
        assert "<h2>Compared with fcfs</h2>" in text
        assert "prefers-color-scheme: dark" in text

    def test_names_are_text(self, capsys, folder):
        run(capsys, *SYNTHETIC, "--html", "page.html", "--cost", "calibrated.json")
        text = (folder / "page.html").read_text()
        assert "as configured" in text
        from hardpoint.builtin_plugins.commands.loads.plots import Series, line_plot

        plot = line_plot([Series("<b>&", [(1, 2), (3, 4)])], x_label="<x>", y_label="y")
        assert "&lt;b&gt;&amp;" in plot
        assert "<x>" not in plot

    def test_without_any_finished_request(self, capsys, folder):
        code, _, _ = run(capsys, *SYNTHETIC, "--set", "max_model_len=2", "--html", "page.html")
        assert code == 0
        text = (folder / "page.html").read_text()
        assert text.count("No requests to show.") == 5
        assert "80 requests were refused" in text


class TestCalibrate:
    def test_a_model_is_measured(self, capsys, folder):
        small = ["--set", "scheduler.max_num_seqs=2", "--set", "max_model_len=96"]
        given = ["calibrate", "scripted", "--output", "cost.json", "--seconds", "0.1", *small]
        code, out, _ = run(capsys, *given)
        assert code == 0
        cost = read_cost("cost.json")
        assert (cost.model, cost.max_model_len, cost.block_size) == ("scripted", 96, 16)
        assert cost.tokens[0][0] == 1
        assert cost.residuals["decode"].steps > 10
        assert cost.residuals["prompts"].steps > 1
        assert re.match(r"cost.json: scripted on .*\n  \d+ steps of one token per request", out)
        code, out, _ = run(capsys, *SYNTHETIC, "--cost", "cost.json", "--json", "--load=requests=9")
        assert code == 0
        assert json.loads(out)["variants"]["as configured"]["report"]["requests"] == 9

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--output", "no/such/cost.json"], "--output: there is no folder 'no/such'"),
            (["--seconds", "0"], "seconds: expected a number > 0 and <= 86400, got 0"),
            (["--set", "parallel.data=2"], "parallel.data: expected 1, which alone is measured"),
            (["--set", 'speculation.use=["ngram"]'], "speculation.use: expected .., which alone"),
        ],
        ids=range(4),
    )
    def test_what_is_wrong_is_named(self, capsys, arguments, message):
        code, _, err = run(capsys, "calibrate", "scripted", *arguments)
        assert code == 2
        assert re.search(message, err), err
