"""Every pair of features together: each request has the tokens that it has alone.

A row of the matrix is an engine with one level of each of its features, and a request with one of
each of its own, in company of others. The rows cover each pair of levels that may be combined; the
test of the table counts them. A failing row prints the pairs that no passing row has.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from allpairspy import AllPairs
from safetensors.torch import save_file
from support.driving import FINAL, Job, summary, varied_jobs
from support.internals import engine_of
from support.parallel import write_random_model

from hardpoint import LLM, SamplingParams, typed
from hardpoint.core.build import build_engine
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.requests.input_processor import NO_EXTRAS, RequestExtras
from hardpoint.core.frontend.requests.plugin_arguments import CallRules
from hardpoint.features.adapters.identity import content_hash, read_files
from hardpoint.kernels import cpu
from hardpoint.plugins import EngineConfig, LoRARequest
from hardpoint.testing import ScriptedClock, scripted_config, write_scripted_model

Level = Mapping[str, Any]

HERE = "support.broken.processors"
PROCESSORS = [f"{HERE}:{name}" for name in ("Bias", "Counter", "Observer")]
OF_THE_BATCH = f"{HERE}:BatchBias"
RANKS = {"executor": {"use": "multiproc"}}
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
THINK = 257  # the token of the first tag
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 257 + len(TAGS)}
SCALES = {"one": 1.0, "scaled": -0.5}  # of the adapter
REAL = {"attention": {"use": "native_cpu"}}
ENGINE: dict[str, dict[str, Level]] = {
    "model": {
        "scripted": {},
        "real": REAL,
        "of int8 weights": REAL | {"quantization": {"use": "int8"}},
        "of int4 weights": REAL | {"quantization": {"use": "int4"}},
        "with an int8 cache": REAL | {"kv_cache": {"dtype": "int8"}},
        "with an fp8 cache": REAL | {"kv_cache": {"dtype": "fp8"}},
        "with windows": REAL,
    },
    "prompts": {
        "whole": {},
        "in chunks": {"scheduler": {"max_num_batched_tokens": 24}},
        "of 8 tokens": {"scheduler": {"long_prefill_token_threshold": 8}},
    },
    "prefix cache": {"on": {}, "off": {"kv_cache": {"prefix_caching": False}}},
    "blocks": {"many": {}, "few": {"kv_cache": {"num_blocks": 20}}},
    "policy": {
        name: {"scheduler": {"policy": name}}
        for name in ("fcfs", "priority", "fair", "shortest_first")
    },
    "speculator": {
        "none": {},
        "ngram": {"speculation": {"use": ["ngram"]}},
        "suffix": {"speculation": {"use": ["suffix"], "adaptive": False}},
        "right": {
            "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False}
        },
        "wrong": {
            "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"]},
            "plugin": {"scripted_speculator": {"right": 0.3}},
        },
        "model": {"speculation": {"use": ["draft_model"], "adaptive": False}},
    },
    "stores": {
        "none": {},
        "memory": {
            "kv_connector": {"stores": ["memory"]},
            "plugin": {"memory": {"size_bytes": 1 << 22}},
        },
    },
    "ranks": {
        "one": {},
        "tensor": RANKS | {"parallel": {"tensor": 2}},
        "pipeline": RANKS | {"parallel": {"pipeline": 2}},
    },
    "process": {"here": {}, "its own": {"engine": {"in_process": False}}},
    "planning": {
        "step by step": {},
        "ahead": {"scheduler": {"asynchronous": True}},  # of one rank, in a thread
        "ahead in a process": RANKS | {"scheduler": {"asynchronous": True}},
    },
    "step time": {"no limit": {}, "short": {"scheduler": {"step_milliseconds": 1.0}}},
    "in between": {"nothing": {}, "reset": {}, "pause": {}, "sleep": {}, "abort": {}},
}
REQUEST: dict[str, dict[str, Level]] = {
    "draws": {
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 1.0, "seed": 5},
        "truncated": {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    },
    "processor": {
        "none": {},
        "row by row": {"plugin_args": {"bias": {"by": 3.0}}},
        "with state": {"plugin_args": {"counter": {"scale": 0.7}}},
        "of the batch": {"plugin_args": {"batch_bias": {"by": 2.0}}},
        "that observes": {"plugin_args": {"observer": {}}},
    },
    "penalties": {
        "none": {},
        "some": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "bad_words": ["a", "bc"]},
    },
    "grammar": {
        "none": {},
        "pattern": {"structured": {"regex": "[a-f]{3,9}(,[0-9]{2}){0,3}"}},
        "schema": {"structured": {"json": {"type": "array", "items": {"type": "boolean"}}}},
    },
    "thinking": {"none": {}, "with a budget": {"thinking_token_budget": 5}},
    "tools": {"none": {}, "free": {}, "required": {}},
    "priority": {"of all": {}, "its own": {}},
    "adapter": {"none": {}, "one": {}, "scaled": {}},
    "prompt": {"of ids": {}, "of embeddings": {}, "of both": {}},
    "completions": {"one": {}, "three": {"n": 3}},
    "logprobs": {
        "none": {},
        "of the output": {"logprobs": 2, "logprob_token_ids": [65, 200]},
        "of the prompt": {"prompt_logprobs": 1},
    },
    "end": {
        "length": {"max_tokens": 21},
        "token": {"max_tokens": 30, "stop_token_ids": list(range(0, 256, 9)), "min_tokens": 4},
        "string": {"max_tokens": 30, "stop": ["5", "e", "\\"]},
    },
}
ALL = ENGINE | REQUEST
EXTRAS: dict[tuple[str, str], Level] = {
    ("tools", "free"): {"tools": {"f": {"type": "object"}}},
    ("tools", "required"): {
        "tools": {"f": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
        "calls": CallRules(required=["f"]),
    },
    ("priority", "its own"): {"priority": -1},
}
"""What levels of a request are besides parameters."""
REFUSED = (
    {
        (("prompt", name), ("logprobs", "of the prompt")): "prompt_logprobs: .*with prompt_embeds"
        for name in ("of embeddings", "of both")
    }
    | {
        (("speculator", name), ("processor", "of the batch")): (
            "batch_bias.*does not declare supports_drafts.*speculation"
        )
        for name in ENGINE["speculator"]
        if name != "none"
    }
    | {
        (("model", "with windows"), ("stores", "memory")): (
            r"kv_connector.use: 'stores' moves blocks .* release those which a sliding window"
        )
    }
    | {
        (("model", "scripted"), ("adapter", name)): (
            "poet: the model has no linear layer model.layers.0.mlp.down_proj, .* which the adapter"
        )
        for name in SCALES
    }
)
"""Pairs that are refused, and the words of the refusal."""
NOT_COMPARED = {
    (("model", name), ("ranks", "tensor")) for name in ENGINE["model"] if name != "scripted"
} | {(("ranks", "tensor"), ("adapter", name)) for name in SCALES}
"""Pairs whose sums are rounded otherwise than alone.

