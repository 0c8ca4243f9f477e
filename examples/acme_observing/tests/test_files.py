"""The files of an engine have its requests and its blocks."""

import csv
import json

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model


def test_an_engine_writes_both(tmp_path):
    table, events = tmp_path / "requests.csv", tmp_path / "events-{rank}.jsonl"
    config = {
        "kv_cache": {"block_size": 8},
        "stats": {"sinks": ["request_table", "json_lines"]},
        "kv_events": {"publishers": ["event_lines"]},
        "plugin": {
            "request_table": {"path": str(table)},
            "json_lines": {"path": str(tmp_path / "requests.jsonl")},
            "event_lines": {"path": str(events)},
        },
    }
    folder = write_scripted_model(tmp_path / "model")
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with LLM(config=scripted_config(folder, config)) as llm:
        llm.generate("twenty-four characters!!", params, tags={"tenant": "acme"})
    header, row = csv.reader(table.read_text().splitlines())
    assert header == ["tenant", "finish_reason", "prompt_tokens", "output_tokens", "seconds"]
    assert row[:4] == ["acme", "length", "24", "2"]
    assert float(row[4]) >= 0
    (request,) = map(json.loads, (tmp_path / "requests.jsonl").read_text().splitlines())
    assert request["finish_reason"] == "length"
    assert request["tags"] == {"tenant": "acme"}
    assert request["num_prompt_tokens"] == 24
    lines = [json.loads(line) for line in (tmp_path / "events-0.jsonl").read_text().splitlines()]
    stored = [event for _, batch, _ in lines for event in batch if event[0] == "BlockStored"]
    assert sum(len(event[1]) for event in stored) == 3  # of 8 tokens each
