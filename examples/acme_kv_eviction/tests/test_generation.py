"""Requests hold few blocks, and get the tokens that the same attention gives without an engine."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hardpoint import LLM, ConfigError, ModelError, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

BLOCK = 4
STREAMING = {"sinks": 4, "window": 16, "stride": 8}
SNAP = {"budget": 24, "observed": 8, "delay": 8}
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with three layers, which reads bytes."""
    folder = tmp_path_factory.mktemp("model")
    write_scripted_model(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def config(folder, **tables):
    parts = ["acme_kv_eviction:StreamingLLM", "acme_kv_eviction:SnapKV"]
    made = scripted_config(folder, {"dtype": "float32", "kv_cache": {"block_size": BLOCK}})
    made |= {"load": {"use": "auto"}, "attention": {"use": "torch"}}
    made["plugins"] = {"enable": parts}
    return made | tables


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 256, (length,), generator=generator).tolist()
    return {"prompt_token_ids": ids}


def generate(llm, prompts, part, arguments):
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, plugin_args={part: arguments}
    )
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def reference(folder, prompt, released):
    """Return greedy tokens; `released` returns the positions that a token does not see."""
    model, ids = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager"), list(prompt)
    for _ in range(NEW_TOKENS):
        sees = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        for position in range(len(ids)):
            sees[position, released(position)] = False
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def released_by_streaming(position):
    sinks, window, stride = STREAMING.values()
    strides = max(position - sinks - window, 0) // stride
    at = sinks + window + strides * stride
    return (
        list(range(-(-sinks // BLOCK) * BLOCK, (at - window) // BLOCK * BLOCK)) if strides else []
    )


def released_by_snap(folder, prompt):
    """Return the positions of the blocks of a prompt that its last tokens attend to least."""
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        layers = model(torch.tensor([prompt]), output_attentions=True).attentions
    first = len(prompt) - SNAP["observed"]
    weights = sum(layer[0, :, first:].sum((0, 1)) for layer in layers)
    blocks = range(first // BLOCK)
    sums = [float(weights[block * BLOCK : (block + 1) * BLOCK].sum()) for block in blocks]
    room = (SNAP["budget"] - len(prompt)) // BLOCK + len(blocks)
    worst = sorted(blocks, key=sums.__getitem__)[: len(blocks) - room]
    return [position for block in worst for position in range(block * BLOCK, (block + 1) * BLOCK)]


@pytest.mark.parametrize("budget", [512, 16])
def test_streaming_llm_attends_to_the_first_and_the_last_tokens(folder, budget):
    prompts = [prompt(50), prompt(7, seed=1)]
    with LLM(config=config(folder, scheduler={"max_num_batched_tokens": budget})) as llm:
        tokens = generate(llm, prompts, "streaming_llm", STREAMING)
    for row, item in zip(tokens, prompts, strict=True):
        assert row == reference(folder, item["prompt_token_ids"], released_by_streaming)


def test_snap_kv_attends_to_the_best_blocks_of_the_prompt(folder):
    ids = prompt(50)["prompt_token_ids"]
    gone, start = released_by_snap(folder, ids), len(ids) + SNAP["delay"]
    assert gone
    with LLM(config=config(folder)) as llm:
        (tokens,) = generate(llm, [prompt(50)], "snap_kv", SNAP)
    assert tokens == reference(folder, ids, lambda position: gone if position >= start else [])


def test_a_long_output_holds_few_blocks(folder):
    num_blocks, peak = 128, 0.0
    table = {"kv_cache": {"block_size": BLOCK, "num_blocks": num_blocks}}
    params = SamplingParams(
        temperature=0, max_tokens=300, ignore_eos=True, plugin_args={"streaming_llm": STREAMING}
    )
    with LLM(config=config(folder, **table)) as llm:
        for output in llm.stream(prompt(100), params):
            if not output.finished:
                peak = max(peak, llm.engines.scheduler_stats().kv_cache_usage)
    assert peak * num_blocks == sum(STREAMING.values()) / BLOCK  # 400 tokens have 100 blocks


def test_an_attention_backend_without_weights_is_refused(folder):
    table = {"attention": {"use": "native_cpu"}}
    with pytest.raises(ModelError, match="attention.use: .* has no attention weights .* 'snap_kv'"):
        LLM(config=config(folder, **table)).close()


def test_a_kv_connector_is_refused(folder):
    table = {"kv_connector": {"stores": ["memory"]}}
    with pytest.raises(ConfigError, match="kv_connector.use: 'stores': expected none, because"):
        LLM(config=config(folder, **table)).close()