`test_parallel_equality` and `test_adapters_together` compare them.
"""
APART = REFUSED.keys() | NOT_COMPARED
SHORT = 3  # one row in so many is in the short run


def is_allowed(chosen: list[str]) -> bool:
    pairs = itertools.combinations(zip(ALL, chosen, strict=False), 2)
    return APART.isdisjoint(pairs)


@functools.cache
def matrix() -> list[dict[str, str]]:
    """Return rows that cover each allowed pair of levels."""
    found = AllPairs([list(names) for names in ALL.values()], filter_func=is_allowed)
    rows = [dict(zip(ALL, row, strict=True)) for row in found]
    # Where pairs are refused, the library leaves out some of the others.
    while missing := sorted(allowed_pairs().difference(*map(pairs_of, rows))):
        row: dict[str, str] = {}
        for pair in missing:
            grown = row | dict(pair)
            if row.items() <= grown.items() and APART.isdisjoint(pairs_of(completed(grown))):
                row = grown
        rows.append(completed(row))
    return rows


def completed(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row with the first level of each feature that it lacks; of models, a fitting one."""
    first = {feature: next(iter(names)) for feature, names in ALL.items()}
    model = {"model": "real"} if row.get("adapter") in SCALES else {}
    return first | model | dict(row)


def allowed_pairs() -> set[tuple[tuple[str, str], tuple[str, str]]]:
    every = [(feature, level) for feature, names in ALL.items() for level in names]
    return {
        pair
        for pair in itertools.combinations(every, 2)
        if pair[0][0] != pair[1][0] and pair not in APART
    }


