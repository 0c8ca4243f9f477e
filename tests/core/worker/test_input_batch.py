"""The persistent batch against a dict of requests."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint import SamplingParams
from hardpoint.core.worker.input_batch import InputBatch
from hardpoint.plugins import LogitsRequest, RowMap

BLOCK = 4


def add(batch, request_id, prompt, outputs, blocks, done, second_type_start=None):
    request = LogitsRequest(request_id, prompt, outputs, SamplingParams(), [])
    batch.add(request, outputs, blocks, done, second_type_start=second_type_start)


@examples(60)
@given(st.data())
def test_rows_follow_their_requests(data):
    """After any mix of joins, leaves and steps, each request's tokens, places and blocks hold."""
    groups = data.draw(st.integers(1, 3))
    packs = data.draw(st.booleans())
    batch = InputBatch(6, max_model_len=40, block_size=BLOCK, num_groups=groups, packs=packs)
    oracle: dict[str, dict] = {}
    names = iter(f"r{i}" for i in range(10_000))
    blocks = iter(range(1, 10_000))
    # The output list is the request's own: it tells who an added row is.
    books = RowMap(lambda added: id(added.output_token_ids))
    for _ in range(data.draw(st.integers(1, 25))):
        for name in data.draw(st.lists(st.sampled_from(sorted(oracle) or ["none"]), max_size=2)):
            batch.remove(frozenset({name}))
            oracle.pop(name, None)
        joins = data.draw(st.integers(0, 6 - len(oracle)))
        for _ in range(joins):
            prompt = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=8))
            known = {"tokens": list(prompt), "prompt": len(prompt), "done": 0}
            known["blocks"] = [[] for _ in range(groups)]
            known["outputs"] = []
            known["types"] = data.draw(st.none() | st.integers(0, len(prompt)))
            name = next(names)
            oracle[name] = known
            add(batch, name, prompt, known["outputs"], [[]] * groups, 0, known["types"])
        update = batch.settle()
        books.apply(update)
        assert {row: books[row] for row in books} == dict(enumerate(order_of(batch)))
        assert len(batch) == len(oracle) == len(books)
        if update is not None:
            assert update.batch_size == len(oracle)
        scheduled = draw_schedule(data, oracle)
        for name, count in scheduled.items():
            known = oracle[name]
            need = -(-(known["done"] + count) // BLOCK) - len(known["blocks"][0])
            new = [[next(blocks) for _ in range(need)] for _ in range(groups)]
            for table, added in zip(known["blocks"], new, strict=True):
                table += added
            batch.extend_blocks(name, new)
        if scheduled:
            step = batch.prepare(scheduled, torch.device("cpu"))
            check(step, scheduled, oracle)
            check_types(step, oracle)
            for name, count in scheduled.items():
                oracle[name]["done"] += count
                if oracle[name]["done"] == len(oracle[name]["tokens"]) < 40:
                    oracle[name]["tokens"].append(7)
                    batch.append(name, 7)


def check_types(step, oracle: dict[str, dict]) -> None:
    """Tokens of prompts have type 1 from a place on, and then what follows them."""
    expected = []
    for index, request in enumerate(step.requests):
        known = oracle[request.request_id]
        start = known["types"]
        start = 40 if start is None or start == known["prompt"] else start
        first, end = step.query_starts[index : index + 2]
        places = range(known["done"], known["done"] + end - first)
        expected += [int(place >= start) for place in places]
    assert (step.token_types is not None) == any(expected)
    if step.token_types is not None:
        assert step.token_types.tolist() == expected


def draw_schedule(data, oracle: dict[str, dict]) -> dict[str, int]:
    scheduled = {}
    for name, known in oracle.items():
        want = len(known["tokens"]) - known["done"]
        if want and data.draw(st.booleans()):
            scheduled[name] = data.draw(st.integers(1, want))
    return scheduled


def order_of(batch: InputBatch) -> list[int]:
    return [id(outputs) for outputs in batch._outputs]


def check(step, scheduled, oracle):
    starts = step.query_starts
    lengths = [int(b - a) for a, b in itertools.pairwise(starts)]
    assert lengths == sorted(lengths, key=lambda n: n > 1)  # single tokens first
    assert [each.group for each in step.attention] == list(range(len(step.attention)))
    for each in step.attention:
        assert each.query_starts is starts
        assert each.num_single == sum(n == 1 for n in lengths)
        assert each.starts.tolist() == starts.tolist()
        assert each.lens.tolist() == each.seq_lens.tolist()
        for tensor in (each.block_table, each.slots):
            assert tensor.dtype is torch.int64
            assert tensor.is_contiguous()
    assert {r.request_id for r in step.requests} == set(scheduled)
    for index, request in enumerate(step.requests):
        known, count = oracle[request.request_id], scheduled[request.request_id]
        places = list(range(known["done"], known["done"] + count))
        part = slice(int(starts[index]), int(starts[index + 1]))
        assert step.token_ids[part].tolist() == [known["tokens"][p] for p in places]
        assert step.positions[part].tolist() == places
        for each, blocks in zip(step.attention, known["blocks"], strict=True):
            slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in places]
            assert each.slots[part].tolist() == slots
            assert each.seq_lens[index] == places[-1] + 1
            held = blocks[: -(-(places[-1] + 1) // BLOCK)]
            row = each.block_table[index].tolist()
            assert row[: len(held)] == held
        assert step.samples[index] == (places[-1] + 1 == len(known["tokens"]))
        assert request.output_token_ids == known["tokens"][known["prompt"] :]


def test_unused_block_entries_are_zero_after_a_row_is_reused():
    batch = InputBatch(max_num_seqs=2, max_model_len=32, block_size=BLOCK, num_groups=2)
    add(batch, "a", [1] * 16, [], [[9, 9, 9, 9], [19, 19, 19, 19]], 0)
    batch.remove(frozenset({"a"}))
    add(batch, "b", [1], [], [[5], [15]], 0)
    add(batch, "c", [1] * 16, [], [[6, 7, 8, 4], [16, 17, 18, 14]], 0)
    batch.settle()
    step = batch.prepare({"b": 1, "c": 16}, torch.device("cpu"))
    one, other = (each.block_table.tolist() for each in step.attention)
    assert one == [[5, 0, 0, 0], [6, 7, 8, 4]]
    assert other == [[15, 0, 0, 0], [16, 17, 18, 14]]


def test_removing_an_unknown_request_does_nothing():
    batch = InputBatch(max_num_seqs=2, max_model_len=32, block_size=BLOCK)
    add(batch, "a", [1], [], [[1]], 0)
    batch.remove(frozenset({"nobody"}))
    assert len(batch) == 1
