"""Requests that go on at another engine, at every output: the same tokens, bit for bit.

What came is what a client has of an engine that was lost; the next engine gets it over the wire.
"""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest
from support.adapters import lora, write_adapter, write_model
from support.driving import FINAL, alone, drafting, summary, varied_jobs
from support.engines import build_engine
from support.internals import engine_of
from support.parallel import write_random_model
from support.resuming import at_every_output, place_of, run_moving
from support.waiting import HeldSteps

from hardpoint import LLM, AsyncLLM, RequestOutputKind, SamplingParams, typed
from hardpoint.core.frontend.requests.input_processor import NO_EXTRAS, RequestExtras
from hardpoint.kernels import cpu
from hardpoint.plugins import EngineConfig, RepetitionDetection
from hardpoint.testing import scripted_engine, write_scripted_model

NIGHTLY = pytest.mark.nightly
TIGHT = {  # requests are preempted, and prompts computed in pieces
    "max_model_len": 128,
    "kv_cache": {"block_size": 8, "num_blocks": 40},
    "scheduler": {"max_num_batched_tokens": 48},
}
HERE = "support.plugins.observing"
OBSERVING = [f"{HERE}:{name}" for name in ("Follows", "Exact", "Bytes")]
FORMS = [f"support.plugins.parallel_forms:{name}" for name in ("Waves", "NotAgain", "Tide")]
GRAMMARS = {
    "plugin": {"llguidance": {"max_whitespace": 0}},
    "reasoning": {"parser": "think_tags"},
    "tools": {"parser": "hermes"},
}
POINT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "size": {"enum": ["ab", "cd"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
REPLIES = {
    "why": "Hm. <think>" + "a" * 20 + "</think>because",
    "emoji": "go 😀🇩🇪 on é",
    "call": f"<think>hm</think>so {CALL}!",
    "calls": CALL + CALL,
    "again": "ab" * 30,
}
TOOLS = RequestExtras(tools={"add": {"type": "object"}})


def used(plugin_args, **fields):
    defaults = {"temperature": 1.0, "seed": 3, "max_tokens": 14, "ignore_eos": True}
    return SamplingParams(**defaults | fields, plugin_args=plugin_args, **FINAL)


OBSERVED = [
    ("greedy", [1, 2, 3], used({"follows": {}}, temperature=0.0)),
    ("seeded", [4] * 30, used({"follows": {}}, n=2)),
    ("both", [5] * 9, used({"follows": {}, "bytes": {}}, top_p=0.9)),
    ("logprobs", [6], used({"follows": {}}, logprobs=2, temperature=0.7)),
    ("exact", [7] * 20, used({"exact": {}})),
]
IN_FORMS = [
    ("waves", [1] * 9, used({"waves": {"width": 5}})),
    ("sparse", [2] * 9, used({"not_again": {}, "waves": {}}, temperature=0.0)),
    ("batch", [3] * 9, used({"tide": {"height": 3.0}})),
    ("all", [4] * 9, used({"tide": {}, "waves": {}, "not_again": {}}, n=2)),
]
STRUCTURED = [
    ("json", [7] * 20, {"structured": {"json": POINT}, "temperature": 1.0, "seed": 3, "n": 2}),
    ("choice", [8], {"structured": {"choice": ["red", "reddish", "grey"]}, "seed": 4}),
    ("regex", [9] * 3, {"structured": {"regex": "(ab|c)*"}, "seed": 8, "stop": "cc"}),
    ("longer", [9], {"structured": {"regex": "[a-f]{2,30}"}, "seed": 6, "min_tokens": 12}),
    ("biased", [3], {"structured": {"regex": "[0-9]{4,}"}, "seed": 9, "bad_words": ["12"]}),
    ("thinking", "why", {"structured": {"json": POINT}, "seed": 2, "thinking_token_budget": 6}),
]
SPOKEN = [
    ("budget", "why", {"thinking_token_budget": 5, "temperature": 1.0, "seed": 3}),
    ("character", "emoji", {"temperature": 0.0}),
    ("stop", "emoji", {"temperature": 0.0, "stop": ["🇩🇪 o", "é"]}),
    ("stop later", "again", {"temperature": 0.0, "stop": "abab", "min_tokens": 11}),
    (
        "repetition",
        "again",
        {"repetition_detection": RepetitionDetection(max_pattern=8, min_pattern=2, min_count=3)},
    ),
    ("call", "call", {"temperature": 0.0}),
    ("calls", "calls", {"temperature": 0.0}),
]


def of(jobs, **fields):
    return [
        (name, prompt, SamplingParams(**{"max_tokens": 40} | job_fields | fields, **FINAL))
        for name, prompt, job_fields in jobs
    ]


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("talking"), REPLIES)


def whole(output):
    """All that must be equal of an output."""
    parsed = [
        (c.reasoning, c.content, c.warning, [(t.name, t.arguments) for t in c.tool_calls or ()])
        for c in output.outputs
    ]
    prompt = output.prompt_logprobs and [
        place and {token: (logprob.logprob, logprob.rank) for token, logprob in place.items()}
        for place in output.prompt_logprobs
    ]
    experts = [
        c.routed_experts if c.routed_experts is None else c.routed_experts.tolist()
        for c in output.outputs
    ]
    return summary(output), parsed, prompt, experts


def each_alone(engine, jobs, extras):
    outputs = {}
    for job in jobs:
        engine.add_request(*job, extras)
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
    engine.close()
    return outputs


def check_moved(
    folder,
    extra,
    jobs,
    *,
    first=None,
    extras=NO_EXTRAS,
    moves=place_of,
    most=True,
    open_engine=scripted_engine,
):
    """Move each job at every output to another engine; return the client with all outputs.

    Args:
        first: settings of a first engine, where they are others.
        most: whether most of them move; with drafts, an output has several tokens.
    """
    expected = each_alone(open_engine(folder, extra), jobs, extras)
    moved = [
        moved_job
        for job in jobs
        for moved_job in at_every_output(
            job, max(len(c.token_ids) for c in expected[job[0]].outputs)
        )
    ]
    engines = [open_engine(folder, settings or extra) for settings in (first, None)]
    results, client = run_moving(engines, moved, moves, extras)
    for name, output in results.items():
        assert whole(output) == whole(expected[name.rpartition("@")[0]]), name
    assert len(results) == len(moved)
    assert client.num_moves >= (0.8 if most else 0.3) * len(moved)
    for engine in engines:
        assert not engine.has_unfinished_requests()
        stats = engine.call_utility("scheduler_stats")
        assert stats.kv_cache_usage == 0
        client.num_preemptions += stats.num_preemptions
        engine.close()
    return client


RANKS = {"executor": {"use": "multiproc"}}
SETTINGS = {
    "one rank": {},
    "tensor 2": RANKS | {"parallel": {"tensor": 2}},
    "pipeline 2": RANKS | {"parallel": {"pipeline": 2}},
    "ahead": RANKS | {"scheduler": {"asynchronous": True, "max_num_batched_tokens": 48}},
    "stores": {
        "kv_connector": {"stores": ["memory"]},
        "plugin": {"memory": {"size_bytes": 1 << 22}},
    },
    "canary": {"debug": {"kv_canary": True}},
}


@pytest.mark.parametrize(
    "more",
    [pytest.param(SETTINGS[n], id=n, marks=[NIGHTLY] if SETTINGS[n] else []) for n in SETTINGS],
)
def test_every_feature_of_sampling(scripted, more):
    client = check_moved(scripted, TIGHT | more, varied_jobs(10))
    assert client.num_preemptions > 0


def test_observed_logprobs(scripted):
    settings = {"kv_cache": {"block_size": 8, "num_blocks": 24}, "max_model_len": 64}
    settings |= {"plugins": {"enable": OBSERVING}}
    assert check_moved(scripted, settings, OBSERVED).num_preemptions > 0


@NIGHTLY
def test_observed_logprobs_of_drafts(scripted):
    """Several tokens in an output, each with its own."""
    enable, jobs = OBSERVING[:2], [job for job in OBSERVED if job[0] != "both"]
    engine = scripted_engine(scripted, {"plugins": {"enable": enable}})
    drafts = drafting(jobs, alone(engine, jobs), enable)
    engine.close()
    client = check_moved(scripted, TIGHT | drafts, jobs, most=False)
    lengths = {len(o.observed_logprobs or ()) for out in client.outputs.values() for o in out}
    assert max(lengths) > 2


def test_every_form_of_processor(scripted):
    check_moved(scripted, TIGHT | {"plugins": {"enable": FORMS}}, IN_FORMS)


@pytest.mark.nightly
def test_grammars(talking):
    check_moved(talking, TIGHT | GRAMMARS, of(STRUCTURED))


def test_thinking_characters_stop_strings_repetition_and_calls(talking):
    jobs = of(SPOKEN)
    client = check_moved(talking, TIGHT | GRAMMARS, jobs, extras=TOOLS)
    ends = {name.partition("@")[0]: o[-1].finish_reason for name, o in client.outputs.items()}
    assert str(ends["repetition"]) == "repetition"


def test_what_is_sent_once(scripted):
    """Also where the prompt is not complete yet."""
    options = {"prompt_logprobs": 1, "logprobs": 1, "seed": 4}
    params = SamplingParams(**options, max_tokens=5, ignore_eos=True, **FINAL)
    jobs = [("r", list(range(100)), params), ("short", [1], params)]
    extra = TIGHT | {
        "scheduler": {"max_num_batched_tokens": 17},
        "stats": {"request_metrics": True},
    }

    def moves(name):
        return [2 * place for place in place_of(name)]

    client = check_moved(scripted, extra, jobs, moves=moves)
    for name, outputs in client.outputs.items():
        length = 100 if name.startswith("r") else 1
        assert sum(len(o.prompt_logprobs or ()) for o in outputs) == length
        assert len([o for o in outputs if o.num_cached_tokens is not None]) == 1
        assert len([o for o in outputs if o.prefill_stats is not None]) == 1
        assert sum(len(o.new_token_ids) for o in outputs) == 5
    assert any(o.prompt_logprobs and not o.new_token_ids for o in client.outputs["r@1"])


def open_random(folder, extra):
    """An engine on a real model with random weights."""
    table = {"model": str(folder), "device": "cpu", "dtype": "float32", "load": {"use": "dummy"}}
    return build_engine(typed.convert(table | extra, EngineConfig, path=""))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"speculation": {"use": ["ngram"], "adaptive": False}}, id="drafts", marks=NIGHTLY
        ),
        pytest.param(
            {"kv_cache": {"block_size": 8, "prefix_caching": False}}, id="no cache", marks=NIGHTLY
        ),
    ],
)
def test_a_real_model(tmp_path_factory, more):
    """Log-probabilities are equal only if the logits are, bit for bit."""
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(f"torch gives other last bits in other batches, and the kernels: {cause}")
    folder = write_random_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")
    used = {"follows": {}}
    jobs = [
        ("greedy", [11 * n % 256 for n in range(40)], {"temperature": 0.0, "logprobs": 2}),
        ("seeded", [4] * 30, {"seed": 3, "logprobs": 1, "presence_penalty": 0.5}),
        ("observed", [5] * 9, {"seed": 4, "logprobs": 1, "plugin_args": used}),
        ("structured", [6] * 20, {"seed": 5, "structured": {"json": POINT}, "prompt_logprobs": 1}),
    ]
    extra = TIGHT | {"plugins": {"enable": [f"{HERE}:Follows"]}} | more
    jobs = of(jobs, max_tokens=9)
    check_moved(folder, extra, jobs, most=not more.get("speculation"), open_engine=open_random)


