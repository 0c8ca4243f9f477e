"""The KV canary finds nothing where nothing is wrong, and changes no token."""

from __future__ import annotations

import pytest
from support.cases import nightly_but
from support.core.scripted_connector import Script, use
from support.driving import FINAL, run
from support.parallel import write_random_model
from support.waiting import wait_until

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.step_parts.kv_canary.checking import CanaryWorker
from hardpoint.builtin_plugins.step_parts.kv_canary.part import CanaryFindings
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.testing import scripted_engine

CANARY = {"debug": {"kv_canary": True}}
SMALL = {"max_model_len": 128, "kv_cache": {"block_size": 8, "num_blocks": 20}}
LEVELS = {
    "prefix cache": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "few blocks": SMALL | {"scheduler": {"max_num_seqs": 6}},
    "n-grams": {"speculation": {"use": ["ngram"]}},
    "stores": SMALL | {"kv_connector": {"stores": ["memory"]}},
    "ahead": {"scheduler": {"asynchronous": True}},
    "ahead in a process": {"executor": {"use": "multiproc"}, "scheduler": {"asynchronous": True}},
    "tensor ranks": {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}},
    "stages": {"executor": {"use": "multiproc"}, "parallel": {"pipeline": 2}},
}


@pytest.mark.parametrize(
    "level", nightly_but(LEVELS, "few blocks", "n-grams", "ahead in a process")
)
def test_tokens_are_those_without_it(open_engine, jobs, expected, level):
    engine = open_engine(CANARY | LEVELS[level])
    assert run(engine, jobs, per_step=3) == expected
    engine.call_utility("reset_prefix_cache")
    assert run(engine, jobs, per_step=3) == expected


def test_wrong_drafts_that_are_rejected_are_no_fault(open_engine, jobs, expected):
    replies = [[prompt, tokens] for name, prompt, _ in jobs for _, tokens, *_ in expected[name][0]]
    drafts = {
        "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False},
        "plugin": {"scripted_speculator": {"right": 0.6, "replies": replies}},
    }
    engine = open_engine(CANARY | drafts | SMALL)
    assert run(engine, jobs, per_step=3) == expected
    stats = engine.call_utility("scheduler_stats")
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("level", [1, 2])
def test_requests_that_were_kept_in_a_sleep_go_on(open_engine, jobs, expected, level):
    engine = open_engine(CANARY | LEVELS["stores"])
    assert run(engine, jobs[:4], per_step=3) == {x: expected[x] for x, *_ in jobs[:4]}
    for job in jobs[4:8]:
        engine.add_request(*job)
    for _ in range(3):
        engine.step()
    engine.call_utility("sleep", level, "keep")
    engine.call_utility("wake_up")
    left = run(engine, [])
    assert left
    assert left == {name: expected[name] for name in left}


def test_salts_share_nothing(open_engine):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **FINAL)
    engine = open_engine(CANARY)
    prompt, outputs = list(range(60)), []
    for number, salt in enumerate(["a", "b", "a", None]):
        engine.add_request(f"r{number}", prompt, params, extras=RequestExtras(cache_salt=salt))
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, True, False]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("bad", [False, True])
def test_blocks_that_were_loaded_or_could_not_be(open_engine, asynchronous, bad):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **FINAL)
    prompt = [7] * 3 + list(range(30))
    jobs = [("a", prompt, params), ("b", [*prompt[:20], 9, 9, 9, 9, 9, 9], params)]
    script = use(Script(asynchronous=asynchronous))
    connector = {"kv_connector": {"use": "support.core.scripted_connector:ScriptedConnector"}}
    engine = open_engine(CANARY | SMALL | connector)
    wanted = run(engine, jobs)
    engine.call_utility("reset_prefix_cache")
    script.bad = {sorted(script.kept)[1]} if bad else set()
    assert run(engine, jobs) == wanted
    assert "worker.wait_for_save" in script.calls


@pytest.mark.parametrize("on", [True, False])
def test_nothing_is_built_unless_it_is_on(scripted, on, monkeypatch):
    built = []
    for cls in (CanaryFindings, CanaryWorker):
        monkeypatch.setattr(cls, "close", lambda self: built.append(self), raising=False)
    scripted_engine(scripted, CANARY if on else None).close()
    assert len(built) == 2 * on


LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("groups", [True, False])
def test_windows_and_layers(tmp_path, groups):
    fields = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": len(LAYERS),
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": LAYERS,
    }
    folder = write_random_model(tmp_path / "qwen2", "Qwen2ForCausalLM", **fields)
    config = {
        "dtype": "float32",
        "device": "cpu",
        "load": {"use": "dummy"},
        "max_model_len": 136,
        "kv_cache": {"block_size": 8, "window_groups": groups, "num_blocks": 60, "watermark": 0.0},
        "scheduler": {"max_num_batched_tokens": 24},
        **CANARY,
    }
    if not groups:
        layers = {"plugin": {"stores": {"layer_groups": 4}}}
        config |= {"kv_connector": {"stores": ["memory"]}} | layers
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=1, n=3)
    prompts = [
        {"prompt_token_ids": [(7 * count + i) % 250 for i in range(count)]} for count in (3, 40, 90)
    ]
    with LLM(str(folder), config=config, progress=False) as llm:
        first = [[c.token_ids for c in x.outputs] for x in llm.generate(prompts, params)]
        llm.reset_prefix_cache()
        again = [[c.token_ids for c in x.outputs] for x in llm.generate(prompts, params)]
        stats = llm.engines.scheduler_stats()
        if not groups:  # blocks are stored in threads
            wait_until(lambda: num_loaded(llm, prompts, params), what="stored blocks")
    assert all(len(tokens) == 24 for tokens_of in first for tokens in tokens_of)
    assert len(again) == len(first)
    assert (stats.num_preemptions > 0) or not groups


def num_loaded(llm, prompts, params):
    """Run prompts; return how many tokens were loaded from a store so far."""
    llm.reset_prefix_cache()
    llm.generate(prompts, params)
    return llm.engines.scheduler_stats().external_prefix_cache.hit_tokens
