"""Every pair of features together: each request has the tokens that it has alone.

A row of the matrix is an engine with one level of each of its features, and a request with one of
each of its own, in company of others. The rows cover each pair of levels that may be combined; the
test of the table counts them. A failing row prints the pairs that no passing row has.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import json
import random
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from allpairspy import AllPairs
from safetensors.torch import save_file
from support.drafting_heads import write_random_head
from support.driving import FINAL, Job, summary, varied_jobs
from support.engines import build_engine
from support.gemma_images import image
from support.internals import engine_of
from support.parallel import write_random_model
from support.plugins.tapping import TAPS

from hardpoint import LLM, RequestOutput, SamplingParams, typed
from hardpoint.builtin_plugins.step_parts.adapters.identity import content_hash, read_files
from hardpoint.calls.streams import RequestForks
from hardpoint.conversations.states import OpenConversations
from hardpoint.conversations.turns import AsyncConversation
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.requests.input_processor import NO_EXTRAS, RequestExtras
from hardpoint.core.frontend.requests.plugin_arguments import CallRules
from hardpoint.kernels import cpu
from hardpoint.plugins import EngineConfig, EngineCoreRequest, LoRARequest
from hardpoint.plugins.config.engine import ConversationsConfig
from hardpoint.testing import ScriptedClock, scripted_config, write_scripted_model

Level = Mapping[str, Any]

HERE = "support.broken.processors"
PROCESSORS = [f"{HERE}:{name}" for name in ("Bias", "Counter", "Observer", "EndsAt")]
PROCESSORS.append("support.plugins.grouped:Mixed")  # no processor, but for requests as these are
EVICTING = "support.plugins.evicting:Window"
SELF_DRAFT = "support.plugins.main_model:SelfDraft"
EVERY_THIRD = "support.plugins.sampling_states:EveryThird"
OF_THE_BATCH = f"{HERE}:BatchBias"
RANKS = {"executor": {"use": "multiproc"}}
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TAGS += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
THINK, IMAGE = 257, 261  # the tokens of the first and of the fifth tag
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 257 + len(TAGS)}
HYBRID = "support.builtins.state_models:HybridModel"  # the scripted model, with a state
LATE = "support.plugins.late_ops:LateOps"  # tokens reach the host late, as on a GPU
SCRIPTED = ("scripted", "with states")
EVICTABLE = ("scripted", "real", "of int8 weights", "of int4 weights")
SCALES = {"one": 1.0, "scaled": -0.5}  # of the adapter
REAL = {"attention": {"use": "native_cpu"}}
ENGINE: dict[str, dict[str, Level]] = {
    "model": {
        "scripted": {"attention": {"use": "support.plugins.windowed:Windowed"}},
        "with states": {},
        "real": REAL,
        "of int8 weights": REAL | {"quantization": {"use": "int8"}},
        "of int4 weights": REAL | {"quantization": {"use": "int4"}},
        "with windows": REAL,
        "of images": REAL | {"kv_cache": {"window_groups": False}},
    },
    "cache": {
        "as computed": {},
        "of int8": {"kv_cache": {"dtype": "int8"}},
        "of fp8": {"kv_cache": {"dtype": "fp8"}},
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
        "head": {"speculation": {"use": ["eagle3"], "adaptive": False}},
        "own model": {"speculation": {"use": [SELF_DRAFT], "adaptive": False}},
    },
    "sampler": {"default": {}, "with states": {"sampler": {"use": EVERY_THIRD}}},
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
        "overlapped": {"scheduler": {"asynchronous": True}, "ops": {"use": LATE}},
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
    "taps": {
        "none": {},
        "read": {"plugin_args": {"raw": {"layers": [1]}}},
        "change": {"plugin_args": {"add": {"strength": 0.5}, "raw": {"layers": [2]}}},
        "exit": {"plugin_args": {"leave": {"every": 3, "threshold": 0.02}}},
    },
    "eviction": {"none": {}, "window": {"plugin_args": {"window": {"window": 13}}}},
    "attention": {"of all": {}, "limited": {"plugin_args": {"windowed": {"window": 9}}}},
    "prompt": {"of ids": {}, "of embeddings": {}, "of both": {}, "with an image": {}},
    "turns": {"one": {}, "two": {}},
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
        "plugin": {"max_tokens": 30, "plugin_args": {"ends_at": {"tokens": 17}}},
    },
    "fork": {"none": {}, "half way": {}},
    "group": {
        "none": {},
        "of three": {"plugin_args": {"mixed": {"prompts": ["ab", "a longer one"]}}},
    },
}
ALL = ENGINE | REQUEST
PLAIN = ("model", "cache", "sampler")
"""Features of the plain engine that a row is compared with."""
EXTRAS: dict[tuple[str, str], Level] = {
    ("tools", "free"): {"tools": {"f": {"type": "object"}}},
    ("tools", "required"): {
        "tools": {"f": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
        "calls": CallRules(required=["f"]),
    },
    ("priority", "its own"): {"priority": -1},
}
"""What levels of a request are besides parameters."""
TAPPED = ("read", "change", "exit")
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
            r"kv_connector.use: 'stores' moves blocks .* release blocks outside of a sliding window"
        )
    }
    | {
        (("model", "with states"), ("stores", "memory")): (
            r"kv_connector.use: 'stores' moves blocks, and .*ScriptedForCausalLM.* keeps states"
        )
    }
    | {
        (("model", "with states"), ("speculator", name)): (
            "speculation: .*ScriptedForCausalLM.* keeps states .* expected no speculation"
        )
        for name in ENGINE["speculator"]
        if name != "none"
    }
    | {
        (("model", "scripted"), ("speculator", "head")): (
            "plugin.eagle3.model: expected the hidden size 2 of the engine's model, got 64"
        ),
        (("model", "with windows"), ("speculator", "head")): (
            "plugin.eagle3.model: kv_cache.window_groups: expected false with drafting heads"
        ),
    }
    | {
        (("speculator", level), ("ranks", name)): f"model: expected one rank for {what}, got 2"
        for level, what in (
            ("head", "a drafting head"),
            ("own model", "sequences of the engine's own model"),
        )
        for name in ("tensor", "pipeline")
    }
    | {
        (("model", model), ("adapter", name)): (
            "poet: the model has no linear layer model.layers.0.mlp.down_proj, .* which the adapter"
        )
        for name in SCALES
        for model in SCRIPTED
    }
    | {
        (("model", model), ("cache", name)): "kv_cache.dtype: .*(history_attention|windowed)"
        for name in ENGINE["cache"]
        if name != "as computed"
        for model in SCRIPTED
    }
    | {
        (("model", name), ("prompt", "with an image")): (
            "multi_modal_data: .*the model \\w+ takes text alone"
        )
        for name in ENGINE["model"]
        if name != "of images"
    }
    | {
        (("prompt", name), ("turns", "two")): f"{field}.*a conversation that stays open"
        for name, field in (
            ("of embeddings", "prompt_parts"),
            ("of both", "prompt_parts"),
            ("with an image", "multi_modal_data"),
        )
    }
    | {
        (("model", name), ("eviction", "window")): (
            r"releases blocks of the KV cache .*in each layer, got (sliding|recurrent)"
        )
        for name in ENGINE["model"]
        if name not in EVICTABLE
    }
    | {
        (("model", name), ("attention", "limited")): (
            "plugin_args.windowed: no enabled plugin of that name takes arguments"
        )
        for name in ENGINE["model"]
        if name != "scripted"
    }
    | {
        (("stores", "memory"), ("eviction", "window")): (
            "kv_connector.use: 'stores': expected none, because .*window.* releases blocks"
        )
    }
    | {(("turns", "two"), ("completions", "three")): "n: expected 1 in a conversation"}
    | {
        (("stores", "memory"), ("group", "of three")): (
            r"members: expected none with a KV connector \(kv_connector.use\)"
        ),
    }
    | {
        (("processor", "that observes"), ("fork", "half way")): (
            "resumed.observed_logprobs: expected one per output token, because logits processor 'ob"
        )
    }
    | {
        pair: words
        for name in TAPPED
        for pair, words in (
            *(
                ((("model", model), ("taps", name)), "does not call ModelContext.hooks.added")
                for model in SCRIPTED
            ),
            ((("ranks", "pipeline"), ("taps", name)), "parallel.pipeline: expected 1 with act"),
        )
    }
)
"""Pairs that are refused, and the words of the refusal."""
NOT_COMPARED = {
    *((("model", name), ("ranks", "tensor")) for name in ENGINE["model"] if name not in SCRIPTED),
    *((("cache", name), ("ranks", "tensor")) for name in ("of int8", "of fp8")),
    *((("ranks", "tensor"), ("adapter", name)) for name in SCALES),
    *((("ranks", "tensor"), ("taps", name)) for name in TAPPED),
    (("ranks", "tensor"), ("prompt", "with an image")),
}
"""Pairs whose sums are rounded otherwise than alone.

