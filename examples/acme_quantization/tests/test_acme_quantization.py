"""A model of few bits gives the tokens of the checkpoint that has the same numbers."""

import logging

import pytest
import torch
from acme_quantization.nf4 import NF4
from acme_quantization.ternary import Ternary
from tiny import random_weights, write_model

from hardpoint import LLM, SamplingParams
from hardpoint.plugins import ConfigError, QuantizationContext
from hardpoint.plugins.quantization import QuantizedWeight

PROMPTS = ["héllo", "a" * 30, "the same beginning, then one", "the same beginning, then two"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SCHEMES = {"nf4": NF4, "ternary": Ternary}


def config(**more):
    return {
        "dtype": "float32",
        "plugins": {"enable": list(SCHEMES)},
        "weight_cache": {"path": "off"},
        **more,
    }


def tokens(path, **more):
    with LLM(str(path), config=config(**more)) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "whole", random_weights())


@pytest.fixture(scope="module", params=SCHEMES)
def expected(request, tmp_path_factory):
    """Return a scheme's name, and the tokens of a checkpoint of its numbers."""
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    cls = SCHEMES[request.param]
    scheme = cls(QuantizationContext(name=request.param, options=cls.Options(), **place))
    weights = {
        name: scheme.quantize(weight).dequantize().contiguous() if weight.dim() == 2 else weight
        for name, weight in random_weights().items()
    }
    path = write_model(tmp_path_factory.mktemp("numbers") / request.param, weights)
    return request.param, tokens(path)


@pytest.mark.parametrize("ops", ["auto", "torch"])
def test_tokens_are_those_of_the_same_numbers(path, expected, ops):
    use, wanted = expected
    assert tokens(path, quantization={"use": use}, ops={"use": ops}) == wanted


def test_ranks_that_share_a_model_give_the_same_tokens(path):
    ranks = {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}}
    ternary = {"quantization": {"use": "ternary"}}
    assert tokens(path, **ternary, **ranks) == tokens(path, **ternary)


@pytest.mark.parametrize("use", SCHEMES)
def test_it_runs_in_bfloat16(path, use):
    outputs = tokens(path, quantization={"use": use}, dtype="bfloat16")
    assert [len(ids) for ids in outputs] == [8] * len(PROMPTS)


def test_weights_that_are_not_kept_are_logged(path, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cache = {"path": str(tmp_path)}
    first = tokens(path, quantization={"use": "nf4"}, weight_cache=cache)
    assert "quantized weights: 15 in nf4" in caplog.text
    assert tokens(path, quantization={"use": "nf4"}, weight_cache=cache) == first
    assert "packed weights: mapped" in caplog.text
    tokens(path, quantization={"use": "ternary"}, weight_cache=cache)
    message = "15 in ternary, not kept in the weight cache, for they multiply themselves"
    assert message in caplog.text
    assert len(list(tmp_path.glob("*.weights"))) == 1


def test_what_files_store_is_checked_before_it_is_read():
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    scheme = Ternary(QuantizationContext(name="ternary", options=None, **place))
    packed = torch.empty(6, 64, dtype=torch.uint8, device="meta")
    tensors = {"packed": packed, "scales": torch.empty(6, 4, device="meta")}
    scheme.check(QuantizedWeight("ternary", (6, 256), tensors))
    with pytest.raises(ValueError, match=r"'scales': expected torch.float32 \[6, 4\]"):
        scheme.check(QuantizedWeight("ternary", (6, 256), tensors | {"scales": packed}))


def test_options_are_checked(path):
    with pytest.raises(ConfigError, match=r"plugin\.nf4\.group"):
        tokens(path, quantization={"use": "nf4"}, plugin={"nf4": {"group": 48}})


def test_what_is_skipped_keeps_its_numbers(path):
    everything = {"use": "nf4", "skip": ["model.layers.*", "model.embed_tokens.weight"]}
    with pytest.raises(ConfigError, match="has no weights to quantize"):
        tokens(path, quantization=everything)
    without = {"use": "nf4", "skip": ["model.layers.1.*"]}
    assert tokens(path, quantization=without) != tokens(path)
