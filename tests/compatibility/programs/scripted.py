"""Runs frozen plugins of most kinds on the scripted model; fails if one does not.

Its argument is an empty folder.
"""

import json
import sys
from pathlib import Path

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

FOLDER = Path(sys.argv[1])
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TALK = "user: think\nassistant: "
ANSWER = '[[So be it]]Yes<call>{"name": "f", "arguments": {"a": 1}}</call>'
REPLIES = {TALK: ANSWER, f"tools: {json.dumps(TOOLS)}\n{TALK}": ANSWER}
MODEL = write_scripted_model(FOLDER / "model", REPLIES, max_position_embeddings=1024)
LENGTH = 10
FAULTS = []
LOGITS = [
    {"dry": {"allowed_length": 1, "multiplier": 20.0}},
    {"xtc": {"threshold": 0.01, "probability": 1.0}},
    {"mirostat": {"tau": 0.1, "eta": 1.0}},
    {"top_a": {"a": 0.9}},
    {"top_n_sigma": {"n": 0.1}},
    {},
]
DIGITS = {"regex": "[0-9]{4}", "backend": "compat_digits"}


class Opened:
    """An engine that notes its faults at the end."""

    def __init__(self, **extra):
        self.llm = LLM(config=scripted_config(MODEL, extra))

    def __enter__(self):
        return self.llm

    def __exit__(self, *_):
        health = self.llm.plugins.health()
        FAULTS.extend([*health.fallbacks.values(), *health.quarantined])
        self.llm.close()


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def sampled(plugin_args=(), **fields):
    given = {"max_tokens": LENGTH, "ignore_eos": True, "allowed_token_ids": list(range(97, 105))}
    return SamplingParams(**{**given, "plugin_args": dict(plugin_args), **fields})


def greedy(**fields):
    return SamplingParams(temperature=0.0, max_tokens=200, **fields)


def check_logits():
    enable = ["dry", "xtc", "mirostat", "acme_sampling:TopA", "acme_audit", "compat_hooks"]
    prompts = [[97 + n % 3, 98, 99] * (n + 2) for n in range(len(LOGITS))]
    params = [sampled(own, seed=n, temperature=2.0) for n, own in enumerate(LOGITS)]
    config = {
        "plugins": {"enable": enable},
        "sampler": {"use": "top_n_sigma"},
        "executor": {"use": "timed"},
        "plugin": {"timed": {"log": str(FOLDER / "steps.log")}},
    }
    with Opened(**config) as llm:
        together = tokens(llm.generate(prompts, params))
        jobs = zip(prompts, params, strict=True)
        alone = [tokens(llm.generate([prompt], [own]))[0] for prompt, own in jobs]
        usual = [sampled(seed=n, temperature=2.0) for n in range(len(prompts))]
        plain = tokens(llm.generate(prompts, usual))
    assert together == alone
    changed = [one != other for one, other in zip(together, plain, strict=True)]
    assert changed == [True] * 5 + [False], (together, plain)
    assert "tokens, " in (FOLDER / "steps.log").read_text()


def check_hooks():
    from compat_kinds.hooks import SEEN

    del SEEN[:]
    with Opened(plugins={"enable": ["compat_hooks"]}) as llm:
        assert len(tokens(llm.generate("x", sampled(seed=15)))[0]) == 3
        refused = [refusal(llm, sampled(seed=seed)) for seed in (13, 14)]
    assert [text.rpartition("seed: ")[2] for text in refused] == [
        "13 is not for us",
        "14 is not for us either",
    ], refused
    assert SEEN[0] == "engine_started"
    assert SEEN[-1] == "engine_closing"
    assert set(SEEN[1:-1]) == {"request_received", "step_planned", "request_finished"}


def refusal(llm, params, prompt="x"):
    try:
        output = llm.generate(prompt, params)[0].outputs[0]
    except ValueError as error:
        return str(error)
    return output.error


