"""Tokens of traced requests and of requests beside them are equal without traces."""

from __future__ import annotations

import msgspec
import pytest
from support.cases import nightly_but
from support.driving import drafting, run, summary

from hardpoint.toolkit.trace import asking_for_trace, trace_of

SMALL = {"max_model_len": 128, "kv_cache": {"block_size": 8, "num_blocks": 20}}
LEVELS = {
    "prefix cache": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "few blocks": SMALL | {"scheduler": {"max_num_seqs": 6}},
    "n-grams": {"speculation": {"use": ["ngram"]}},
    "ahead": {"scheduler": {"asynchronous": True}},
    "ahead in a process": {"executor": {"use": "multiproc"}, "scheduler": {"asynchronous": True}},
    "tensor ranks": {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}},
    "stages": {"executor": {"use": "multiproc"}, "parallel": {"pipeline": 2}},
    "drafts": SMALL,
}
NO_LIMIT = {"plugin": {"trace": {"rows": 256, "candidates": 3}}}


def traced(jobs):
    return [(name, prompt, asking_for_trace(params)) for name, prompt, params in jobs]


def run_outputs(engine, jobs):
    """The last output of each job; three jobs join before each step."""
    waiting, finished = list(jobs), {}
    while waiting or engine.has_unfinished_requests():
        for job in waiting[:3]:
            engine.add_request(*job)
        waiting = waiting[3:]
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished


def merged(*settings):
    result: dict = {}
    for setting in settings:
        for key, value in setting.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = result[key] | value if both else value
    return result


def check_whole(output):
    for completion in trace_of(output).completions:
        ids = output.outputs[completion.index].token_ids
        assert completion.token_ids == ids
        assert [token.position for token in completion.tokens] == list(range(len(ids)))
        assert [token.token_id for token in completion.tokens] == ids
        assert completion.notes == []
        for token in completion.tokens:
            assert token.token_id in {candidate.token_id for candidate in token.candidates}
            assert len(token.candidates) <= 3
            logits = {len(candidate.logits) for candidate in token.candidates}
            assert logits == {len(token.changes)}
            best = max(token.candidates, key=lambda each: (each.logits or [each.logit])[-1] or -1e9)
            if token.draw.greedy:
                assert best.probability == max(each.probability for each in token.candidates)
            elif all(each.noise is not None for each in token.candidates):
                sums = {
                    each.token_id: (each.logits or [each.logit])[-1] + each.noise
                    for each in token.candidates
                    if (each.logits or [each.logit])[-1] is not None
                }
                assert max(sums, key=sums.__getitem__) == token.token_id
        assert sum(step.num_tokens for step in completion.steps) >= len(ids)


@pytest.mark.parametrize("level", nightly_but(LEVELS, "few blocks", "drafts"))
def test_tokens_are_those_without_traces(open_engine, jobs, expected, level):
    settings = LEVELS[level]
    if level == "drafts":
        settings = merged(settings, drafting(jobs, expected))
    engine = open_engine(merged(settings, NO_LIMIT))
    outputs = run_outputs(engine, traced(jobs))
    assert {name: [summary(output)] for name, output in outputs.items()} == expected
    for output in outputs.values():
        check_whole(output)
    steps = [step for o in outputs.values() for c in trace_of(o).completions for step in c.steps]
    if level == "few blocks":
        assert any(step.is_preempted for step in steps)
        assert any(step.is_resumed for step in steps)
        assert any(step.waits_for == "blocks" for step in steps)
    if level == "drafts":
        accepted = sum(step.num_accepted or 0 for step in steps)
        assert 0 < accepted < sum(len(step.drafts) for step in steps)
        tokens = [t for o in outputs.values() for c in trace_of(o).completions for t in c.tokens]
        outcomes = {t.draft == t.token_id for t in tokens if t.draft is not None}
        assert outcomes == {True, False}
    some = [*traced(jobs[::2]), *jobs[1::2]]
    assert run(engine, some, per_step=3) == expected


def test_a_trace_names_no_other_request(open_engine, jobs):
    engine = open_engine(SMALL | {"scheduler": {"max_num_seqs": 4}})
    secret = [(f"secret-{name}", prompt, params) for name, prompt, params in jobs]
    outputs = run_outputs(engine, [*traced(jobs[:2]), *secret[2:]])
    for name, _, _ in jobs[:2]:
        text = msgspec.json.encode(trace_of(outputs[name])).decode()
        assert "secret" not in text
        assert max(step.num_requests for step in trace_of(outputs[name]).completions[0].steps) > 1
