"""Qwen3-Next in an engine: the tokens of transformers, however its requests are computed."""

from __future__ import annotations

import json

import pytest
import torch
from support.builtins.model_harness import Runner, load_model, open_loader
from support.internals import engine_of, scheduler_of

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.qwen3_next import Qwen3Next
from hardpoint.cli import main

FIELDS = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,  # the last one has attention
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(0, 97, (n,), generator=GENERATOR).tolist() for n in (3, 40, 90, 150)]
PROMPTS.append(PROMPTS[3][:101] + PROMPTS[0])
COUNT = 20
CHUNKS = {"scheduler": {"max_num_batched_tokens": 48}}
RANKS = CHUNKS | {"executor": {"use": "multiproc"}}
NIGHTLY = pytest.mark.nightly
CASES = [
    pytest.param({}, id="whole"),
    pytest.param(CHUNKS | {"kv_cache": {"num_blocks": 26}}, id="preempted"),
    pytest.param(CHUNKS, id="chunks", marks=NIGHTLY),
    pytest.param({"kv_cache": {"prefix_caching": False}}, id="uncached", marks=NIGHTLY),
    pytest.param({"kv_cache": {"block_size": 128}}, id="large blocks", marks=NIGHTLY),
    pytest.param(RANKS | {"parallel": {"tensor": 2}}, id="tensor", marks=NIGHTLY),
    # In one stage no layer has attention, in three all layers have states.
    pytest.param(RANKS | {"parallel": {"pipeline": 4}}, id="pipeline", marks=NIGHTLY),
    pytest.param(RANKS | {"parallel": {"tensor": 2, "pipeline": 2}}, id="both", marks=NIGHTLY),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random model of transformers: its folder, and its tokens."""
    import transformers

    torch.manual_seed(5)
    config = transformers.Qwen3NextConfig(**FIELDS)
    reference = transformers.Qwen3NextForCausalLM(config).eval().float()
    for name, parameter in reference.named_parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        # Decays so weak that a state remembers hundreds of tokens.
        parameter.data.normal_(-2.0 if name.endswith(("A_log", "dt_bias")) else mean, 0.2)
    folder = tmp_path_factory.mktemp("qwen3-next")
    reference.save_pretrained(folder)
    expected = []
    for prompt in PROMPTS:
        generated = reference.generate(
            torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None
        )
        expected.append(generated[0, len(prompt) :].tolist())
    return folder, expected


def opened(folder, extra) -> LLM:
    config = {"dtype": "float32", "device": "cpu", "tokenizer": {"use": "none"}}
    return LLM(str(folder), config=config | {"max_model_len": 256} | extra, progress=False)


def tokens(llm, **fields):
    """Return the tokens of all completions of each prompt, and how many tokens were cached."""
    fields = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True} | fields
    params = SamplingParams(detokenize=False, **fields)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    completions = [[list(part.token_ids) for part in output.outputs] for output in outputs]
    return completions, [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("extra", CASES)
def test_the_tokens_are_those_of_transformers(saved, extra):
    folder, expected = saved
    with opened(folder, extra) as llm:
        for _ in range(2):  # the second time with prefix hits
            completions, cached = tokens(llm)
            assert completions == [[reply] for reply in expected]
        preempts = "num_blocks" in extra.get("kv_cache", {})
        assert (llm.engines.scheduler_stats().num_preemptions > 0) == preempts
        hits = extra.get("kv_cache", {}).get("prefix_caching", True) and not preempts
        assert (cached[3] >= 128) == hits


def test_samples_fork_and_a_sleep_loses_the_states(saved):
    folder, expected = saved
    with opened(folder, CHUNKS) as llm:
        assert tokens(llm, n=3)[0] == [[reply] * 3 for reply in expected]
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            completions, cached = tokens(llm)
            assert completions == [[reply] for reply in expected]
            assert cached[3] == 0


REAL_SIZES = {  # of a layer with a state and one with attention
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}


def test_a_cache_of_the_real_sizes_has_room_for_long_requests(tmp_path, saved):
    """At default settings: one memory for keys and values, as much of it for states."""
    folder, _ = saved
    config = json.loads((folder / "config.json").read_text()) | REAL_SIZES
    (tmp_path / "config.json").write_text(json.dumps(config))
    extra = {"load": {"use": "dummy"}, "kv_cache": {"memory_bytes": 64 << 20}}
    extra |= {"max_model_len": "auto"}
    with opened(tmp_path, extra) as llm:
        cache = scheduler_of(engine_of(llm)).context.kv_cache
        # In float32, 4 KiB of keys and values per token, and three states of 2.1 MiB.
        keys, state = 16 * 4 * 1024, 3 * 4 * (3 * 8192 + 32 * 128 * 128)
        num_keys, num_states = cache.num_blocks - cache.num_free_states, cache.num_free_states
        assert num_states == 5
        assert 16 * num_keys == 8_336
        assert num_keys * keys + num_states * state <= 64 << 20
        assert (64 << 20) // (keys + state) * 16 == 160  # when a block had room for both
        (output,) = llm.generate(
            [{"prompt_token_ids": [5] * 90}],
            SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False),
        )
        assert len(output.outputs[0].token_ids) == 4


def test_the_report_of_a_model_counts_its_states(saved, capsys):
    folder, _ = saved
    assert main(["models", str(folder)]) == 0
    assert "layers         4: 1 see all tokens, 3 keep a state" in capsys.readouterr().out


@torch.inference_mode()
def test_bfloat16_stays_close(saved):
    import transformers

    folder, _ = saved
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        reference = transformers.Qwen3NextForCausalLM.from_pretrained(folder, dtype=dtype)
        logits.append(reference(torch.tensor([PROMPTS[3]])).logits[0].float())
    expected, theirs = logits
    loader = open_loader(SafetensorsLoader, folder)
    model = load_model(Qwen3Next, loader, dtype=torch.bfloat16)
    runner = Runner(model, dtype=torch.bfloat16)
    parts = [PROMPTS[3][:70], PROMPTS[3][70:]]
    actual = torch.cat([runner.logits([("a", part)]) for part in parts])
    assert (actual - expected).norm() < 1.1 * (theirs - expected).norm()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"speculation": {"use": ["ngram"]}}, "speculation: .*Qwen3NextForCausalLM.* keeps states"),
        (
            {"kv_connector": {"stores": ["memory"]}},
            "kv_connector.use: 'stores' moves blocks, and .*Qwen3NextForCausalLM.* keeps states",
        ),
    ],
    ids=["speculation", "connector"],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(saved, extra, message, tmp_path):
    folder, _ = saved
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(weights[:8], "little")
    with (tmp_path / "model.safetensors").open("wb") as file:  # of which only the header is right
        file.write(weights[:header])
        file.truncate(len(weights))
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, extra)
