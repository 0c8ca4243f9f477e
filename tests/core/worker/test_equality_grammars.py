"""Bit for bit: requests with grammars give the same tokens alone and in any company."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from support.driving import FINAL, alone, drafting, run, varied_jobs
from support.searching import searches_long

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, scripted_engine
from hardpoint.testing.engine_access import load_tokenizer
from hardpoint.testing.scripted import EOS

POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"enum": ["small", "large"]},
        "at": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "size", "at"],
    "additionalProperties": False,
}
WORDS = ["red", "reddish", "green", "grey"]
LIST = 'start: "[" item ("," item)* "]"\nitem: /[a-f]{1,4}/'
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "tags_with_separator",
        "tags": [
            {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{2}"}},
            {"type": "tag", "begin": "<b", "content": {"type": "json_schema", "json_schema": True}},
        ],
        "separator": ";",
        "at_least_one": True,
        "stop_after_first": True,
    },
}
FEATURES = [
    {"structured": {"json": POINT}, "temperature": 0.0},
    {"structured": {"json": POINT}, "temperature": 1.0, "seed": 3, "n": 3},
    {"structured": {"choice": WORDS}, "temperature": 1.0, "seed": 4},
    {"structured": {"regex": "[a-z]+( [a-z]+){2,5}"}, "temperature": 0.8, "seed": 5, "top_k": 9},
    {"structured": {"grammar": LIST}, "temperature": 1.0, "seed": 6, "min_tokens": 12},
    {"structured": {"grammar": LIST}, "temperature": 0.0, "logit_bias": {93: 4.0, 44: -5.0}},
    {"structured": {"structural_tag": TAGS}, "temperature": 0.0, "logprobs": 2},
    {"structured": {"regex": "(ab|c)*"}, "temperature": 1.0, "seed": 8, "stop": "cc"},
    {"structured": {"regex": "[0-9]{4,}"}, "temperature": 1.0, "seed": 9, "bad_words": ["12"]},
    {
        "structured": {"regex": "[ab]{9}"},
        "temperature": 0.0,
        "allowed_token_ids": [64, 65, 66, 256],
    },
]
"""Of scripted requests: byte b of the printable ones is token b - 33."""


COMPACT = {"plugin": {"llguidance": {"max_whitespace": 0}}}
"""Random tokens would be white space mostly."""


COUNT = 20 if searches_long() else 10


def jobs():
    structured = [
        (f"g{index}", prompt, SamplingParams(max_tokens=60, **FEATURES[index % 10], **FINAL))
        for index, (_, prompt, _) in enumerate(varied_jobs(COUNT))
    ]
    free = varied_jobs(COUNT)
    return [job for pair in zip(structured, free, strict=True) for job in pair]


@pytest.fixture(scope="module")
def expected(scripted):
    engine = scripted_engine(scripted, COMPACT)
    yield alone(engine, jobs())
    engine.close()


SMALL_POOL = {"kv_cache": {"block_size": 8, "num_blocks": 24}, "max_model_len": 160}
STACKS = {
    "defaults": {},
    "chunks-of-16": {"scheduler": {"max_num_batched_tokens": 16}},
    "three-at-once": {"scheduler": {"max_num_seqs": 3}},
    "no-prefix-cache": {"kv_cache": {"prefix_caching": False}},
    "preempting": {**SMALL_POOL, "scheduler": {"max_num_batched_tokens": 48}},
    "priority": {**SMALL_POOL, "scheduler": {"policy": "priority"}},
    "small-cache": {"grammar": {"cache_size": 1}},
    "two-batches": {"executor": {"use": "support.plugins.observing:TwoBatches"}},
}


@pytest.mark.parametrize("extra", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("per_step", [None, 2])
def test_batched_equals_alone(open_engine, expected, extra, per_step):
    engine = open_engine({**COMPACT, **extra})
    assert run(engine, jobs(), per_step) == expected


@pytest.mark.parametrize("stack", ["defaults", "preempting"])
def test_drafts_change_nothing(open_engine, expected, stack):
    config = {**COMPACT, **STACKS[stack]}
    drafts = drafting(jobs(), expected)
    config |= drafts | {"plugin": COMPACT["plugin"] | drafts["plugin"]}
    engine = open_engine(config)
    assert run(engine, jobs(), 2) == expected
    assert engine.call_utility("scheduler_stats").num_accepted_drafts > 100


def test_in_a_process_of_its_own(scripted, expected):
    config = scripted_config(scripted, {**COMPACT, "engine": {"in_process": False}})
    with LLM(config=config) as llm:
        names, prompts, params = zip(*jobs(), strict=True)
        outputs = llm.generate(list(prompts), list(params))
    for name, output in zip(names, outputs, strict=True):
        tokens = [completion.token_ids for completion in output.outputs]
        assert tokens == [completion[1] for completion in expected[name][0]], name


def test_requests_without_a_grammar_get_the_tokens_of_a_batch_without_any(open_engine, expected):
    engine = open_engine(COMPACT)
    free = run(engine, varied_jobs(COUNT))
    assert {name: expected[name] for name in free} == free


def test_outputs_that_were_not_cut_are_of_their_grammar(scripted, expected):
    # Not the text of the outputs: prompts may end inside a character.
    tokens = load_tokenizer(scripted).vocabulary().tokens
    ended = 0
    for name, (completions,) in expected.items():
        if not name.startswith("g"):
            continue
        feature = FEATURES[int(name[1:]) % 10]
        structured = feature["structured"]
        for _, token_ids, _, reason, stop_reason, _ in completions:
            if reason != "stop" or stop_reason is not None:
                continue
            assert token_ids[-1] == EOS
            text = b"".join(tokens[token] for token in token_ids[:-1]).decode()
            ended += 1
            if "json" in structured:
                jsonschema.validate(json.loads(text), POINT)
            elif "regex" in structured:
                assert re.fullmatch(structured["regex"], text)
            elif "choice" in structured:
                assert text in WORDS
            elif "grammar" in structured:
                assert re.fullmatch(r"\[[a-f]{1,4}(,[a-f]{1,4})*\]", text)
                assert len(text) >= feature.get("min_tokens", 0)
            else:
                assert re.fullmatch("<a>[0-9]{2}|<b.*", text, re.DOTALL)
    assert ended >= 0.75 * COUNT
