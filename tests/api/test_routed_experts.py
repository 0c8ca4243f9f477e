"""The experts of each token, for requests that ask for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.builtins.model_harness import Runner, load_model, open_loader

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.models.qwen_moe import Qwen3Moe
from hardpoint.plugins import ModelError, RequestOutputKind
from hardpoint.testing import write_scripted_model

HF = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "torch_dtype": "float32",
    "eos_token_id": 256,
}
PROMPTS = [[(37 * i + 11 * j) % 250 for j in range(5 + 9 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_scripted_model(tmp_path_factory.mktemp("mixture") / "model")
    (folder / "config.json").write_text(json.dumps(HF))
    return folder


def engine(folder: Path, **config) -> LLM:
    settings = {"dtype": "float32", "load": {"use": "dummy"}, "engine": {"in_process": True}}
    return LLM(str(folder), config=settings | {"kv_cache": {"num_blocks": 64}} | config)


def asking(**fields) -> SamplingParams:
    fields = {
        "temperature": 0,
        "max_tokens": 20,
        "ignore_eos": True,
        "routed_experts": True,
    } | fields
    return SamplingParams(**fields)


@pytest.fixture(scope="module")
def expected(folder):
    """Return a function from tokens to the experts that the model alone chooses for them."""
    model = load_model(Qwen3Moe, open_loader(DummyLoader, folder), dtype=torch.float32)

    @torch.inference_mode()
    def choose(tokens: list[int]) -> np.ndarray:
        routed = torch.full((len(tokens), 4, 2), -1, dtype=torch.int32)
        Runner(model, dtype=torch.float32).hidden([("a", tokens)], routed_experts=routed)
        return routed.numpy()

    return choose


def check(outputs, expected, *, cached: bool = False) -> None:
    """Check the experts of all outputs but those of cached positions, which are -1."""
    for output in outputs:
        (completion,) = output.outputs
        rows = completion.routed_experts
        wanted = expected([*output.prompt_token_ids, *completion.token_ids[:-1]])
        assert rows.dtype == np.int32
        assert (wanted[:, 1] == -1).all()
        first = output.num_cached_tokens
        assert (first > 0) == cached
        assert (rows[:first] == -1).all()
        assert np.array_equal(rows[first:], wanted[first:])


def test_those_of_prompt_and_output_come_with_the_last_output(folder, expected) -> None:
    with engine(folder) as llm:
        check(llm.generate(PROMPTS, asking()), expected)
        outputs = llm.generate(PROMPTS[:2], [asking(), asking(routed_experts=False)])
        assert outputs[1].outputs[0].routed_experts is None


def test_chunks_and_preemption_change_nothing(folder, expected) -> None:
    cache = {"num_blocks": 8, "block_size": 16, "prefix_caching": False}
    steps = {"max_num_batched_tokens": 16}
    with engine(folder, kv_cache=cache, scheduler=steps, max_model_len=112) as llm:
        check(llm.generate(PROMPTS, asking(max_tokens=40)), expected)
        assert "num_preemptions_total 0" not in llm.metrics()


def test_positions_from_the_cache_have_none(folder, expected) -> None:
    with engine(folder) as llm:
        check(llm.generate(PROMPTS[5:], asking()), expected)
        check(llm.generate(PROMPTS[5:], asking()), expected, cached=True)


def test_a_stop_string_ends_them_with_the_tokens(folder, expected) -> None:
    with engine(folder) as llm:
        (whole,) = llm.generate(PROMPTS[3:4], asking())
        text = whole.outputs[0].text
        (cut,) = llm.generate(
            PROMPTS[3:4], asking(stop=[text[5:8]], include_stop_str_in_output=True)
        )
        tokens = cut.outputs[0].token_ids
        assert len(tokens) < 20
        assert len(cut.outputs[0].routed_experts) == len(PROMPTS[3]) + len(tokens) - 1


def test_a_model_without_experts_refuses(tmp_path) -> None:
    folder = write_scripted_model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(HF | {"architectures": ["LlamaForCausalLM"]}))
    with engine(folder) as llm:
        first, second = llm.generate(PROMPTS[:2], [asking(), asking(routed_experts=False)])
    assert first.outputs[0].finish_reason == "error"
    assert first.outputs[0].error == "routed_experts: the model is no mixture of experts"
    assert second.outputs[0].finish_reason == "length"


def test_whole_experts_of_a_model_without_experts_are_refused(tmp_path) -> None:
    folder = write_scripted_model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(HF | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(
        ModelError, match=r"parallel.expert: .*LlamaForCausalLM.* cannot be divided"
    ):
        engine(folder, parallel={"expert": True})


@pytest.mark.nightly
def test_deltas_from_another_process(folder, expected) -> None:
    config = {"dtype": "float32", "load": {"use": "dummy"}, "kv_cache": {"num_blocks": 64}}

    async def collect():
        async with AsyncLLM(str(folder), config=config) as llm:
            params = asking(output_kind=RequestOutputKind.DELTA)
            return [part async for part in llm.generate(PROMPTS[2], params)]

    parts = asyncio.run(collect())
    assert all(part.outputs[0].routed_experts is None for part in parts[:-1])
    tokens = [token for part in parts for token in part.outputs[0].token_ids]
    rows = parts[-1].outputs[0].routed_experts
    assert np.array_equal(rows, expected([*PROMPTS[2], *tokens[:-1]]))


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 2},
        pytest.param({"tensor": 2}, marks=pytest.mark.nightly),
        pytest.param({"tensor": 2, "expert": True}, marks=pytest.mark.nightly),
        pytest.param({"tensor": 2, "pipeline": 2, "expert": True}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_ranks_and_stages_change_nothing(folder, expected, parallel) -> None:
    executor = {"use": "multiproc"}
    with engine(folder, executor=executor, parallel=parallel) as llm:
        check(llm.generate(PROMPTS, asking()), expected)
