"""Models through transformers that ranks divide by their tp_plan: equal to one rank, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builtins.model_harness import load_model, open_loader
from support.builtins.transformers_models import FAMILIES, GEMMA, MOE, TINY, save
from support.builtins.transformers_parity import check_parts
from support.families.configs import tiny_config
from support.families.data import read_data
from support.families.survey import THROUGH, save_random

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.transformers import attention
from hardpoint.builtin_plugins.models.transformers.model import ThroughTransformers
from hardpoint.cli import main
from hardpoint.plugins import ModelError
from hardpoint.plugins.parallel import Communicator, Parallel
from hardpoint.testing.model.rank_threads import run_ranks

WIDE = TINY | {"intermediate_size": 64}  # of which each rank has a group of int8
DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", WIDE),  # q, k and v in one matrix, with biases
    "gemma3_text": ("Gemma3ForCausalLM", WIDE | GEMMA | {"num_hidden_layers": 7}),  # tied
    "qwen3_moe": ("Qwen3MoeForCausalLM", WIDE | MOE | {"head_dim": 16}),  # stacked experts
    "smollm3": ("SmolLM3ForCausalLM", WIDE),
    "phi": ("PhiForCausalLM", WIDE | {"tie_word_embeddings": True}),  # a head with a bias, tied
}
ENGINES = ("gpt_neox", "gemma3_text", "qwen3_moe")
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "opt": (*FAMILIES["opt"], "OPTForCausalLM of transformers has no tp_plan by which ranks could"),
    "gpt_oss": (*FAMILIES["gpt_oss"], "GptOssForCausalLM of transformers has no tp_plan by which"),
    "olmo2": (
        "Olmo2ForCausalLM",
        TINY,
        r"Olmo2ForCausalLM, model\.layers\.0\.self_attn\.q_proj: its tp_plan is "
        "'colwise_gather_output', expected colwise, rowwise or replicated",
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        TINY | {"num_attention_heads": 1},
        r"1 attention heads cannot be divided among 2 ranks; no size up to \d+ would do",
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        TINY | {"num_key_value_heads": 1},
        "1 key and value heads cannot be divided among 2 ranks",
    ),
}
RUNNING = [f.name for f in read_data().families if f.path == THROUGH or f.other == "equal"]
PROMPTS = ([5, 9, 33, 7] * 6, [11, 80, 4])
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
TWO: dict[str, Any] = {"parallel": {"tensor": 2}, "executor": {"use": "multiproc"}}
CONFIG: dict[str, Any] = {
    "models": {"use": "transformers"},
    "dtype": "float32",
    "tokenizer": {"use": "none"},
    "scheduler": {"max_num_batched_tokens": 20},
    "kv_cache": {"num_blocks": 160, "block_size": 4},
    "weight_cache": {"path": "off"},
}


def generate(folder: Path, **settings: Any) -> list[list[int]]:
    with LLM(str(folder), config=CONFIG | settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("kind", DIVIDED)
def test_two_ranks_give_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = save(kind, *DIVIDED[kind], tmp_path)
    check_parts((reference, ThroughTransformers, tmp_path), 2, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNNING)
def test_two_ranks_of_any_family_give_its_logits_or_name_its_plan(
    name: str, tmp_path: Path
) -> None:
    import transformers

    kind = getattr(transformers, name)
    config = tiny_config(kind.config_class, name)
    reference = save_random(kind, config, tmp_path)
    why = ""
    try:
        check_parts((reference, ThroughTransformers, tmp_path), 2, 1)
    except ModelError as error:
        why = str(error)
    assert re.match(r"$|parallel\.tensor: .*(has no tp_plan|its tp_plan is)", why)


def test_a_layer_that_was_observed_wrongly_is_found_in_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(rank: Communicator) -> str:
        loader = open_loader(SafetensorsLoader, tmp_path)
        with pytest.raises(ModelError) as caught:
            load_model(ThroughTransformers, loader, dtype=torch.float32, parallel=Parallel(rank))
        return str(caught.value)

    save("mistral", "MistralForCausalLM", WIDE | {"sliding_window": 3}, tmp_path)
    monkeypatch.setattr(attention.Specs, "window_of", lambda *_: 5)
    for message in run_ranks(2, load):
        assert re.search(r"layers\.0\.self_attn: eager attention .* differs by", message)


def test_a_plan_that_divides_half_of_an_mlp_is_found_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import SmolLM3Config

    save("smollm3", *DIVIDED["smollm3"], tmp_path)
    plan = {n: s for n, s in SmolLM3Config.base_model_tp_plan.items() if "down_proj" not in n}
    monkeypatch.setattr(SmolLM3Config, "base_model_tp_plan", plan)
    message = (
        r"SmolLM3ForCausalLM, divided by its tp_plan \(parallel\.tensor = 2\), fails in a step "
        "without a cache.*: a layer of 64 columns is given 32"
    )
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), config=CONFIG | TWO)


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_of_two_ranks_gives_the_tokens_of_one_and_of_generate(
    kind: str, tmp_path: Path
) -> None:
    reference = save(kind, *DIVIDED[kind], tmp_path)
    expected = [
        reference.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False, eos_token_id=None)[
            0, len(p) :
        ].tolist()
        for p in PROMPTS
    ]
    assert generate(tmp_path) == expected
    assert generate(tmp_path, **TWO) == expected
    few_bits = {"quantization": {"use": "int8"}}
    assert generate(tmp_path, **TWO, **few_bits) == generate(tmp_path, **few_bits)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_ranks_cannot_divide_is_refused_before_weights_are_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, fields, message = REFUSED[kind]
    save(kind, name, fields, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"parallel\.tensor: {message}"):
        LLM(str(tmp_path), config=CONFIG | TWO | {"load": {"use": "dummy"}})
    arguments = ["--set", "parallel.tensor=2", "--set", "models.use=transformers"]
    assert main(["models", str(tmp_path), *arguments]) == 2
    assert re.search(rf"parallel\.tensor: {message}", capsys.readouterr().err)
