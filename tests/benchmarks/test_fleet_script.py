"""benchmarks/fleet.py: its figures, their table and their plot."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree

import fleet
import pytest
from plots import draw_fleets

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def arguments():
    return argparse.Namespace(
        load="hot", rate=8.0, requests=60, blocks=1024, trace=None, bailian=False
    )


@pytest.mark.nightly
def test_table_and_plot(arguments, capsys):
    cases = [(name, size) for size in (1, 3) for name in fleet.BALANCERS]
    results = [fleet.run(arguments, *case) for case in cases]
    assert all(result["finished"] == 60 for result in results)
    json.dumps(results)
    fleet.show(results)
    shown = capsys.readouterr().out
    assert all(shown.count(name) == 2 for name in fleet.BALANCERS)
    root = ElementTree.fromstring(draw_fleets(results))
    lines = [line.get("points").split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2] * 4 * 3
    assert len({tuple(points) for points in lines}) > 4


def test_a_trace(arguments, tmp_path):
    arguments.trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    arguments.trace.write_text("".join(json.dumps(line) + "\n" for _ in range(4)))
    assert fleet.run(arguments, "least_cost", 2)["prompt_tokens"] == 2400


@pytest.mark.parametrize(("load", "tokens"), [("plain", 512), ("mooncake", 12_000)])
def test_the_loads_are_as_long_as_they_are_to_be(arguments, load, tokens):
    arguments.load, arguments.requests = load, 3000
    requests = list(fleet.requests_of(arguments, 4))
    mean = sum(request.prompt_length for request in requests) / len(requests)
    assert mean == pytest.approx(tokens, rel=0.1)
