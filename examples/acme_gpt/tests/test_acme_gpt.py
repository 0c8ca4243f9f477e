"""The model, its file and its tokenizer keep to their definitions, in both process modes."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import random_weights, write_model

from hardpoint import LLM, SamplingParams
from hardpoint.plugins import ModelError

PROMPTS = ["héllo", "a" * 30, "the same beginning, then one", "the same beginning, then two"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def config(path, **more):
    return {
        "model": str(path),
        "dtype": "float32",
        "plugins": {"enable": ["TinyGPT", "tiny_gpt_file"]},
        "tokenizer": {"use": "byte_text"},
        **more,
    }


def attention(weights, name, x):
    q, k, v = (
        F.linear(x, weights[f"{name}.{p}.weight"], weights[f"{name}.{p}.bias"]) for p in "qkv"
    )
    q, k, v = (part.view(len(x), 4, 8).transpose(0, 1) for part in (q, k, v))
    scores = (q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(
        torch.ones(len(x), len(x)).triu(1).bool(), -math.inf
    )
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)


def logits_by_hand(weights, ids):
    """Return the logits after a text, computed as in the paper."""

    def norm(x, name):
        return F.layer_norm(x, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = weights["tokens.weight"][ids] + weights["positions.weight"][: len(ids)]
    for block in ("blocks.0", "blocks.1"):
        x = x + linear(attention(weights, block, norm(x, f"{block}.norm_1")), f"{block}.out")
        inner = F.gelu(linear(norm(x, f"{block}.norm_2"), f"{block}.up"), approximate="tanh")
        x = x + linear(inner, f"{block}.down")
    return F.linear(norm(x[-1:], "norm"), weights["tokens.weight"])[0]


def continuation_by_hand(prompt):
    weights, ids = random_weights(), list(prompt.encode())
    for _ in range(12):
        ids.append(int(logits_by_hand(weights, ids).argmax()))
    return ids[-12:]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gpt") / "model.tgpt")


@pytest.mark.parametrize("in_process", [True, False])
def test_it_gives_the_tokens_of_its_definition_with_preemption(path, in_process):
    small = {"block_size": 4, "num_blocks": 24}  # too few for all prompts at once
    extra = {"kv_cache": small, "engine": {"in_process": in_process}}
    with LLM(config=config(path, **extra)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    expected = [continuation_by_hand(prompt) for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_ranks_that_share_it_give_the_same_tokens(path):
    extra = {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}}
    with LLM(config=config(path, **extra)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    expected = [continuation_by_hand(prompt) for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_text_comes_back_with_whole_characters(path):
    with LLM(config=config(path)) as llm:
        (chat,) = llm.chat([[{"role": "user", "content": "é"}]], GREEDY)
        assert chat.prompt == "user: é\nassistant: "


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-4], r"norm\.bias: 128 bytes are wanted, 124 are left"),
        (lambda data: data.replace(b"gpt 1", b"gpt 2"), "begins with b'tiny-gpt 1.n', got b'tiny"),
        (lambda data: data.replace(b'"config"', b'"konfig"'), "the header is damaged: 'config'"),
        (lambda data: data.replace(b'"num_heads": 4', b'"num_heads": 5'), "num_heads: expected a"),
    ],
)
def test_damaged_files_are_refused(path, tmp_path, damage, message):
    broken = tmp_path / "broken.tgpt"
    broken.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        LLM(config=config(broken, load={"use": "tiny_gpt_file"}))