def check_scheduling():
    """Policies, eviction, events and the scheduler change no token, with a small cache."""
    prompts = [[97 + n] * 11 + [98] * n for n in range(8)]
    prompts += prompts[:4]
    params = [sampled(seed=n) for n in range(len(prompts))]
    tags = [{"tenant": "ab"[n % 2]} for n in range(len(prompts))]
    small = {"num_blocks": 20, "block_size": 4}
    variants = [
        {},
        {"scheduler": {"policy": "tenant_cap"}, "kv_cache": {"eviction": "lfu"}},
        {"scheduler": {"policy": "earliest_deadline"}, "kv_cache": {"eviction": "two_queues"}},
        {"kv_cache": {"eviction": "arc"}},
        {"scheduler": {"use": "compat_scheduler"}, "kv_cache": {"eviction": "arc"}},
    ]
    found = []
    for number, variant in enumerate(variants):
        config = {
            "max_model_len": 64,
            "kv_events": {"publishers": ["compat_publisher"]},
            "plugin": {
                "compat_publisher": {"path": str(FOLDER / f"events-{number}")},
                **({"tenant_cap": {"max_running": 2}} if number == 1 else {}),
            },
            **variant,
        }
        config["kv_cache"] = {**small, **variant.get("kv_cache", {})}
        with Opened(**config) as llm:
            both = [llm.generate(prompts, params, tags=tags) for _ in range(2)]
            found.append([tokens(outputs) for outputs in both])
            llm.reset_prefix_cache()
            llm.generate("x", sampled())
        lines = (FOLDER / f"events-{number}").read_text().splitlines()
        events = {json.loads(line)[0] for line in lines}
        assert events == {"stored", "removed", "cleared"}, events
    assert all(answers == found[0] for answers in found)


def check_text():
    """Grammar and parsers, with the default scheduler and the frozen one."""
    for scheduler in ("default", "compat_scheduler"):
        config = {
            "plugins": {"enable": ["compat_digits", "compat_brackets", "compat_calls"]},
            "reasoning": {"parser": "compat_brackets"},
            "tools": {"parser": "compat_calls"},
            "scheduler": {"use": scheduler},
        }
        with Opened(**config) as llm:
            params = [SamplingParams(structured=DIGITS, seed=n) for n in range(3)]
            texts = [output.outputs[0].text for output in llm.generate(["x"] * 3, params)]
            assert all(len(text) == 4 and text.isdigit() for text in texts), texts
            bad = SamplingParams(structured={**DIGITS, "regex": "[0-9]+"})
            error = refusal(llm, bad)
            assert "regex: expected a regex [0-9]{count}" in error, error
            messages = [[{"role": "user", "content": "think"}]]
            (answer,) = llm.chat(messages, greedy(), tools=TOOLS)[0].outputs
            assert (answer.reasoning, answer.content) == ("So be it", "Yes"), answer
            (call,) = answer.tool_calls
            assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})
            loud = greedy(plugin_args={"compat_brackets": {"shout": True}})
            (answer,) = llm.chat(messages, loud)[0].outputs
            assert answer.reasoning == "SO BE IT", answer


def check_transfers():
    """Blocks that a connector or a store keeps are found by the next engine."""
    prompts = [[97 + n] * 21 for n in range(3)]
    params = [sampled(seed=n) for n in range(3)]
    cache = {"kv_cache": {"num_blocks": 64, "block_size": 4}, "max_model_len": 64}
    with Opened(**cache) as llm:
        expected = tokens(llm.generate(prompts, params))
    kept = [
        ({"use": "layered_files"}, {"layered_files": {"path": str(FOLDER / "files")}}),
        ({"stores": ["sqlite"]}, {"sqlite": {"path": str(FOLDER / "blocks.db")}}),
    ]
    for connector, plugin in kept:
        found = []
        for _ in range(2):
            with Opened(kv_connector=connector, plugin=plugin, **cache) as llm:
                outputs = llm.generate(prompts, params)
                assert tokens(outputs) == expected, connector
                found.append([output.num_cached_tokens for output in outputs])
        assert found == [[0, 0, 0], [20, 20, 20]], (connector, found)


def check_ranks():
    """The executor of threads, whose ranks meet through the communicator."""
    prompts, params = [[97] * 5, [98] * 9], [sampled(seed=n) for n in range(2)]
    with Opened() as llm:
        expected = tokens(llm.generate(prompts, params))
    for parallel in ({"tensor": 2}, {"tensor": 2, "pipeline": 2}):
        parallel["communicator"] = "compat_threads"
        with Opened(executor={"use": "threads"}, parallel=parallel) as llm:
            assert tokens(llm.generate(prompts, params)) == expected


def check_command():
    from hardpoint.cli import main

    enable = 'plugins.enable=["compat_hooks"]'
    assert main(["--set", enable, "compat", "--model", "m", "hello"]) == 3


check_logits()
check_hooks()
check_scheduling()
check_text()
check_transfers()
check_ranks()
check_command()
assert FAULTS == [], FAULTS