def pairs_of(row: Mapping[str, str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    levels = [(feature, row[feature]) for feature in ALL if feature in row]
    return set(itertools.combinations(levels, 2))


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables of tables as one; of two values, the later counts."""
    found: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            old = found.get(key)
            found[key] = merged(old, value) if isinstance(old, dict) else value
    return found


BASE = {
    "max_model_len": 128,
    "kv_cache": {"block_size": 8},
    "scheduler": {"max_num_seqs": 6},
    "reasoning": {"parser": "think_tags"},
    "tools": {"parser": "hermes"},
    "plugin": {"prompt_embeddings": {"enabled": True}},
}
CANARY = {"debug": {"kv_canary": True}}  # of the engines that are compared with the plain one
COMPACT = {"plugin": {"llguidance": {"max_whitespace": 0}}}


def requests_of(row: Mapping[str, str], number: int) -> list[Job]:
    """Return the request of a row, twice, and others that join before and after it."""
    others = varied_jobs(10)
    fields = merged(*(REQUEST[feature][row[feature]] for feature in REQUEST))
    fields.setdefault("max_tokens", 24)
    generator = random.Random(number)
    prompt = [generator.randrange(256) for _ in range(generator.randint(3, 40))]
    if row["thinking"] != "none":
        prompt.append(THINK)
    if row["tools"] == "required":  # room for a call
        fields["max_tokens"] += 40
    subject = [(f"s{place}", prompt, SamplingParams(**fields, **FINAL)) for place in range(2)]
    return [*others[:3], subject[0], *others[3:7], subject[1], *others[7:]]


def extras_of(row: Mapping[str, str], request_id: str, poet: LoRARequest) -> RequestExtras:
    """Return the extras of a request: none, unless it is one of the row's own."""
    if not request_id.startswith("s"):
        return NO_EXTRAS
    extras = merged(*(EXTRAS.get(level, {}) for level in row.items()))
    if (scale := SCALES.get(row["adapter"])) is not None:
        extras["lora_request"] = msgspec.structs.replace(poet, scale=scale)
    return RequestExtras(**extras)


class Models:
    """The folders of the models, and plain engines that have results of requests alone."""

    def __init__(self, scripted: Path, folder: Path) -> None:
        windows = {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
        real = write_random_model(folder / "real", "LlamaForCausalLM", **SHAPE)
        windowed = write_random_model(folder / "windows", "Qwen2ForCausalLM", **SHAPE, **windows)
        for own in (real, windowed):
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (own / name).write_bytes((scripted / name).read_bytes())
        self.folders = dict.fromkeys(ENGINE["model"], real)
        self.folders |= {"scripted": scripted, "with windows": windowed}
        self.poet = write_poet(folder / "poet")
        ids = np.arange(SHAPE["vocab_size"], dtype=np.float32)
        table = np.random.default_rng(0).normal(0, 0.5, (len(ids), SHAPE["hidden_size"]))
        self.tables = dict.fromkeys(ENGINE["model"], table.astype(np.float32))
        self.tables["scripted"] = np.stack([ids, ids], 1)
        self.results: dict[str, Any] = {}
        self.engines: dict[str, LLMEngine] = {}

    def config(self, model: str, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of an engine of a model."""
        return scripted_config(self.folders[model], merged(ENGINE["model"][model], extra))

    def given(self, row: Mapping[str, str], jobs: list[Job]) -> list[Job]:
        """Return the requests with embeddings in place of ids, where a row has some.

        The ids that a prompt of both keeps are every third one, and the last one.
        """
        if row["prompt"] == "of ids":
            return jobs
        table, found = self.tables[row["model"]], []
        for request_id, prompt, params in jobs:
            if not request_id.startswith("s"):
                found.append((request_id, prompt, params))
                continue
            every = row["prompt"] == "of embeddings"
            parts = [
                [token]
                if not every and (place % 3 == 1 or place == len(prompt) - 1)
                else table[[token]]
                for place, token in enumerate(prompt)
            ]
            found.append((request_id, {"prompt_parts": parts}, params))
        return found

    def alone(self, row: Mapping[str, str], jobs: list[Job]) -> dict[str, Any]:
        """Return the results of requests, each alone in a plain engine."""
        found = {}
        for job in jobs:
            extras = extras_of(row | {"priority": "of all"}, job[0], self.poet)
            form = row["prompt"] if job[0].startswith("s") else ""
            key = repr((row["model"], form, job[1:], extras))
            if key not in self.results:
                (self.results[key],) = drive(
                    self._plain(row["model"]), self.given(row, [job]), {job[0]: extras}
                ).values()
            found[job[0]] = self.results[key]
        return found

    def adapters(self) -> dict[str, Any]:
        """Return the configuration of an engine with the adapter of all real models."""
        paths = {"poet": self.poet.path}
        return {"adapters": {"max_loras": 1, "max_lora_rank": 4, "paths": paths}}

    def _plain(self, model: str) -> LLMEngine:
        if model not in self.engines:
            enabled = {"plugins": {"enable": [*PROCESSORS, OF_THE_BATCH]}}
            adapters = {} if model == "scripted" else self.adapters()
            tree = self.config(model, merged(BASE, COMPACT, enabled, adapters))
            config = typed.convert(tree, EngineConfig, path="")
            self.engines[model] = build_engine(config, clock=ScriptedClock(tick=1e-6))
        return self.engines[model]


def write_poet(folder: Path) -> LoRARequest:
    """Write an adapter of the matrices that all real models have; return it."""
    generator = torch.Generator().manual_seed(7)
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    tensors = {}
    for layer in range(2):
        for module, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            name = f"base_model.model.model.layers.{layer}.{module}.lora_{{}}.weight"
            tensors[name.format("A")] = torch.randn(4, columns, generator=generator) * 0.2
            tensors[name.format("B")] = torch.randn(rows, 4, generator=generator) * 0.2
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    content = content_hash(*read_files(str(folder)))
    return LoRARequest("poet", 1, str(folder), content)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("models")
    scripted = write_scripted_model(folder / "scripted", special_tokens=TAGS)
    models = Models(scripted, folder)
    yield models
    for engine in models.engines.values():
        engine.close()


def drive(
    engine: Any,
    jobs: list[Job],
    extras: Mapping[str, RequestExtras],
    in_between: str = "nothing",
) -> dict[str, Any]:
    """Run requests that join one after the other; do something else after some steps."""
    waiting, results, steps = list(jobs), {}, 0
    while waiting or engine.has_unfinished_requests():
        for request_id, prompt, params in waiting[:2]:
            engine.add_request(request_id, prompt, params, extras[request_id])
        waiting = waiting[2:]
        for output in engine.step():
            if output.finished and output.request_id != "more":
                results[output.request_id] = result_of(output)
        steps += 1
        if steps in (4, 11):
            interfere(engine, in_between, steps)
    return results


def interfere(engine: Any, what: str, step: int) -> None:
    match what:
        case "reset":
            engine.call_utility("reset_prefix_cache")
        case "pause":
            engine.call_utility("pause", "keep")
            engine.call_utility("resume")
        case "sleep":
            engine.call_utility("sleep", 1, "keep")
            engine.call_utility("wake_up")
        case "abort":
            if step == 4:
                engine.add_request("more", list(range(30)), SamplingParams(max_tokens=60, **FINAL))
            else:
                engine.abort_requests(["more"])


def result_of(output: Any) -> Any:
    prompt = output.prompt_logprobs
    if prompt is not None:
        prompt = [
            entry and {token: (value.logprob, value.rank) for token, value in entry.items()}
            for entry in prompt
        ]
    parts = [
        (c.reasoning, c.content, [(call.name, call.arguments) for call in c.tool_calls or ()])
        for c in output.outputs
    ]
    return summary(output), prompt, parts


def config_of(
    row: Mapping[str, str], jobs: list[Job], expected: Mapping[str, Any], models: Models
) -> dict:
    """Return the configuration of a row; scripted drafts are what the requests came to alone."""
    enabled = [*PROCESSORS, OF_THE_BATCH] if row["processor"] == "of the batch" else PROCESSORS
    config = merged(BASE, {"plugins": {"enable": enabled}}, COMPACT, CANARY)
    levels = (ENGINE[feature][row[feature]] for feature in ENGINE if feature != "model")
    config = merged(config, *levels)
    if (row["model"], row["blocks"]) == ("with windows", "few"):
        config["kv_cache"]["num_blocks"] = 60  # three groups of layers share them
    if row["speculator"] in ("right", "wrong"):
        replies = [
            [prompt, tokens]
            for request_id, prompt, _ in jobs
            for _, tokens, *_ in expected[request_id][0]
        ]
        config = merged(config, {"plugin": {"scripted_speculator": {"replies": replies}}})
    if row["speculator"] == "model":
        folder = models.folders[row["model"]]
        config = merged(config, {"plugin": {"draft_model": {"model": str(folder)}}})
    if row["adapter"] != "none":
        config = merged(config, models.adapters())
    return models.config(row["model"], config)


ROWS = [
    pytest.param(number, marks=[] if number % SHORT == 0 else [pytest.mark.nightly])
    for number in range(len(matrix()))
]


@pytest.mark.parametrize("number", ROWS)
def test_a_row(models, number):
    check(models, matrix()[number], number)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_random_rows(models, part):
    drawn = random.Random(part)
    for number in range(20):
        row = {feature: drawn.choice(list(names)) for feature, names in ALL.items()}
        if not is_allowed(list(row.values())):
            row |= {"speculator": "none", "model": "scripted"}
        check(models, row, 1000 + 20 * part + number)


def check(models: Models, row: Mapping[str, str], number: int) -> None:
    """Assert that the requests of a row have the results that each has alone."""
    if row["model"] != "scripted":
        needs_kernels()
    jobs = requests_of(row, number)
    expected = models.alone(row, jobs)
    extras = {job[0]: extras_of(row, job[0], models.poet) for job in jobs}
    with LLM(config=config_of(row, jobs, expected, models)) as llm:
        found = drive(engine_of(llm), models.given(row, jobs), extras, row["in between"])
    wrong = [name for name in expected if found.get(name) != expected[name]]
    assert not wrong, f"{wrong} differ in row {number}: {row}"


def needs_kernels() -> None:
    """Skip a test of a real model where its sums would depend on the other rows of a step."""
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(f"sums of other steps are rounded otherwise without kernels, and they: {cause}")


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: " and ".join(map(str, pair)))
def test_a_refused_pair_names_what_does_not_fit(models, pair):
    row = {feature: next(iter(names)) for feature, names in ALL.items()} | dict(pair)

    def run() -> None:
        jobs = models.given(row, requests_of(row, 0))
        with LLM(config=config_of(row, [], {}, models)) as llm:
            drive(engine_of(llm), jobs, {job[0]: NO_EXTRAS for job in jobs})

    with pytest.raises(Exception, match=REFUSED[pair]):
        run()


def test_the_rows_cover_each_pair():
    covered = set().union(*map(pairs_of, matrix()))
    assert covered >= allowed_pairs()
    assert not covered & APART
    print(f"{len(matrix())} rows, {len(allowed_pairs())} pairs, {len(REFUSED)} refused")


@pytest.mark.parametrize("model", ["scripted", "real"])
def test_the_levels_of_reasoning_and_tools_show_in_results(models, model):
    if model != "scripted":
        needs_kernels()
    first = {feature: next(iter(names)) for feature, names in ALL.items()}
    row = first | {"model": model, "thinking": "with a budget", "tools": "required"}
    jobs = requests_of(row, 0)
    ((_, _, ((reasoning, _, calls),)),) = {
        key: value for key, value in models.alone(row, jobs).items() if key == "s0"
    }.values()
    assert reasoning
    assert [name for name, _ in calls] == ["f"]