`test_parallel_equality`, `test_adapters_together`, `test_taps_together`, `test_early_exit` and the
`test_equality` of encoders compare them.
"""
NO_FORKS = {(("turns", "two"), ("fork", "half way"))}
"""Turns of conversations have no forks: `test_forks` has how they are refused."""
NO_IMAGES = {
    (("eviction", "window"), ("prompt", "with an image")),
    (("prompt", "with an image"), ("group", "of three")),
}
"""A model with sliding windows releases no blocks, and a request with images has no members
(tests/process/test_refused_pairs.py)."""
NO_RELEASES = {(("eviction", "window"), ("group", "of three"))}
"""The request ends with an error (tests/builtin_plugins/test_released_blocks.py)."""
LIMITED = ("attention", "limited")
NOT_SCRIPTED = {
    tuple(sorted((LIMITED, pair), key=lambda level: [*ALL].index(level[0])))
    for model, pair in REFUSED
    if model == ("model", "scripted")
}
"""The scripted model alone has a backend with arguments, and refuses these."""
APART = REFUSED.keys() | NOT_COMPARED | NO_FORKS | NO_IMAGES | NO_RELEASES | NOT_SCRIPTED
SHORT = 40  # one row in so many is in the short run


def is_allowed(chosen: list[str]) -> bool:
    row = dict(zip(ALL, chosen, strict=False))
    pairs = itertools.combinations(row.items(), 2)
    return APART.isdisjoint(pairs) and not is_embedded_in_stages(row)


def is_embedded_in_stages(row: Mapping[str, str]) -> bool:
    """Return whether a later stage of the scripted model would need the ids of embeddings."""
    is_scripted = row.get("model") in SCRIPTED or row.get("attention") == "limited"
    return (
        is_scripted
        and row.get("ranks") == "pipeline"
        and row.get("prompt") in ("of embeddings", "of both")
    )


@functools.cache
def matrix() -> list[dict[str, str]]:
    """Return rows that cover each allowed pair of levels."""
    pairs = AllPairs([list(names) for names in ALL.values()], filter_func=is_allowed)
    rows = [dict(zip(ALL, row, strict=True)) for row in pairs]
    # Where pairs are refused, the library leaves out some of the others.
    while missing := sorted(allowed_pairs().difference(*map(pairs_of, rows))):
        row: dict[str, str] = {}
        for pair in missing:
            grown = row | dict(pair)
            whole = completed(grown)
            fits = APART.isdisjoint(pairs_of(whole)) and not is_embedded_in_stages(whole)
            if row.items() <= grown.items() and fits:
                row = grown
        assert row, f"no row has {missing[0]}"
        rows.append(completed(row))
    return rows


def completed(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row with the first level of each feature that it lacks; of models, a fitting one."""
    first = {feature: next(iter(names)) for feature, names in ALL.items()}
    model = {"model": "real"} if row.get("adapter") in SCALES else {}
    model |= {"model": "real"} if row.get("taps", "none") != "none" else {}
    model |= {"model": "real"} if row.get("speculator") == "head" else {}
    model |= {"model": "real"} if row.get("cache", "as computed") != "as computed" else {}
    model |= {"model": "of images"} if row.get("prompt") == "with an image" else {}
    model |= {"model": "real"} if is_embedded_in_stages({**first, **row}) else {}
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
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, dict) else value
    return result


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
    """Return the request of a row, two or three times, and others that join between them.

    The prompt of a conversation is a list of its parts.
    """
    others = varied_jobs(10)
    fields = merged(*(REQUEST[feature][row[feature]] for feature in REQUEST))
    fields.setdefault("max_tokens", 24)
    generator = random.Random(number)

    def drawn(longest: int) -> list[int]:
        token_ids = [generator.randrange(256) for _ in range(generator.randint(3, longest))]
        return [*token_ids, THINK] if row["thinking"] != "none" else token_ids

    prompt: Any = drawn(40)
    if row["turns"] == "two":
        prompt = [drawn(8), drawn(5)]
    if row["prompt"] == "with an image":
        prompt = [*prompt[:9], IMAGE, *prompt[-9:]]
    if row["tools"] == "required":  # room for a call
        fields["max_tokens"] += 20 if row["turns"] == "two" else 40
    count = 3 if row["prompt"] == "with an image" else 2
    subject = [(f"s{place}", prompt, SamplingParams(**fields, **FINAL)) for place in range(count)]
    return [*others[:3], subject[0], *others[3:7], *subject[1:], *others[7:]]


