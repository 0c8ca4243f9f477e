"""Parts that scatter embeddings and change linear layers: bit for bit, alone and in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.searching import kit_examples

from hardpoint import LLM, SamplingParams
from hardpoint.errors import PluginContractError
from hardpoint.plugins import AttentionContext, AttentionStep, EngineCoreRequest, KVSpec
from hardpoint.testing import (
    HistoryAttention,
    ScriptedAdapters,
    ScriptedEmbeddings,
    ScriptedModel,
    StepPartSuite,
    scripted_config,
    write_scripted_model,
)

pytest_plugins = ["hardpoint.testing"]

PROMPT = list(range(40, 90))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)


def use(part):
    return {"use": f"{part.__module__}:{part.__name__}"}


PARTS = {"plugins": {"enable": [use(ScriptedEmbeddings), use(ScriptedAdapters)]}}
STACKS = {
    "defaults": {},
    "chunks-of-16": {"scheduler": {"max_num_batched_tokens": 16}},
    "blocks-of-4": {"kv_cache": {"block_size": 4}},
    "no-prefix-cache": {"kv_cache": {"prefix_caching": False}},
    "preempting": {
        "max_model_len": 128,
        "kv_cache": {"block_size": 8, "num_blocks": 20},
        "scheduler": {"max_num_batched_tokens": 48},
    },
    "ranks": {"parallel": {"tensor": 2}, "executor": {"use": "multiproc"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("model"))


def open_llm(folder, extra=None, **engine):
    config = {**PARTS, "engine": {"in_process": True, **engine}, **(extra or {})}
    return LLM(config=scripted_config(folder, config))


def jobs():
    """Requests with neither part, with one and with both: prompt, params, tags."""
    for params in (GREEDY, SEEDED):
        for prompt in (PROMPT, [*PROMPT[:20], 7, 7], PROMPT[:3]):
            yield prompt, params, {}
            yield prompt, params, {"adapter": "7"}
            yield prompt, params, {"adapter": "1000"}
            yield prompt, params, {"embeddings": "1:70,71"}
            yield prompt, params, {"embeddings": "2:70", "adapter": "7"}


def complete(llm, some):
    prompts, params, tags = zip(*some, strict=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(prompts, list(params), tags=list(tags))
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone(folder):
    with open_llm(folder, {"kv_cache": {"prefix_caching": False}}) as llm:
        return [complete(llm, [job])[0] for job in jobs()]


@pytest.mark.parametrize("extra", STACKS.values(), ids=STACKS)
def test_batched_equals_alone(folder, alone, extra):
    with open_llm(folder, extra) as llm:
        assert complete(llm, jobs()) == alone
        assert (
            complete(llm, reversed(list(jobs()))) == alone[::-1]
        )  # what is shared is in the cache


@pytest.mark.nightly
def test_an_engine_process_gives_the_same(folder, alone):
    with open_llm(folder, in_process=False) as llm:
        assert complete(llm, jobs()) == alone


def test_embeddings_are_those_of_the_tokens_that_they_stand_for(folder):
    with open_llm(folder) as llm:
        plain = complete(llm, [([40, 70, 71, *PROMPT[3:]], GREEDY, {})])
        assert complete(llm, [(PROMPT, GREEDY, {"embeddings": "1:70,71"})]) == plain
        assert complete(llm, [(PROMPT, GREEDY, {})]) != plain


def test_an_adapter_changes_its_own_requests_alone(folder):
    with open_llm(folder) as llm:
        plain = complete(llm, [(PROMPT, GREEDY, {})])
        assert complete(llm, [(PROMPT, GREEDY, {"adapter": "0"})]) == plain
        assert complete(llm, [(PROMPT, GREEDY, {"adapter": "7"})]) != plain
        assert complete(llm, [(PROMPT, GREEDY, {})]) == plain


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (
            {"embeddings": "60:1"},
            "tags.embeddings: expected a position and values such as '2:70,71'",
        ),
        ({"embeddings": "x"}, "got 'x'"),
        ({"adapter": "-1"}, "tags.adapter: expected a number from 0 to 9999, got '-1'"),
    ],
)
def test_a_wrong_tag_is_refused_and_nothing_else_is_disturbed(folder, tags, message):
    with open_llm(folder) as llm:
        with pytest.raises(ValueError, match=message):
            complete(llm, [(PROMPT, GREEDY, tags)])
        assert len(complete(llm, [(PROMPT, GREEDY, {})])[0]) == 8


def test_each_token_attends_evenly():
    context = AttentionContext(
        name="attention",
        options=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        block_size=4,
    )
    spec = KVSpec(num_heads=2, num_kv_heads=1, head_size=8, scale=1.0)
    step = AttentionStep(
        query_starts=np.array([0, 2]),
        seq_lens=np.array([3]),
        num_single=0,
        block_table=torch.tensor([[1]]),
        slots=torch.tensor([5, 6]),
        block_size=4,
    )
    backend = HistoryAttention(context)
    weights = backend.attention_weights(
        spec, backend.allocate(spec, 2), step, 0, torch.zeros(2, 2, 8)
    )
    expected = torch.tensor([1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])
    torch.testing.assert_close(weights, expected.expand(2, 3))


class FailsOnce(ScriptedAdapters):
    contract = 1
    fails = True

    def worker_half(self, context):
        half = super().worker_half(context)
        linear = type(half).linear

        class Half(type(half)):
            def linear(self, parts, x, y, rows):
                changed = linear(self, parts, x, y, rows)
                if FailsOnce.fails:
                    FailsOnce.fails = False
                    raise ValueError("broken linear")
                return changed

        return Half()


def test_a_fault_in_the_layers_ends_its_request_and_leaves_no_wrong_block(folder):
    adapted, plain = (PROMPT, GREEDY, {"adapter": "7"}), ([*PROMPT[:40], 9], GREEDY, {})
    with open_llm(folder) as llm:
        wanted = complete(llm, [adapted, plain])
    part = {**use(FailsOnce), "name": "scripted_adapters"}
    config = {"plugins": {"enable": [part]}, "engine": {"in_process": True}}
    with LLM(config=scripted_config(folder, config)) as llm:
        tags = [adapted[2], plain[2]]
        prompts = [{"prompt_token_ids": prompt} for prompt in (adapted[0], plain[0])]
        failed, other = llm.generate(prompts, GREEDY, tags=tags)
        assert failed.outputs[0].error.endswith("its linear() failed: ValueError: broken linear")
        assert tuple(other.outputs[0].token_ids) == wanted[1]
        assert complete(llm, [adapted, plain]) == wanted


def forward_without_hooks(self, batch):
    ids = batch.token_ids.float().view(-1, 1, 1).expand(-1, 1, 2)
    return batch.attend(0, ids, ids, ids).reshape(-1, 2)


@pytest.mark.parametrize(
    ("part", "attribute"),
    [(ScriptedAdapters, "linear layers"), (ScriptedEmbeddings, "embedded tokens")],
)
def test_a_model_that_does_not_call_the_hooks_is_refused(folder, monkeypatch, part, attribute):
    monkeypatch.setattr(ScriptedModel, "forward", forward_without_hooks)
    config = {"plugins": {"enable": [use(part)]}, "engine": {"in_process": True}}
    with pytest.raises(
        PluginContractError, match=f"it changes {attribute}, and .*ScriptedModel.* does"
    ):
        LLM(config=scripted_config(folder, config))


def tagged(name, *values):
    """Return a strategy for requests, some of them with a tag."""
    return st.builds(
        lambda prompt, value: EngineCoreRequest(
            request_id="",
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0),
            eos_token_ids=[256],
            tags={} if value is None else {name: value},
        ),
        st.lists(st.integers(0, 255), min_size=3, max_size=6),
        st.sampled_from([None, *values]),
    )


class TestScriptedEmbeddings(StepPartSuite):
    part = ScriptedEmbeddings
    examples = kit_examples()

    def requests(self):
        return tagged("embeddings", "0:7", "1:70,71", "5:1")


class TestScriptedAdapters(StepPartSuite):
    part = ScriptedAdapters
    examples = kit_examples()

    def requests(self):
        return tagged("adapter", "0", "7", "no")
