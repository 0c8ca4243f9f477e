"""A package that offers names of built-ins: nothing stops until a model or a request uses one."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from support.parallel import write_random_model

from hardpoint import LLM, RequestError, SamplingParams
from hardpoint.errors import PluginConflictError
from hardpoint.host.registry.discovery import discover
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import scripted_config


@pytest.fixture
def offer(tmp_path_factory, monkeypatch):
    """Install a distribution that offers `kind/name` for each path, and that nothing imports."""

    def install(*paths: str) -> None:
        folder = tmp_path_factory.mktemp("site")
        info = folder / "acme-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.5\n")
        lines = []
        for path in paths:
            kind, name = path.split("/")
            lines += [f"[hardpoint.{kind}]", f"{name} = no_such_module.{kind}:Thing"]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])

    return install


def names_both(message: str, path: str) -> bool:
    return f"{path} (hardpoint" in message and f"{path} (acme 1.5, no_such_module." in message


def test_a_copy_of_every_name_stops_nothing_until_a_request_uses_one(offer, scripted):
    """The two that the configuration of the scripted model names are not copied."""
    named = {"loaders/dummy"}
    paths = {f"{found.kind}/{found.name}" for found in discover()} - named
    offer(*sorted(paths))
    with LLM(config=scripted_config(scripted)) as llm:
        params = SamplingParams(max_tokens=3, temperature=0.7, min_p=0.1, seed=1)
        assert len(llm.generate(["abc"], params)[0].outputs[0].token_ids) == 3
        for path, wrong in {
            "logits_processors/min_p": {"plugin_args": {"min_p": {"min_p": 0.2}}},
            "tool_parsers/hermes": {"tool_parser": "hermes"},
            "reasoning_parsers/think_tags": {"reasoning_parser": "think_tags"},
            "grammars/llguidance": {
                "structured": StructuredOutputs(regex="a+", backend="llguidance")
            },
        }.items():
            with pytest.raises(RequestError) as error:
                llm.generate(["abc"], SamplingParams(max_tokens=3, **wrong))
            assert names_both(str(error.value), path)
        with pytest.raises(RequestError) as error:
            llm.encode(["abc"], PoolingParams(task="embed", pooler="mean"))
        assert names_both(str(error.value), "poolers/mean")
        assert len(llm.generate(["abc"], params)[0].outputs[0].token_ids) == 3


def write_llama(folder, **fields):
    return write_random_model(folder, "LlamaForCausalLM", **fields)


@pytest.mark.parametrize(
    ("path", "fields", "config"),
    [
        ("loaders/safetensors", {}, {}),
        ("models/LlamaForCausalLM", {}, {"load": {"use": "dummy"}}),
        (
            "quantizations/fp8",
            {"quantization_config": {"quant_method": "fp8"}},
            {},
        ),
        ("tool_parsers/hermes", {}, {"load": {"use": "dummy"}}),
    ],
)
def test_a_name_that_the_model_uses(offer, tmp_path, path, fields, config):
    offer(path)
    folder = write_llama(tmp_path / "model", **fields)
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    template = json.loads((folder / "tokenizer_config.json").read_text())
    template["chat_template"] = '{# <tool_call> "arguments" #}{{ messages }}'
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    with pytest.raises(PluginConflictError) as error, LLM(str(folder), config=config):
        pass
    assert names_both(str(error.value), path)
    name = path.partition("/")[2]
    assert f'plugins.replace = {{ "{path}" = "hardpoint.builtin_plugins.' in str(error.value)
    assert name in str(error.value)
