"""Uses of a journal: stop early, show a request, force tokens, plan again, export."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from concurrent.futures import Future

import msgspec
import pytest
from support.journal.files import of_other_torch, records_of, with_header, write_records
from support.journal.schedules import record

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.cli import main
from hardpoint.errors import EngineDeadError, PluginFaultError, RequestError
from hardpoint.journal.frames import JournalError, JournalReader
from hardpoint.journal.playing import Player
from hardpoint.journal.records import Event, Failure, JournalHeader, Keyframe, Result
from hardpoint.journal.replay import JournalFile, replay
from hardpoint.journal.writer import RingWriter
from hardpoint.plugins import ModelRunnerOutput, Options, SchedulerOutput, StatSink
from hardpoint.simulation import read_mooncake, read_trace
from hardpoint.simulation.traces import TraceError
from hardpoint.testing import scripted_config, write_scripted_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_until_stops_before_a_step(journal):
    report = JournalFile(journal).replay(until=12)
    assert report.is_same
    assert report.steps == 12
    assert report.notes == ["stopped before step 13"]


def test_the_history_of_a_request(tmp_path, scripted):
    config = scripted_config(scripted, {"engine": {"journal": str(tmp_path / "journal")}})
    with LLM(config=config) as llm:
        (output,) = llm.generate([[7] * 20], GREEDY)
    lines = list(JournalFile(tmp_path / "journal").request(output.request_id))
    assert "arrives, 20 tokens of prompt, max_tokens 12, temperature 0" in lines[0]
    assert "begins to run, 0 tokens need no computing, blocks [" in lines[1]
    assert "20 tokens are scheduled" in lines[2]
    tokens = output.outputs[0].token_ids
    assert f"output 0 is {tokens[0]}" in lines[3]
    assert f"output 11 is {tokens[-1]}" in lines[-2]
    assert lines[-1].endswith("ends: length")
    with pytest.raises(JournalError, match=r"no request has the id 'none'; it has \S+ \(length\)$"):
        list(JournalFile(tmp_path / "journal").request("none"))


def test_a_history_from_a_keyframe_on_has_the_same_outputs(tmp_path, scripted, monkeypatch):
    monkeypatch.setattr(RingWriter, "is_due", True)  # a keyframe after each event
    path, part = tmp_path / "journal", tmp_path / "part"
    tables = {"engine": {"journal": str(path), "journal_ring": True}}
    with LLM(config=scripted_config(scripted, tables)) as llm:
        (output,) = llm.generate([[7] * 20], GREEDY)
    outputs = [f"output {n} is {token}" for n, token in enumerate(output.outputs[0].token_ids)]
    lengths = {
        place: len(record.live[0].output_token_ids)
        for place, record in enumerate(records_of(path))
        if isinstance(record, Keyframe) and record.live
    }
    assert {0, 11} <= set(lengths.values())
    for place, length in lengths.items():
        header, *records = records_of(path)
        write_records(part, [header, *records[place - 1 :]])
        lines = JournalFile(part).request(output.request_id)
        shown = [line.partition(": ")[2] for line in lines if ": output" in line]
        assert shown == outputs[length:]


def test_an_unknown_id_lists_failed_requests_first(tmp_path, scripted):
    config = scripted_config(scripted, {"engine": {"journal": str(tmp_path / "journal")}})
    with LLM(config=config) as llm:
        outputs = llm.generate(["a"] * 21, GREEDY)
        (failed,) = llm.generate(["a"], SamplingParams(structured={"regex": "[^\\s\\S]"}))
    assert outputs[0].outputs[0].finish_reason == "length"
    assert failed.outputs[0].finish_reason == "error"
    expected = rf"it has {failed.request_id}\S* \(error\), .*\(length\) and 2 more$"
    with pytest.raises(JournalError, match=expected):
        list(JournalFile(tmp_path / "journal").request("none"))


def test_another_build_is_refused_by_name(journal):
    with_header(journal, of_other_torch)
    expected = r"recorded by something else: torch: '1\.0', here '.*'\. Its tokens may .* --anyway"
    with pytest.raises(JournalError, match=expected):
        replay(journal)
    report = replay(journal, anyway=True)
    assert report.is_same
    assert report.tokens > 100
    assert report.notes[0].startswith("torch: '1.0', here ")


def test_another_plugin_is_refused_by_name(journal):
    def changed(header: JournalHeader) -> JournalHeader:
        entries = [
            msgspec.structs.replace(entry, version="0.0.1") if entry.name == "top_k" else entry
            for entry in header.manifest.entries
        ]
        manifest = msgspec.structs.replace(header.manifest, entries=tuple(entries))
        return msgspec.structs.replace(header, manifest=manifest)

    with_header(journal, changed)
    with pytest.raises(
        JournalError, match=r"plugin 'top_k' \(logits_processors\): \S+ 0\.0\.1, here"
    ):
        replay(journal)


@pytest.fixture
def other_model(tmp_path):
    """The journal of a model that another one replaced, with the first differing token."""
    folder = write_scripted_model(tmp_path / "model")
    config = scripted_config(folder, {"engine": {"journal": str(tmp_path / "journal")}})
    with LLM(config=config) as llm:
        outputs = llm.generate([[7] * 20, [8] * 20, [9] * 40], GREEDY)
    write_scripted_model(folder, seed=3)
    return tmp_path / "journal", [output.outputs[0].token_ids for output in outputs]


def test_another_model_is_refused_and_its_tokens_forced(other_model):
    journal, tokens = other_model
    with pytest.raises(JournalError, match="the model's files have the fingerprint .*, here"):
        replay(journal)
    report = replay(journal, anyway=True)
    assert report.num_differing == 3
    assert report.difference is not None
    assert report.difference.what == "output 0"
    assert report.difference.recorded in {str(ids[0]) for ids in tokens}
    assert report.tokens == 36  # after each other one, the request went on with the journal's


def test_a_difference_names_step_request_and_both(tmp_path, scripted):
    """A token that was recorded is changed, as if the engine had sampled another one."""
    record(range(3, 4), scripted, tmp_path / "journal")
    records = records_of(tmp_path / "journal")
    for event in records:
        if isinstance(event, Event) and event.results and event.results[0].step >= 8:
            tokens = event.results[0].tokens
            if tokens:
                break
    assert isinstance(tokens, dict)
    name = next(iter(tokens))
    true, tokens[name] = list(tokens[name]), [5, 5]
    expected = event.results[0].step, name, "[5, 5]", str(true)
    write_records(tmp_path / "journal", records)
    report = replay(tmp_path / "journal")
    difference = report.difference
    assert difference is not None
    assert (difference.step, difference.request_id, difference.recorded, difference.own) == expected
    assert f"request {name!r}: tokens" in str(report.difference)


@pytest.mark.parametrize(("distribution", "number"), [("hardpoint", 0), ("acme", 2)])
def test_a_built_in_may_have_moved_to_another_module(tmp_path, scripted, distribution, number):
    path = tmp_path / "journal"
    with LLM(config=scripted_config(scripted, {"engine": {"journal": str(path)}})) as llm:
        llm.generate([[7] * 20], GREEDY)

    def of_earlier_modules(header):
        entries = [
            msgspec.structs.replace(
                entry, value="hardpoint.earlier:Name", distribution=distribution
            )
            if (entry.kind, entry.name) == ("samplers", "default")
            else entry
            for entry in header.manifest.entries
        ]
        manifest = msgspec.structs.replace(header.manifest, entries=tuple(entries))
        return msgspec.structs.replace(header, manifest=manifest)

    with_header(path, of_earlier_modules)
    report = replay(path, anyway=True)
    assert report.difference is None
    assert sum("plugin 'default' (samplers)" in note for note in report.notes) == number


def test_planned_again_with_its_own_policy_nothing_differs(tmp_path, scripted):
    config = scripted_config(scripted, {"engine": {"journal": str(tmp_path / "journal")}})
    with LLM(config=config) as llm:
        llm.generate([[7] * 20, [8] * 60], GREEDY)
    report = JournalFile(tmp_path / "journal").replan("fcfs")
    assert report.is_same
    assert report.tokens == 24


def test_planned_again_with_another_policy(tmp_path, scripted):
    config = scripted_config(
        scripted,
        {
            "engine": {"journal": str(tmp_path / "journal")},
            "scheduler": {"max_num_seqs": 1},
        },
    )
    with LLM(config=config) as llm:
        llm.generate([[7] * 60, [8] * 5], [GREEDY, SamplingParams(max_tokens=2, ignore_eos=True)])
    report = JournalFile(tmp_path / "journal").replan("shortest_first")
    difference = report.difference
    assert difference is not None
    assert difference.step == 1
    assert difference.request_id is not None
    assert difference.request_id.startswith("0-")
    assert difference.recorded.startswith("60 tokens of the plan")
    assert difference.own.startswith("no tokens of the plan")
    assert "shortest_first: others are before it: " in difference.why
    assert difference.why.endswith("as recorded: it runs, 1 run and 1 wait")


class Noting(StatSink):
    contract = 1

    class Options(Options):
        by: int = 0

    def record(self, stats):
        assert self.options.by == 3


def test_options_of_what_a_replay_does_without(tmp_path, scripted):
    """A sink, and a policy that it is planned again without."""
    path = tmp_path / "journal"
    tables = {
        "engine": {"journal": str(path)},
        "scheduler": {"policy": "fair"},
        "stats": {"sinks": [f"{__name__}:Noting"], "interval_seconds": 0.05},
        "plugin": {"noting": {"by": 3}, "fair": {"output_cost": 4.0}},
        "plugins": {"on_error": {"noting": "engine"}},
    }
    with LLM(config=scripted_config(scripted, tables)) as llm:
        llm.generate([[7] * 20, [8] * 60], GREEDY)
    assert replay(path).is_same
    assert JournalFile(path).replan("fcfs").is_same


def test_an_export_has_nothing_of_what_was_written(journal, recorded):
    lines = list(JournalFile(journal).export("redacted"))
    records = [json.loads(line) for line in lines]
    assert len(records) > 20
    assert {"timestamp", "input_length", "output_length", "hash_ids", "finish_reason"} <= set(
        records[0]
    )
    numbers = {number for line in records for number in line["hash_ids"]}
    assert numbers == set(range(len(numbers)))  # no hash is shown
    assert not any(
        isinstance(value, str) and len(value) > 12 for line in records for value in line.values()
    )
    ends = {line["finish_reason"] for line in records}
    assert {"length", "abort"} <= ends
    assert {type(line["request"]) for line in records} == {int}


def test_an_export_of_mooncakes_form_is_read_by_simulations(journal, tmp_path):
    lines = list(JournalFile(journal).export("mooncake"))
    (tmp_path / "trace").write_text("\n".join(lines))
    requests = read_mooncake(tmp_path / "trace")
    records = [json.loads(line) for line in lines]
    assert len(requests) == len(records)
    for request, line in zip(
        requests, sorted(records, key=lambda line: line["timestamp"]), strict=True
    ):
        assert sum(segment.length for segment in request.prompt) == line["input_length"]
        assert request.output.length == line["output_length"]


def test_shared_prefixes_share_numbers(tmp_path, scripted):
    extra = {"engine": {"journal": str(tmp_path / "journal")}, "kv_cache": {"block_size": 8}}
    with LLM(config=scripted_config(scripted, extra)) as llm:
        llm.generate([[7] * 20, [7] * 16 + [1] * 4, [1] + [7] * 19], GREEDY)
    records = [json.loads(line) for line in JournalFile(tmp_path / "journal").export("redacted")]
    assert [line["hash_ids"] for line in records] == [[0, 1, 2], [0, 1, 3], [4, 5, 6]]


class LateChange(threading.Thread):
    """A thread with a late prepare: a commit that does not wait for it fails."""

    def run(self):
        if self.name == "hardpoint-change":
            time.sleep(0.3)
        super().run()


def test_a_ring_begins_at_a_keyframe(tmp_path, scripted, monkeypatch):
    path = tmp_path / "journal"
    record(range(10, 16), scripted, path, journal_ring=True, journal_bytes=1 << 16)
    records = list(JournalReader(path).records())
    assert isinstance(records[1], Keyframe)
    assert records[-1].num_events > len(records)
    monkeypatch.setattr(threading, "Thread", LateChange)
    report = replay(path)
    assert report.difference is None, str(report.difference)
    assert report.tokens > 100
    assert report.notes == ["it begins at a keyframe: plans are not compared"]


def test_a_whole_journal_ends_at_its_limit(tmp_path, scripted, caplog):
    path = tmp_path / "journal"
    record(range(10, 16), scripted, path, journal_bytes=1 << 16)
    assert os.path.getsize(path) < (1 << 16) + 200
    *_, end = JournalReader(path).records()
    assert end.reason == "it has reached engine.journal_bytes (65536)"
    assert "ends here: it has reached engine.journal_bytes" in caplog.text
    assert replay(path).is_same


@pytest.mark.parametrize("ring", [False, True], ids=["whole", "ring"])
def test_a_failed_step_is_in_the_file(tmp_path, scripted, ring):
    """The last event has the error, and a replay meets it, too."""
    path = tmp_path / "journal"
    config = scripted_config(
        scripted,
        {
            "engine": {"journal": str(path), "journal_ring": ring},
            "executor": {"use": "support.plugins.returning:NoFuture"},
        },
    )
    llm = LLM(config=config)
    with pytest.raises((EngineDeadError, PluginFaultError)):
        llm.generate([[7] * 20], GREEDY)
    events = [record for record in JournalReader(path).records() if isinstance(record, Event)]
    failures = [event.failure for event in events if event.failure is not None]
    assert failures
    assert "execute_model" in failures[0].text
    report = replay(path)
    assert report.is_same, str(report.difference)
    llm.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_step_that_fails_after_the_forward_pass_recurs(tmp_path, scripted, asynchronous):
    path = tmp_path / "journal"
    config = scripted_config(
        scripted,
        {
            "engine": {"journal": str(path), "in_process": True},
            "executor": {"use": "support.plugins.returning:FailingSample"},
            "scheduler": {"asynchronous": asynchronous},
        },
    )
    with contextlib.closing(LLM(config=config)) as llm, pytest.raises(EngineDeadError):
        llm.generate([[7] * 56], GREEDY)
    *_, event = [record for record in JournalReader(path).records() if isinstance(record, Event)]
    assert [failure.kind for failure in event.raised] == ["RuntimeError"]
    report = replay(path)
    assert report.is_same, str(report.difference)


@pytest.mark.parametrize(
    ("replayed", "what", "shown"),
    [
        ([None, [1], RuntimeError("no")], None, None),
        ([None, [1], ValueError("no")], "failure", "no"),
        ([None, [1], None, [2]], "failure", "a result"),
        ([None, [1], None], "failure", "nothing"),
        ([RuntimeError("no")], "result", "nothing"),
    ],
)
def test_a_failure_is_compared_with_what_it_was_recorded_for(replayed, what, shown):
    """In one event, as of `flush`, a good result comes before the failure."""
    player = Player()
    results, raised = [Result(7, {"a": [1]})], [Failure("RuntimeError", "RuntimeError: no")]
    player.begin(3, Event("flush", results=results, raised=raised))
    for value in replayed:
        future = Future()
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value and ModelRunnerOutput(sampled_token_ids={"a": value}))
        with contextlib.suppress(RuntimeError, ValueError):
            player.result(SchedulerOutput(step=7), future.result)
    player.end()
    difference = player.difference
    assert (difference and difference.what, difference and difference.own) == (what, shown)


def test_an_earlier_journal_is_kept_once(tmp_path, scripted):
    config = scripted_config(scripted, {"engine": {"journal": str(tmp_path / "journal")}})
    sizes = []
    for count in (1, 2):
        with LLM(config=config) as llm:
            llm.generate([[7] * 20] * count, GREEDY)
        sizes.append((tmp_path / "journal").stat().st_size)
    assert (tmp_path / "journal.previous").stat().st_size == sizes[0] != sizes[1]


def test_a_journal_that_cannot_be_created(tmp_path, scripted):
    path = tmp_path / "none" / "journal"
    config = scripted_config(scripted, {"engine": {"journal": str(path)}})
    with pytest.raises(
        JournalError, match=r"engine\.journal: '.*' cannot be created: .*No such file"
    ):
        LLM(config=config)


def test_a_request_with_a_callable_is_refused(tmp_path, scripted):
    path = tmp_path / "journal"
    engine = {"engine": {"journal": str(path), "in_process": True}}
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(config=scripted_config(scripted, engine)) as llm:
        with_callable = SamplingParams(
            max_tokens=4, logits_processors=[lambda _ids, logits: logits]
        )
        message = "engine.journal cannot record it: .* a builtins.function cannot"
        for prompts in (["a"], ["a", "b"]):
            place = r"prompts\[1\]: " if len(prompts) > 1 else ""
            match = f"^{place}request '.*': {message}"
            with pytest.raises(RequestError, match=match):
                llm.generate(prompts, [params, with_callable][-len(prompts) :])
        llm.generate("a", params)
    assert replay(path).tokens == 4


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"expert": True}, "share experts"),
        ({"local": 1, "join_address": "tcp://127.0.0.1:0"}, "join from elsewhere"),
        ({"ray": {}}, r"run on Ray \(parallel.ray\)"),
    ],
)
def test_engines_that_follow_others_have_no_journal(tmp_path, scripted, parallel, why):
    journal = {"engine": {"journal": str(tmp_path / "journal")}}
    config = scripted_config(scripted, journal | {"parallel": {"data": 2, **parallel}})
    expected = rf"engine\.journal: expected none, because engines that {why} .* got '.*journal'"
    with pytest.raises(ConfigError, match=expected):
        LLM(config=config)


def test_the_program(journal, tmp_path, capsys):
    assert main(["replay", str(journal)]) == 0
    assert capsys.readouterr().out.startswith("the same: ")
    assert main(["replay", str(journal), "--json", "--until", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert main(["replay", str(journal), "--request", "r1"]) == 0
    assert "arrives, " in capsys.readouterr().out
    assert main(["replay", str(journal), "--replan", "policy=priority"]) in (0, 1)
    assert main(["replay", str(journal), "--replan", "priority"]) == 2
    assert "--replan: expected policy=NAME, got 'priority'" in capsys.readouterr().err
    assert main(["journal", "export", str(journal), str(tmp_path / "trace")]) == 0
    assert len((tmp_path / "trace").read_text().splitlines()) > 20
    assert main(["journal", "export", str(journal), str(tmp_path / "trace")]) == 2
    assert "OUTPUT: " in capsys.readouterr().err
    with_header(journal, of_other_torch)
    assert main(["replay", str(journal)]) == 2
    assert "torch: '1.0', here" in capsys.readouterr().err
    assert main(["replay", str(journal), "--anyway"]) == 0


def test_a_journal_is_a_trace_for_simulations(journal):
    requests = read_trace(journal)
    exported = list(JournalFile(journal).export("mooncake"))
    assert len(requests) == len(exported) > 10
    assert {r.output.length for r in requests} == {json.loads(x)["output_length"] for x in exported}
    with journal.open("r+b") as file:
        file.seek(200)
        file.write(b"damaged")
    with pytest.raises(TraceError, match="offset"):
        read_trace(journal)
