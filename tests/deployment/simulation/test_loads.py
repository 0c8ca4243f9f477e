"""Traces of others, synthetic load, and the tokens that stand for texts."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest

from hardpoint.core.kv_cache import BlockHashes
from hardpoint.plugins import ConfigError
from hardpoint.simulation import (
    Lengths,
    Segment,
    SyntheticLoad,
    TraceError,
    read_bailian,
    read_guidellm,
    read_mooncake,
    read_trace,
    sped_up,
)
from hardpoint.simulation.workload import cut, tokens_of


@pytest.fixture
def write(tmp_path):
    def lines(*rows):
        file = tmp_path / "trace.jsonl"
        texts = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        file.write_text("\n".join(texts) + "\n")
        return file

    return lines


def mooncake(timestamp=0, length=1000, output=10, ids=(0, 1), **others):
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output,
        "hash_ids": list(ids),
        **others,
    }


def bailian(chat, timestamp, length, output=10, parent=-1, **others):
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output,
        **others,
    }


def shared(request, other):
    """Return how many leading tokens two prompts have in common."""
    pairs = zip(tokens_of(request.prompt), tokens_of(other.prompt), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


class TestTokens:
    def test_a_text_is_its_number_and_zeros(self):
        assert tokens_of([Segment(7, 3), Segment(0, 1), Segment(2**32 - 2, 2)]) == [
            8, 0, 0, 1, 2**32 - 1, 0,
        ]  # fmt: skip

    def test_block_hashes_tell_all_texts_apart(self):
        hashes = BlockHashes(4)

        def of(*segments):
            request = SyntheticLoad().generate()
            source = next(request).for_engine("a")
            source.prompt_token_ids = tokens_of(segments)
            return hashes.of_prompt(source)

        first, second = of(Segment(1, 8), Segment(2, 8)), of(Segment(1, 8), Segment(3, 8))
        assert len({*first, *second}) == 6
        assert first[:2] == second[:2]

    @pytest.mark.parametrize("number", [-1, 2**32 - 1])
    def test_numbers_that_no_token_can_have(self, number):
        with pytest.raises(ValueError, match=f"expected 0 to 4294967294, got {number}"):
            tokens_of([Segment(number, 1)])

    def test_cut(self):
        texts = (Segment(1, 4), Segment(2, 4))
        assert cut(texts, 6) == (Segment(1, 4), Segment(2, 2))
        assert cut(texts, 4) == (Segment(1, 4),)
        assert cut(texts, 0) == ()
        assert cut(texts, 9) == texts

    def test_faster(self):
        requests = list(SyntheticLoad(requests=3).generate())
        assert [request.at for request in sped_up(requests, 2)] == [
            request.at / 2 for request in requests
        ]
        with pytest.raises(ValueError, match="factor: expected a number > 0, got 0"):
            next(sped_up(requests, 0))


class TestMooncake:
    def test_lengths_times_and_what_is_shared(self, write):
        file = write(mooncake(), mooncake(3000, 1500, 20, (0, 5, 6), type="chat"), "")
        first, second = read_mooncake(file)
        assert [request.is_last for request in (first, second)] == [False, False]
        assert (first.at, first.prompt_length, first.output.length) == (0.0, 1000, 10)
        assert (second.at, second.prompt_length, second.output.length) == (3.0, 1500, 20)
        assert shared(first, second) == 512
        assert first.session is None

    def test_a_last_block_without_a_number_is_ones_own(self, write):
        first, second = read_mooncake(write(mooncake(ids=[3]), mooncake(ids=[3])))
        assert first.prompt_length == 1000
        assert shared(first, second) == 512

    def test_equal_prompts_are_equal(self, write):
        first, second = read_mooncake(write(mooncake(), mooncake()))
        assert first.prompt == second.prompt
        assert first.output.id != second.output.id

    def test_times_count_from_the_first_request(self, write):
        file = write(mooncake(3_602_000), mooncake(3_600_000, output=1), mooncake(3_600_000))
        assert [(request.at, request.output.length) for request in read_mooncake(file)] == [
            (0.0, 1),
            (0.0, 10),
            (2.0, 10),
        ]

    def test_other_blocks(self, write):
        (request,) = read_mooncake(write(mooncake(length=40, ids=(1, 2, 3))), block_size=16)
        assert [segment.length for segment in request.prompt] == [16, 16, 8]

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            (mooncake(-1), "timestamp: expected a number >= 0, got -1"),
            (mooncake(length=0), "input_length: expected a whole number >= 1, got 0"),
            (
                mooncake(output="x"),
                "output_length: expected a whole number from 1 to 100000000, got 'x'",
            ),
            (mooncake(ids=[0, -4]), r"hash_ids\[1\]: expected a whole number >= 0, got -4"),
            (mooncake(ids=[0, 2**31]), r"hash_ids\[1\]: expected a whole number <= 2147483647"),
            (mooncake(ids=[]), "hash_ids: expected 1 or 2 for input_length 1000 in blocks of 512"),
            (mooncake(ids=[0, 1, 2]), "hash_ids: expected 1 or 2 .* got 3"),
            (mooncake(length=1024, ids=[0]), "hash_ids: expected 2 for input_length 1024"),
            ({"timestamp": 0}, "input_length: "),
            ([1], r"expected a JSON object, got \[1\]"),
            ("{", "expected a JSON object, "),
            ('{"timestamp": NaN}', "expected a JSON object, "),
            ("[" * 5000, "expected a JSON object, "),
        ],
    )
    def test_lines_that_are_wrong(self, write, row, message):
        file = write(mooncake(), "", row)
        with pytest.raises(TraceError, match=f"trace.jsonl:3: {message}"):
            read_mooncake(file)

    def test_the_form_of_a_file_that_nests_deeply_is_not_known(self, write):
        with pytest.raises(TraceError, match="its form is not known"):
            read_trace(write("[" * 5000))

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="none.jsonl"):
            read_mooncake(tmp_path / "none.jsonl")


class TestBailian:
    def test_a_turn_begins_with_the_one_before_and_its_answer(self, write):
        file = write(bailian(5, 1.5, 100), bailian(6, 9.0, 150, 7, parent=5), bailian(7, 2.0, 100))
        first, other, second = read_bailian(file)
        assert [request.at for request in (first, other, second)] == [0.0, 0.5, 7.5]
        assert [request.is_last for request in (first, other, second)] == [False, True, True]
        assert [request.prompt_length for request in (first, other, second)] == [100, 100, 150]
        assert second.prompt[:2] == (*first.prompt, first.output)
        assert shared(first, other) == 0
        assert [request.session for request in (first, other, second)] == ["5", "7", "5"]

    def test_a_shorter_turn_has_the_beginning(self, write):
        first, second = read_bailian(write(bailian(5, 1, 100), bailian(6, 2, 60, parent=5)))
        assert second.prompt_length == 60
        assert shared(first, second) == 59

    def test_equal_numbers_are_shared_blocks(self, write):
        rows = bailian(5, 1, 40, hash_ids=[8, 9, 10]), bailian(6, 2, 48, hash_ids=[8, 9, 11])
        first, second = read_bailian(write(*rows))
        assert shared(first, second) == 32

    def test_a_parent_that_is_not_there_begins_a_conversation(self, write):
        (request,) = read_bailian(write(bailian(6, 2, 60, parent=5)))
        assert (request.session, request.prompt_length) == ("6", 60)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            (bailian(1, 2, 60), "chat_id: 1 is the id of an earlier line"),
            (bailian("x", 2, 60), "chat_id: expected a whole number"),
            (bailian(2, 2, 60, hash_ids=[1]), "hash_ids: expected 3 or 4 for input_length 60"),
        ],
    )
    def test_lines_that_are_wrong(self, write, row, message):
        with pytest.raises(TraceError, match=f"trace.jsonl:2: {message}"):
            read_bailian(write(bailian(1, 1, 10), row))


def guidellm(start, prompt, output, conversation=None, turn=0):
    """Return a request as guidellm 0.8.1 writes it, without most of the fields."""
    return {
        "type_": "generative_request_stats",
        "request_id": f"{start}",
        "info": {"conversation_id": conversation, "turn_index": turn, "status": "completed"},
        "input_metrics": {"text_tokens": prompt, "total_tokens": prompt},
        "request_start_time": start,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "time_to_first_token_ms": 12.5,
    }


def report(*requests, **groups):
    benchmark = {"config": {}, "requests": {"successful": list(requests), "errored": [], **groups}}
    return {"metadata": {"version": 2}, "benchmarks": [benchmark]}


class TestGuidellm:
    def test_times_count_from_the_first_request(self, tmp_path):
        file = tmp_path / "benchmarks.json"
        failed = guidellm(1790000000.0, 5, 5)
        content = report(
            guidellm(1790000002.5, 100, 7), guidellm(1790000001.0, 50, 3), errored=[failed]
        )
        file.write_text(json.dumps(content, indent=2))
        for requests in (read_guidellm(file), read_trace(file)):
            assert [request.at for request in requests] == [0.0, 1.5]
            assert [request.prompt_length for request in requests] == [50, 100]
            assert [request.output.length for request in requests] == [3, 7]
            assert [request.session for request in requests] == [None, None]

    def test_a_turn_begins_with_the_one_before_and_its_answer(self, tmp_path):
        file = tmp_path / "benchmarks.json"
        turns = [guidellm(10.0, 40, 8, "c", 0), guidellm(12.0, 60, 8, "c", 1)]
        file.write_text(json.dumps(report(*turns, guidellm(11.0, 60, 8, "d", 0))))
        first, other, second = read_guidellm(file)
        assert shared(first, second) == 40
        assert second.prompt[1] == first.output
        assert shared(first, other) == 0
        assert (first.session, other.session, second.session) == ("c", "d", "c")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[1]", r"benchmarks: expected a list, got None"),
            ('{"benchmarks": 3}', "benchmarks: expected a list, got 3"),
            ('{"benchmarks": [{}]}', r"benchmarks\[0\].requests.successful: expected a list"),
            ("{", "expected a JSON object"),
            ("[" * 5000, "expected a JSON object"),
            ('{"benchmarks": "\udcff"}', "expected a JSON object"),
            (
                json.dumps(
                    report(guidellm(1.0, 5, 5), {**guidellm(1.0, 5, 5), "prompt_tokens": 0})
                ),
                r"benchmarks\[0\].requests.successful\[1\].prompt_tokens: expected a whole number",
            ),
        ],
        ids=["list", "number", "no_requests", "cut", "deep", "no_utf_8", "no_tokens"],
    )
    def test_reports_that_are_wrong(self, tmp_path, content, message):
        file = tmp_path / "benchmarks.json"
        file.write_text(content, errors="surrogateescape")
        with pytest.raises(TraceError, match=f"benchmarks.json: {message}"):
            read_guidellm(file)


class TestForms:
    @pytest.mark.parametrize(
        ("row", "length"),
        [
            (mooncake(), 1000),
            (bailian(1, 0.0, 32), 32),
            ({"timestamp": 5.5, "input_length": 7, "output_length": 2}, 7),
        ],
        ids=["mooncake", "bailian", "minimal"],
    )
    def test_are_told_by_the_first_line(self, write, row, length):
        (request,) = read_trace(write(row))
        assert request.prompt_length == length
        assert request.at == 0

    def test_a_minimal_trace_counts_from_its_first_request(self, write):
        rows = [{"timestamp": at, "input_length": 7, "output_length": 2} for at in (8.5, 6.0, 7.0)]
        requests = read_trace(write(*rows), "minimal")
        assert [request.at for request in requests] == [0.0, 1.0, 2.5]
        assert shared(*requests[:2]) == 0

    def test_other_blocks(self, write):
        (request,) = read_trace(write(mooncake(length=20, ids=(1, 2))), block_size=16)
        assert [segment.length for segment in request.prompt] == [16, 4]

    @pytest.mark.parametrize("form", ["auto", "minimal", "guidellm", "journal"])
    def test_other_blocks_of_a_form_without_any_are_refused(self, write, form):
        file = write({"timestamp": 5.5, "input_length": 7, "output_length": 2})
        name = "minimal" if form == "auto" else form
        message = rf"block_size \(--hash-tokens\): expected none, because the form '{name}' has no"
        with pytest.raises(TraceError, match=message + " hash_ids, got 16"):
            read_trace(file, form, block_size=16)

    @pytest.mark.parametrize(
        ("rows", "form", "message"),
        [
            (["{}"], "auto", "its form is not known: expected JSON lines with chat_id, hash_ids"),
            (["hello"], "auto", "its form is not known"),
            ([""], "auto", "its form is not known"),
            ([""], "mooncake", "expected at least one request, got none"),
            (["{}"], "other", "form: expected one of auto, mooncake, .*, got 'other'"),
            ([mooncake(), "{"], "auto", "trace.jsonl:2: expected a JSON object"),
            (
                [mooncake(), mooncake(length=-1)],
                "auto",
                "trace.jsonl:2: input_length: expected a wh",
            ),
        ],
        ids=["no_field", "text", "empty", "no_line", "unknown", "cut", "negative"],
    )
    def test_what_is_wrong_is_named(self, write, rows, form, message):
        with pytest.raises(TraceError, match=message):
            read_trace(write(*rows), form)

    def test_a_folder_is_no_trace(self, tmp_path):
        with pytest.raises(TraceError, match="the trace cannot be read: Is a directory"):
            read_trace(tmp_path)


class TestSynthetic:
    def test_the_statistics_are_the_stated_ones(self):
        load = SyntheticLoad(
            requests=20_000,
            rate=50.0,
            prompt=Lengths(median=200, sigma=0.5),
            output=Lengths(median=40),
            hot_prefixes=8,
            hot_tokens=100,
            hot_share=0.5,
            zipf=1.0,
            turns=2.0,
            think_seconds=3.0,
        )
        requests = list(load.generate())
        times = [request.at for request in requests]
        assert times == sorted(times)
        assert len(requests) / times[-1] == pytest.approx(50, rel=0.05)
        turns = {}
        for request in requests:
            turns.setdefault(request.session, []).append(request)
        firsts = [session[0] for session in turns.values()]
        assert len(requests) / len(firsts) == pytest.approx(2.0, rel=0.05)
        lengths = [request.prompt[-1].length for request in requests]
        assert statistics.median(lengths) == pytest.approx(200, rel=0.03)
        logs = statistics.NormalDist.from_samples([math.log(n) for n in lengths])
        assert logs.stdev == pytest.approx(0.5, rel=0.03)
        assert {request.output.length for request in requests} == {40}
        hot = [request.prompt[0].id for request in firsts if len(request.prompt) == 2]
        assert len(hot) / len(firsts) == pytest.approx(0.5, rel=0.05)
        assert hot.count(0) / hot.count(3) == pytest.approx(4.0, rel=0.15)
        gaps = [b.at - a.at for session in turns.values() for a, b in itertools.pairwise(session)]
        assert statistics.mean(gaps) == pytest.approx(3.0, rel=0.05)
        second = next(session[1] for session in turns.values() if len(session) > 1)
        first = turns[second.session][0]
        assert second.prompt[:-1] == (*first.prompt, first.output)

    def test_rate_and_turns_are_the_stated_ones_at_all_times(self):
        load = SyntheticLoad(requests=50_000, rate=1000.0, turns=5.0, think_seconds=10.0)
        windows = [[] for _ in range(5)]  # of ten seconds each
        for request in load.generate():
            if request.at < 50:
                windows[int(request.at // 10)].append(request)
        for window in windows:
            places = [(len(request.prompt) + 1) // 2 for request in window]
            assert len(window) == pytest.approx(10_000, rel=0.04)
            assert len(window) / places.count(1) == pytest.approx(5, rel=0.04)
            assert statistics.mean(places) == pytest.approx(5, rel=0.04)

    def test_the_last_turn_of_a_conversation_is_known(self):
        load = SyntheticLoad(requests=2000, rate=50.0, turns=3.0, think_seconds=1.0)
        last = {request.session: request for request in load.generate()}
        is_last = [request for request in load.generate() if request.is_last]
        assert all(last[request.session] == request for request in is_last)
        at = max(request.at for request in last.values())
        assert all(request.is_last for request in last.values() if request.at < at - 15)

    @pytest.mark.parametrize("turns", [1.0, 5.0])
    def test_a_request_is_made_when_it_is_asked_for(self, turns):
        load = SyntheticLoad(requests=1_000_000_000, rate=1e6, turns=turns, think_seconds=1000.0)
        assert len(list(itertools.islice(load.generate(), 10))) == 10

    def test_the_seed_decides(self):
        first, same, other = (list(SyntheticLoad(seed=seed).generate()) for seed in (1, 1, 2))
        assert first == same != other

    def test_without_turns_there_are_no_sessions(self):
        assert {request.session for request in SyntheticLoad().generate()} == {None}
        load = SyntheticLoad(turns=3.0, sessions=False)
        assert {request.session for request in load.generate()} == {None}

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"rate": 0.0}, "synthetic.rate: expected a number > 0, got 0.0"),
            ({"requests": 0}, "synthetic.requests: expected a whole number >= 1, got 0"),
            ({"hot_share": 1.5}, "synthetic.hot_share: expected a number <= 1, got 1.5"),
            ({"turns": 0.5}, "synthetic.turns: expected a number >= 1, got 0.5"),
            (
                {"prompt": Lengths(median=0)},
                "synthetic.prompt.median: expected a whole number >= 1, got 0",
            ),
        ],
    )
    def test_fields_out_of_range(self, fields, message):
        with pytest.raises(ConfigError, match=message):
            SyntheticLoad(**fields).generate()