@dataclass(frozen=True)
class Fork:
    """Stands for the prompt of a fork: the id of its source, and the tokens that it begins with."""

    source: str
    tokens: list[int]


def fork_of(jobs: list[Job], expected: Mapping[str, Any]) -> Job:
    """Return a fork of the row's first request, with half of its tokens."""
    ((_, _, params),) = (job for job in jobs if job[0] == "s0")
    _, tokens, *_ = expected["s0"].outputs[0]
    return "f0", Fork("s0", tokens[: len(tokens) // 2]), params


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
        seeing = folder / "images"
        seeing.mkdir()
        (seeing / "config.json").write_text(json.dumps(image_config()))
        for model_folder in (real, windowed, seeing):
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (model_folder / name).write_bytes((scripted / name).read_bytes())
        self.folders = dict.fromkeys(ENGINE["model"], real)
        self.folders |= dict.fromkeys(SCRIPTED, scripted)
        self.folders |= {"with windows": windowed, "of images": seeing}
        self.poet = write_poet(folder / "poet")
        self.head = folder / "head"
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        write_random_head(self.head, SHAPE["vocab_size"], eagle_config=layers)
        ids = np.arange(SHAPE["vocab_size"], dtype=np.float32)
        table = np.random.default_rng(0).normal(0, 0.5, (len(ids), SHAPE["hidden_size"]))
        self.tables = dict.fromkeys(ENGINE["model"], table.astype(np.float32))
        self.tables |= dict.fromkeys(SCRIPTED, np.stack([ids, ids], 1))
        self.images = [image(0), image(1)]
        self.results: dict[str, Result] = {}
        self.engines: dict[tuple[str, ...], LLMEngine] = {}

    def config(self, row: Mapping[str, str], extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of an engine of a row's model, cache and sampler."""
        tables = merged(*(ENGINE[feature][row[feature]] for feature in PLAIN))
        tree = scripted_config(self.folders[row["model"]], merged(tables, extra))
        if row["model"] == "with states":
            tree["plugins"]["enable"][0] = {"use": HYBRID, "name": "ScriptedForCausalLM"}
        return tree

    def given(self, row: Mapping[str, str], jobs: list[Job]) -> list[Job]:
        """Return the requests with embeddings in place of ids, or images, where a row has some."""
        if row["prompt"] == "of ids":
            return jobs
        prepared = []
        for request_id, prompt, params in jobs:
            if not request_id.startswith("s"):
                prepared.append((request_id, prompt, params))
            elif row["turns"] == "two":
                parts = [self._given(row, request_id, part) for part in prompt]
                prepared.append((request_id, parts, params))
            else:
                prepared.append((request_id, self._given(row, request_id, prompt), params))
        return prepared

    def _given(self, row: Mapping[str, str], request_id: str, prompt: list[int]) -> Any:
        """Return a prompt of embeddings, or with the image of a request: every second has another.

        The ids that a prompt of both keeps are every third one, and the last one.
        """
        if row["prompt"] == "with an image":
            image = self.images[int(request_id[1:]) % 2]
            return {"prompt_token_ids": prompt, "multi_modal_data": {"image": [image]}}
        table, every = self.tables[row["model"]], row["prompt"] == "of embeddings"
        parts = [
            [token]
            if not every and (place % 3 == 1 or place == len(prompt) - 1)
            else table[[token]]
            for place, token in enumerate(prompt)
        ]
        return {"prompt_parts": parts}

    def alone(self, row: Mapping[str, str], jobs: list[Job]) -> dict[str, Any]:
        """Return the results of requests, each alone in a plain engine.

        Turns are requests there, with all tokens before them as their prompt.
        """
        results: dict[str, Any] = {}
        for request_id, prompt, params in jobs:
            if not (request_id.startswith("s") and row["turns"] == "two"):
                results[request_id] = self._alone(row, (request_id, prompt, params))
                continue
            results[request_id], before = [], []
            for part in prompt:
                before += part
                result = self._alone(row, (request_id, list(before), params))
                results[request_id].append(result)
                _, tokens, _, reason, *_ = result.outputs[0]
                if reason != "error":  # a turn that fails is undone
                    before += tokens
        return results

    def _alone(self, row: Mapping[str, str], job: Job) -> Result:
        extras = extras_of(row | {"priority": "of all"}, job[0], self.poet)
        form = (row["prompt"], job[0]) if row["prompt"] == "with an image" else row["prompt"]
        levels = [row[feature] for feature in PLAIN]
        key = repr((levels, form if job[0].startswith("s") else "", job[1:], extras))
        if key not in self.results:
            jobs = self.given(row | {"turns": "one"}, [job])
            (self.results[key],) = drive(self._plain(row), jobs, {job[0]: extras}).values()
        return self.results[key]

    def forked(self, row: Mapping[str, str], jobs: list[Job], fork: Job) -> Result:
        """Return the result of a fork that runs alone in a plain engine, after its source."""
        (source,) = (job for job in jobs if job[0] == fork[1].source)
        extras = extras_of(row | {"priority": "of all"}, source[0], self.poet)
        jobs_before = self.given(row, [source])
        driver = Driver(self._plain(row), {source[0]: extras, fork[0]: NO_EXTRAS})
        asyncio.run(driver.run(jobs_before, "nothing"))
        return asyncio.run(driver.run([fork], "nothing"))[fork[0]]

    def adapters(self) -> dict[str, Any]:
        """Return the configuration of an engine with the adapter of all real models."""
        paths = {"poet": self.poet.path}
        return {"adapters": {"max_loras": 1, "max_lora_rank": 4, "paths": paths}}

    def _plain(self, row: Mapping[str, str]) -> LLMEngine:
        name = tuple(row[feature] for feature in PLAIN)
        if name not in self.engines:
            is_scripted = row["model"] in SCRIPTED
            taps = [] if is_scripted else TAPS["enable"]
            evicting = [EVICTING] if row["model"] in EVICTABLE else []
            enabled = {"plugins": {"enable": [*PROCESSORS, OF_THE_BATCH, *taps, *evicting]}}
            adapters = {} if is_scripted else self.adapters()
            tree = self.config(row, merged(BASE, COMPACT, enabled, adapters))
            config = typed.convert(tree, EngineConfig, path="")
            self.engines[name] = build_engine(config, clock=ScriptedClock(tick=1e-6))
        return self.engines[name]


def image_config() -> dict[str, Any]:
    """Return the configuration of a Gemma 3 with images, of the shape of the other models."""
    windows = {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text = {"num_hidden_layers": 3, "max_position_embeddings": 512, "query_pre_attn_scalar": 16}
    vision = {
        **{"model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80},
        **{"num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 4},
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "initializer_range": 0.12,
        "eos_token_id": 256,
        "text_config": {"model_type": "gemma3_text", **SHAPE, **windows, **heads, **text},
        "vision_config": vision,
        "mm_tokens_per_image": 16,
        **{"boi_token_index": IMAGE, "eoi_token_index": IMAGE + 1, "image_token_index": IMAGE + 2},
    }


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
    """Run requests that join one after the other; do something else after some steps.

    One whose prompt is a list of parts is a conversation.
    """
    return asyncio.run(Driver(engine, extras).run(list(jobs), in_between))


class Driver:
    """Steps an engine, in which tasks of an event loop converse."""

    def __init__(self, engine: Any, extras: Mapping[str, RequestExtras]) -> None:
        self._engine, self._extras = engine, extras
        self._results: dict[str, Any] = {}
        self._sent: dict[str, EngineCoreRequest] = {}
        self._arrived: dict[str, collections.deque[RequestOutput]] = {}
        self._talks: list[asyncio.Task[None]] = []
        self._opened = OpenConversations(ConversationsConfig(), 128, ScriptedClock())

    async def run(self, waiting: list[Job], in_between: str) -> dict[str, Any]:
        """Return the results of all requests; of conversations, the results of each turn."""
        engine, steps = self._engine, 0
        while waiting or self._talks or engine.has_unfinished_requests():
            for job in waiting[:2]:
                self._join(*job)
            waiting = waiting[2:]
            for _ in range(10):  # a turn that has ended is followed by the next one at once
                await asyncio.sleep(0)
            for talk in [talk for talk in self._talks if talk.done()]:
                self._talks.remove(talk)
                talk.result()
            if engine.has_unfinished_requests():
                self._take(engine.step())
            steps += 1
            if steps in (4, 11):
                interfere(engine, in_between, steps)
        return self._results

    def _join(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        if is_conversation(prompt):
            talk = self._converse(request_id, prompt, params)
            self._talks.append(asyncio.ensure_future(talk))
            return
        extras = self._extras[request_id]
        if isinstance(prompt, Fork):
            source, extras = self._sent[prompt.source], self._extras[prompt.source]
            family = RequestForks(source, params, extras, ScriptedClock())
            prompt, extras = family.fork(prompt.tokens)
            params = None
        request = (request_id, prompt, params, extras)
        sent = functools.partial(self._sent.__setitem__, request_id)
        self._engine.add_requests([request], sent=sent)

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if (queue := self._arrived.get(output.request_id)) is not None:
                queue.append(output)
            elif output.finished and output.request_id != "more":
                self._results[output.request_id] = result_of(output)

    async def _converse(self, request_id: str, parts: Sequence[Any], params: Any) -> None:
        async def encode(text: str, is_first: bool) -> list[int]:
            raise AssertionError("the parts are token ids")

        async def abort(name: str) -> None:
            self._engine.abort_requests([name])

        talk = AsyncConversation(
            lambda: self._opened.open(request_id),
            SHAPE["vocab_size"],
            SamplingParams(),
            params,
            encode=encode,
            generate=self._turn,
            abort=abort,
        )
        turns = self._results[request_id] = []
        async with talk:
            for part in parts:
                async for output in talk.send(part):
                    turns.append(result_of(output))

    async def _turn(
        self, request_id: str, prompt: Any, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        queue = self._arrived[request_id] = collections.deque()
        self._engine.add_request(request_id, prompt, params, self._extras[request_id])
        while True:
            while not queue:
                await asyncio.sleep(0)
            output = queue.popleft()
            yield output
            if output.finished:
                return


def is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list | dict)


def interfere(engine: Any, action: str, step: int) -> None:
    match action:
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


@dataclass(frozen=True)
class Result:
    """Results of a request.

    Attributes:
        outputs: tokens and more of its completions.
        logprobs: log-probabilities of the prompt.
        parts: reasoning, content and calls of its completions.
        prompt: tokens of the prompt, as outputs have them: None stands for an embedding.
        arrays: what activation taps read, by completion and site: positions and content.
    """

    outputs: list[tuple[Any, ...]]
    logprobs: Any
    parts: list[tuple[Any, ...]]
    prompt: list[int | None]
    arrays: list[dict[str, tuple[list[int], bytes]]]


def result_of(output: RequestOutput) -> Result:
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
    read = [(c.part_arrays or {}).get("activation_taps", {}) for c in output.outputs]
    arrays = [
        {
            name: (array.positions.tolist(), array.values.tobytes())
            for name, array in part_arrays.items()
        }
        for part_arrays in read
    ]
    return Result(summary(output), prompt, parts, list(output.prompt_token_ids), arrays)


def told(jobs: list[Job], expected: Mapping[str, Any]) -> Iterator[list[list[int]]]:
    """Yield the prompts and the tokens that requests came to alone, a pair for each completion."""
    prompts = {request_id: prompt for request_id, prompt, _ in jobs}
    if "f0" in prompts:
        prompts["f0"] = prompts["s0"]
    for request_id in prompts:
        results = expected[request_id]
        for result in results if isinstance(results, list) else [results]:
            known = prompts[request_id] if None in result.prompt else result.prompt
            for _, tokens, *_ in result.outputs:
                yield [known, tokens]


def config_of(
    row: Mapping[str, str], jobs: list[Job], expected: Mapping[str, Any], models: Models
) -> dict:
    """Return the configuration of a row; scripted drafts are the requests' results alone."""
    enabled = [*PROCESSORS, OF_THE_BATCH] if row["processor"] == "of the batch" else PROCESSORS
    if row["taps"] != "none":
        enabled = [*enabled, *TAPS["enable"]]
    if row["eviction"] != "none":
        enabled = [*enabled, EVICTING]
    config = merged(BASE, {"plugins": {"enable": enabled}}, COMPACT, CANARY)
    levels = (ENGINE[feature][row[feature]] for feature in ENGINE if feature != "model")
    config = merged(config, *levels)
    if (row["model"], row["blocks"]) == ("with windows", "few"):
        config["kv_cache"]["num_blocks"] = 60  # three groups of layers share them
    if row["blocks"] == "few" and row["group"] != "none":  # whose requests run together
        config["kv_cache"]["num_blocks"] = 110 if row["model"] == "with windows" else 36
    if row["speculator"] in ("right", "wrong"):
        replies = {"replies": list(told(jobs, expected))}
        config = merged(config, {"plugin": {"scripted_speculator": replies}})
    if row["speculator"] == "model":
        folder = models.folders[row["model"]]
        config = merged(config, {"plugin": {"draft_model": {"model": str(folder)}}})
    if row["speculator"] == "head":
        config = merged(config, {"plugin": {"eagle3": {"model": str(models.head)}}})
    if row["adapter"] != "none":
        config = merged(config, models.adapters())
    return models.config(row, config)


ROWS = [
    pytest.param(number, marks=[] if number % SHORT == 0 else [pytest.mark.nightly])
    for number in range(len(matrix()))
]


@pytest.mark.parametrize("number", ROWS)
def test_a_row(models, number):
    check(models, matrix()[number], number)


def draw(drawn: random.Random) -> dict[str, str]:
    return {feature: drawn.choice(list(names)) for feature, names in ALL.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_random_rows(models, part):
    drawn = random.Random(part)
    for number in range(6):
        row = draw(drawn)
        while not is_allowed(list(row.values())):
            row = draw(drawn)
        check(models, row, 1000 + 6 * part + number)


def check(models: Models, row: Mapping[str, str], number: int) -> None:
    """Assert that the requests of a row have the results that each has alone."""
    if row["model"] not in SCRIPTED:
        needs_kernels()
    jobs = requests_of(row, number)
    expected = models.alone(row, jobs)
    if row["fork"] != "none":
        fork = fork_of(jobs, expected)
        expected[fork[0]] = models.forked(row, jobs, fork)
        if row["draws"] == "greedy":  # it goes on as its source has
            fork_tokens, source = (expected[name].outputs[0][1] for name in (fork[0], "s0"))
            assert fork_tokens == source, row
        jobs = [*jobs, fork]
    extras = {job[0]: extras_of(row, job[0], models.poet) for job in jobs}
    with LLM(config=config_of(row, jobs, expected, models)) as llm:
        results = drive(engine_of(llm), models.given(row, jobs), extras, row["in between"])
    wrong = [name for name in expected if results.get(name) != expected[name]]
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
        if row["fork"] != "none":
            jobs += [("f0", Fork("s0", [65]), params) for name, _, params in jobs if name == "s0"]
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
    ((reasoning, _, calls),) = models.alone(row, jobs)["s0"].parts
    assert reasoning
    assert [name for name, _ in calls] == ["f"]


@pytest.mark.parametrize(
    "level", [("adapter", "scaled"), ("prompt", "with an image")], ids=lambda level: level[0]
)
def test_a_fork_has_the_adapter_and_the_image_of_its_source(models, level):
    row = completed(dict([level, ("fork", "half way")]))
    check(models, row, 0)
    result, others = (
        models.alone(other, requests_of(other, 0))["s0"] for other in (row, completed({}))
    )
    assert result.outputs != others.outputs


def test_the_image_of_a_prompt_shows_in_results(models):
    needs_kernels()
    row = completed({"prompt": "with an image", "logprobs": "of the output"})
    results = models.alone(row, requests_of(row, 0))
    assert results["s0"].prompt == results["s1"].prompt
    assert results["s0"].prompt.count(IMAGE + 2) == 16
    assert results["s0"] == results["s2"]
    assert results["s0"].outputs != results["s1"].outputs


def test_turns_are_those_of_one_conversation(models):
    row = completed({"turns": "two"})
    jobs = requests_of(row, 0)
    first, second = models.alone(row, jobs)["s0"]
    (parts,) = (prompt for request_id, prompt, _ in jobs if request_id == "s0")
    assert first.prompt == parts[0]
    assert second.prompt == [*first.prompt, *first.outputs[0][1], *parts[1]]
