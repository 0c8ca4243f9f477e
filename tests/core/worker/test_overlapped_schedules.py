"""Overlapped steps of a model with adapters and drafts, in random schedules with live changes."""

from __future__ import annotations

import random

import pytest
from support.adapters import write_adapter, write_model
from support.driving import FINAL, summary
from support.internals import engine_of
from support.plugins.late_ops import LateOps
from support.searching import searches_long

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.step_parts.adapters.identity import content_hash, read_files
from hardpoint.core.frontend.requests.input_processor import NO_EXTRAS, RequestExtras
from hardpoint.kernels import cpu
from hardpoint.plugins import LoRARequest
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import scripted_config

NUM_ENGINES = 100 if searches_long() else 2
PER_ENGINE = 4 if searches_long() else 10  # plain steps have a thousand: test_overlapped_steps
HERE = "support.broken.processors"
BIAS, COUNTER = f"{HERE}:Bias", f"{HERE}:Counter"
SPECULATION = {
    "none": {},
    "ngram": {"speculation": {"use": ["ngram"], "adaptive": False}},
    "suffix": {"speculation": {"use": ["suffix"]}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a model, and its adapters."""
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(f"sums depend on the other rows of a step without kernels, and they: {cause}")
    base = tmp_path_factory.mktemp("overlapped")
    model = write_model(base / "model")
    adapters = []
    for index in range(2):
        path = str(base / f"adapter{index}")
        write_adapter(base / f"adapter{index}", model, seed=index, r=2 + index, lora_alpha=4)
        content = content_hash(*read_files(path))
        adapters.append(LoRARequest(f"a{index}", index + 1, path, content))
    return base / "model", adapters


def opened(folders, tables):
    tables = {
        "attention": {"use": "native_cpu"},
        "adapters": {
            "max_loras": 2,
            "max_lora_rank": 4,
            "paths": {adapter.name: adapter.path for adapter in folders[1]},
        },
        "max_model_len": 128,
        **tables,
        "kv_cache": {"block_size": 8, **tables.get("kv_cache", {})},
    }
    config = scripted_config(folders[0], tables)
    config["load"] = {"use": "auto"}
    config["plugins"] = {"enable": [BIAS]}
    return LLM(config=config)


def drawn_job(draw, name, adapters):
    pattern = [draw.randrange(256) for _ in range(draw.randint(1, 6))]
    prompt = (pattern * 20)[: draw.randint(1, 50)]
    fields = {"max_tokens": draw.randint(2, 20), "temperature": draw.choice([0.0, 0.8])}
    fields["seed"] = draw.randrange(100)
    if draw.random() < 0.2:
        fields["repetition_penalty"] = 1.2
    if draw.random() < 0.3:
        fields["logprobs"] = 2
    if draw.random() < 0.3:
        fields["stop_token_ids"] = list(range(draw.randrange(9), 256, 9))
    if draw.random() < 0.2:
        fields["structured"] = StructuredOutputs(regex="(yes|no|maybe)+")
    if draw.random() < 0.2:
        fields["plugin_args"] = {"bias": {"by": 2.0}}
    if draw.random() < 0.1:
        fields["prompt_logprobs"] = 1
    adapter = draw.choice([None, *adapters])
    extras = NO_EXTRAS if adapter is None else RequestExtras(lora_request=adapter)
    return name, prompt, SamplingParams(**fields, **FINAL), extras


def ended(outputs):
    """Return the results of requests that ended and were not aborted."""
    return {
        output.request_id: (summary(output), str(output.prompt_logprobs))
        for output in outputs
        if output.finished and all(c.finish_reason != "abort" for c in output.outputs)
    }


def step_by_step(llm, jobs):
    engine, results = engine_of(llm), {}
    for job in jobs:
        engine.add_request(*job)
    while engine.has_unfinished_requests():
        results |= ended(engine.step())
    return results


def run_schedule(llm, jobs, draw):
    """Run jobs that join at random between aborts and live changes of plugins."""
    engine, waiting, live, results = engine_of(llm), list(jobs), [], {}
    has_counter = False
    while waiting or engine.has_unfinished_requests():
        choice = draw.random()
        if choice > 0.7 and waiting:
            live.append(engine.add_request(*waiting.pop(0)))
        elif choice < 0.02 and live:
            engine.abort_requests(live.pop(draw.randrange(len(live))))
        elif choice < 0.04:
            change = {"disable": ["counter"]} if has_counter else {"enable": [COUNTER]}
            llm.plugins.change(**change)
            has_counter = not has_counter
        elif choice < 0.06:
            engine.call_utility("reset_prefix_cache", draw.random() < 0.5)
        else:
            results |= ended(engine.step())
    if has_counter:
        llm.plugins.change(disable=["counter"])
    return results


@pytest.mark.parametrize("first", range(0, 10 * NUM_ENGINES, 10))
def test_random_schedules_with_adapters_and_drafts(folders, first):
    draw = random.Random(first)
    speculation = draw.choice(["none", "ngram", "suffix"])
    tables = {
        "ops": {"use": "support.plugins.late_ops:LateOps"},
        "kv_cache": {"num_blocks": draw.choice([20, 24, 40])},
        "scheduler": {
            "asynchronous": True,
            "max_num_batched_tokens": draw.choice([24, 48, 96]),
        },
        **SPECULATION[speculation],
    }
    num_ended = 0
    with opened(folders, {}) as plain, opened(folders, tables) as llm:
        for seed in range(first, first + PER_ENGINE):
            draw = random.Random(seed)
            jobs = [drawn_job(draw, f"{seed}-{index}", folders[1]) for index in range(8)]
            expected = step_by_step(plain, jobs)
            results = run_schedule(llm, jobs, draw)
            assert results == {name: expected[name] for name in results}, f"seed {seed}"
            num_ended += len(results)
        stats = llm.engines.scheduler_stats()
        assert stats.kv_cache_usage == 0
        assert stats.num_drafts > 0 or speculation == "none"
        assert LateOps.opened[-1].num_overlaps > 5 or speculation != "none"
    assert num_ended > 3 * PER_ENGINE
