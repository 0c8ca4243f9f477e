"""The last layer of tokens that are not sampled from is skipped with equal results."""

from __future__ import annotations

import random

import pytest
import torch
from support.builtins.model_harness import Runner, load_model, open_loader
from support.parallel import write_random_model

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.kernels import cpu
from hardpoint.plugins import Model

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
STATES = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "mixtral": ("MixtralForCausalLM", EXPERTS),
    "qwen3-next": ("Qwen3NextForCausalLM", STATES),
}
DRAW = random.Random(3)
PROMPTS = [[DRAW.randrange(256) for _ in range(count)] for count in (1, 40, 7, 61, 2, 33)]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(f"sums depend on the other rows of a step without kernels, and they: {cause}")


def answers(llm, prompt_logprobs):
    params = SamplingParams(
        max_tokens=8, temperature=0.0, logprobs=2, prompt_logprobs=prompt_logprobs, ignore_eos=True
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    completions = [output.outputs[0] for output in outputs]
    entries = [[{t: e.logprob for t, e in x.items()} for x in c.logprobs] for c in completions]
    return [c.token_ids for c in completions], entries


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_those_of_whole_steps(tmp_path, model, dtype):
    """A step with prompt log-probabilities skips nothing."""
    architecture, fields = MODELS[model]
    folder = write_random_model(tmp_path, architecture, **fields)
    config = {
        "load": {"use": "dummy"},
        "dtype": dtype,
        "attention": {"use": "native_cpu"},
        "kv_cache": {"num_blocks": 200, "prefix_caching": False},
        "scheduler": {"max_num_batched_tokens": 48},
    }
    with LLM(str(folder), config=config) as llm:
        assert answers(llm, None) == answers(llm, 0)


def test_a_model_computes_the_needed_rows_alone(tmp_path):
    class Counting(Llama):
        contract = 1

        def run_mlp(self, index, h, batch):
            rows[index] = len(h)
            return super().run_mlp(index, h, batch)

    rows = {}
    loader = open_loader(DummyLoader, write_random_model(tmp_path, "LlamaForCausalLM"))
    model: Model = load_model(Counting, loader, dtype=torch.float32)
    step = [("a", PROMPTS[0]), ("b", PROMPTS[1]), ("c", PROMPTS[2])]
    needed = torch.tensor([40, 47])
    with torch.inference_mode():
        whole = Runner(model, dtype=torch.float32).hidden(step)
        assert set(rows.values()) == {48}
        hidden = Runner(model, dtype=torch.float32).hidden(step, needed=needed)
    assert list(rows.values()) == [48, 48, 2]
    assert torch.equal(hidden[needed], whole[needed])
    others = torch.ones(48, dtype=torch.bool)
    others[needed] = False
    assert not hidden[others].any()


class Observing(Llama):
    contract = 1
    replayable = False
    seen: list[tuple[int, list[int]]]

    def forward(self, batch):
        if batch.needed is not None:
            Observing.seen.append((len(batch.token_ids), batch.needed.tolist()))
        return super().forward(batch)


@pytest.mark.parametrize(
    ("fields", "is_whole"),
    [({}, False), ({"prompt_logprobs": 1}, True), ({"logprobs": 3}, False)],
)
def test_steps_name_the_rows_that_they_read(tmp_path, fields, is_whole):
    folder = write_random_model(tmp_path, "LlamaForCausalLM")
    seen = Observing.seen = []
    config = {
        "load": {"use": "dummy"},
        "dtype": "float32",
        "kv_cache": {"num_blocks": 64},
        "scheduler": {"max_num_batched_tokens": 48},
        "plugins": {"replace": {"LlamaForCausalLM": Observing}},
    }
    with LLM(str(folder), config=config) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, **fields)
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]], params)
    assert bool(seen) is not is_whole
    if seen:
        assert seen[0] == (48, [0, 40, 47])
        assert all(len(set(rows)) == len(rows) > 0 for _, rows in seen)