HYBRID = {
    **{"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"shared_expert_intermediate_size": 40, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}


HYBRID_JOBS = [
    ("greedy", [11 * n % 256 for n in range(70)], {"temperature": 0.0}),
    ("seeded", [4] * 30, {"seed": 3, "temperature": 0.8, "n": 2}),
    ("short", [5], {"seed": 4, "presence_penalty": 0.5}),
]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A model that has no two tokens nearly as good as each other in the jobs above.

    The last bits of its logits depend on where an engine went on: a state that was computed token
    by token is computed from many tokens at once there.
    """
    folder = tmp_path_factory.mktemp("hybrid")
    return write_random_model(folder, "Qwen3NextForCausalLM", **HYBRID)


@NIGHTLY
def test_layers_with_states(hybrid):
    jobs = of(HYBRID_JOBS, max_tokens=20)
    client = check_moved(hybrid, TIGHT, jobs, open_engine=open_random)
    assert client.num_preemptions > 0


@pytest.mark.nightly
def test_layers_with_states_of_an_engine_that_dies(hybrid, tmp_path):
    held = HeldSteps(tmp_path)
    jobs = of(HYBRID_JOBS, max_tokens=60, ignore_eos=True)
    expected = each_alone(open_random(hybrid, {}), jobs, NO_EXTRAS)
    options = {"output_kind": RequestOutputKind.DELTA, "plugin_args": held.slow(0.2)}

    async def tokens(llm, prompt, params, running):
        token_ids = [[] for _ in range(params.n)]
        async for output in llm.generate({"prompt_token_ids": prompt}, params):
            for part in output.outputs:
                token_ids[part.index] += part.token_ids
            running.set()
        return token_ids, output.num_resumes

    async def main():
        settings = {"model": str(hybrid), "device": "cpu", "dtype": "float32"}
        settings |= {"load": {"use": "dummy"}, "engine": {"in_process": False}}
        settings |= {"plugins": {"enable": ["support.plugins.slow:Slow"]}}
        async with AsyncLLM(config=settings, restart="on_failure") as llm:
            events = [asyncio.Event() for _ in jobs]
            tasks = [
                asyncio.create_task(
                    tokens(llm, prompt, msgspec.structs.replace(params, **options), event)
                )
                for (_, prompt, params), event in zip(jobs, events, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in events))
            os.kill(llm.engines.pid, signal.SIGKILL)
            held.let_go()
            return await asyncio.gather(*tasks)

    for (name, _, _), (token_lists, num_resumes) in zip(jobs, asyncio.run(main()), strict=True):
        assert token_lists == [list(c.token_ids) for c in expected[name].outputs]
        assert num_resumes >= 1


@NIGHTLY
@pytest.mark.parametrize("policy", ["fair", "priority", "shortest_first"])
def test_several_moves(scripted, policy):
    """Each fifth output, to and fro."""
    jobs, extra = varied_jobs(10)[::2], TIGHT | {"scheduler": {"policy": policy}}
    client = check_moved(scripted, extra, jobs, moves=lambda name: range(place_of(name)[0], 40, 5))
    assert client.num_moves > 2 * len(client.outputs)


@NIGHTLY
@pytest.mark.parametrize("made_in", ["engine", "worker"])
def test_drafts(scripted, made_in):
    jobs = varied_jobs(6)
    engine = scripted_engine(scripted)
    expected = alone(engine, jobs)
    engine.close()
    drafts = drafting(jobs, expected, made_in=made_in)
    check_moved(scripted, TIGHT | drafts, jobs, first=TIGHT)


HEAD = pytest.param("support.plugins.heads:ExactHead", id="head", marks=NIGHTLY)


@pytest.mark.parametrize("use", ["ngram", pytest.param("suffix", marks=NIGHTLY), HEAD])
def test_speculators_and_their_figures(talking, use):
    table = {"use": [use], "adaptive": False, "num_draft_tokens": 3}
    jobs = of([("again", "again", {"temperature": 0.0}), ("why", "why", {"temperature": 0.0})])
    jobs = [
        (n, p, msgspec.structs.replace(params, include=["speculation"])) for n, p, params in jobs
    ]
    client = check_moved(talking, TIGHT | {"speculation": table}, jobs, most=False)
    for outputs in client.outputs.values():
        figures = [o.part_figures["speculation"] for o in outputs if o.part_figures]
        drafts = [figure["num_drafts"] for figure in figures]
        assert drafts == sorted(drafts)
        assert drafts[-1] > 5
        accepted = figures[-1]["num_accepted_drafts"]
        assert accepted == sum(figures[-1]["num_accepted_by_position"])
        # Those of the last step may go past max_tokens. None is counted twice.
        assert accepted + figures[-1]["num_verified_drafts"] <= 40 + 3


MIXTURE = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def test_routed_experts(tmp_path_factory):
    """Each position once, in order."""
    folder = write_random_model(tmp_path_factory.mktemp("mix"), "Qwen3MoeForCausalLM", **MIXTURE)
    options = {"routed_experts": True, "seed": 3, "ignore_eos": True}
    jobs = of([("long", [11 * n % 256 for n in range(60)], options), ("short", [4], options)])
    jobs = [(n, p, msgspec.structs.replace(params, max_tokens=8)) for n, p, params in jobs]
    extra = TIGHT | {"kv_cache": {"block_size": 8, "num_blocks": 40, "prefix_caching": False}}
    client = check_moved(folder, extra, jobs, open_engine=open_random)
    for outputs in client.outputs.values():
        assert sum(o.routed_experts is not None for o in outputs) > 1


@NIGHTLY
def test_adapters(tmp_path_factory):
    base = tmp_path_factory.mktemp("adapters")
    write_adapter(base / "adapter", write_model(base / "model"), seed=1, r=4, lora_alpha=4)
    extra = TIGHT | {"adapters": {"max_loras": 2, "max_lora_rank": 8}}
    jobs = of([("r", [3, 1, 4, 1, 5] * 4, {"seed": 5, "logprobs": 2, "max_tokens": 12})])
    table = {"model": str(base / "model"), "device": "cpu", "dtype": "float32"}
    llms, added = [], []

    def open_model(_folder, extra):
        llms.append(LLM(config=table | extra))
        added.append(llms[-1].adapters.add(lora("a", 1, base / "adapter")))
        return engine_of(llms[-1])

    open_model(base / "model", extra).close()
    extras = RequestExtras(lora_request=added[0])
    check_moved(base / "model", extra, jobs, extras=extras, open_engine=open_model)
