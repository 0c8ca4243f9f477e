"""Models with states give the same tokens, however requests are batched, cut and preempted."""

from __future__ import annotations

import pytest
from support.builtins.state_models import HybridModel, StateModel, state_config
from support.internals import engine_of, scheduler_of, worker_of

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.testing import scripted_config, write_scripted_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
# With common prefixes that end inside and at the end of blocks.
PROMPTS = ["a", "word " * 12, "word " * 12 + "and more", "x" * 32, "x" * 33, "word " * 25]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The tokens of the scripted model, which has no states."""
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted"))
    with LLM(config=scripted_config(folder)) as llm:
        return tokens(llm)


def tokens(llm, prompts=PROMPTS, params=GREEDY):
    return {out.prompt: out.outputs[0].token_ids for out in llm.generate(prompts, params)}


CONFIGS = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 7}},
    "small-blocks": {"kv_cache": {"block_size": 1}, "scheduler": {"max_num_batched_tokens": 19}},
    "no-prefix-caching": {"kv_cache": {"prefix_caching": False}},
    "asynchronous": {"scheduler": {"asynchronous": True, "max_num_batched_tokens": 40}},
    "preempted": {
        "kv_cache": {"block_size": 4, "num_blocks": 66},
        "max_model_len": 160,
        "scheduler": {"max_num_batched_tokens": 24},
    },
}


CASES = [pytest.param(HybridModel, name, id=f"hybrid-{name}") for name in CONFIGS]
CASES += [
    pytest.param(
        StateModel,
        name,
        id=f"states-{name}",
        marks=[] if name in ("chunks", "preempted") else [pytest.mark.nightly],
    )
    for name in CONFIGS
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_tokens_are_those_of_a_model_without_states(model, name, expected, tmp_path):
    with LLM(config=state_config(tmp_path, model, CONFIGS[name])) as llm:
        for _ in range(2):  # the second time with prefix hits
            assert tokens(llm) == expected
        for prompt in PROMPTS:
            assert tokens(llm, [prompt]) == {prompt: expected[prompt]}
        preempted = "num_preemptions_total 0" not in llm.metrics()
        assert preempted or name != "preempted"


def test_a_hit_ends_where_a_state_was_kept(tmp_path):
    """At the end of a step, of its last block, and of each block that fills while it generates."""
    with LLM(config=state_config(tmp_path, HybridModel, {"kv_cache": {"block_size": 8}})) as llm:
        first = llm.generate("x" * 30, GREEDY)[0]
        assert first.num_cached_tokens == 0
        again = [llm.generate("x" * count, GREEDY)[0].num_cached_tokens for count in (30, 24, 100)]
        assert again == [24, 0, 24]
        follow = [
            *first.prompt_token_ids,
            *first.outputs[0].token_ids,
        ]  # the last one was not computed
        assert llm.generate([follow], GREEDY)[0].num_cached_tokens == 48


def test_free_blocks_are_not_read(expected, tmp_path, monkeypatch):
    """Their states are overwritten before each step."""
    caches, filled = [], []
    allocate = CheckedAttention.allocate

    def allocated(self, num_blocks):
        caches[:] = allocate(self, num_blocks)
        return list(caches)

    monkeypatch.setattr(CheckedAttention, "allocate", allocated)
    extra = {"kv_cache": {"block_size": 4}, "scheduler": {"max_num_batched_tokens": 24}}
    with LLM(config=state_config(tmp_path, HybridModel, extra)) as llm:
        engine = engine_of(llm)
        pool, runner = scheduler_of(engine).context.kv_cache.pool, worker_of(engine).runner
        execute = runner.execute

        def fill(plan):
            (states,) = caches[-1]
            first = pool.num_blocks - len(states)
            states[[block - first for block in pool.empty_states]] = -7
            filled.append(len(pool.empty_states))
            return execute(plan)

        monkeypatch.setattr(runner, "execute", fill)
        for _ in range(2):
            assert tokens(llm) == expected
    assert min(filled) < max(filled)


def test_samples_of_one_prompt_continue_from_the_same_state(expected, tmp_path):
    params = SamplingParams(n=4, temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(config=state_config(tmp_path)) as llm:
        for output in llm.generate(PROMPTS, params):
            assert [one.token_ids for one in output.outputs] == [expected[output.prompt]] * 4


def test_states_are_lost_while_asleep(expected, tmp_path):
    with LLM(config=state_config(tmp_path)) as llm:
        assert tokens(llm) == expected
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm) == expected


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"speculation": {"use": ["ngram"]}}, "speculation: .* keeps states in some layers"),
        (
            {"kv_connector": {"stores": ["memory"]}},
            "kv_connector.use: .stores. moves blocks, and .* keeps states in some layers",
        ),
    ],
    ids=["speculation", "connector"],
)
def test_what_needs_more_of_states_is_refused_by_name(extra, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        LLM(config=state_config(tmp_path, HybridModel, extra))
