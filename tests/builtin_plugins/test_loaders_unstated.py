"""Safetensors with missing statements: without a scheme, without the name of the body."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from support.builtins.model_harness import open_loader

from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.plugins import ModelError

UP = "model.layers.0.mlp.up_proj.weight"
WANTED = r"expected a quantization_config with a quant_method"


def loader_of(folder, tensors):
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file(tensors, folder / "model.safetensors")
    return open_loader(SafetensorsLoader, folder)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({UP: torch.zeros(4, 6).to(torch.float8_e4m3fn)}, "is stored as float8_e4m3fn"),
        (
            {UP.replace(".weight", ".qweight"): torch.zeros(4, 6, dtype=torch.int32)},
            "is missing, and model.layers.0.mlp.up_proj.qweight is there",
        ),
    ],
)
def test_codes_without_a_scheme_are_refused(tmp_path, tensors, problem):
    loader = loader_of(tmp_path, tensors)
    with pytest.raises(ModelError, match=rf"config.json: {UP} {problem}: {WANTED}"):
        loader.formats({UP: (4, 6)})


def test_a_checkpoint_of_the_body_alone_has_shorter_names(tmp_path):
    """As of Qwen3-Embedding."""
    stored = torch.arange(24.0).reshape(4, 6)
    loader = loader_of(tmp_path, {UP.removeprefix("model."): stored})
    assert loader.formats({UP: (4, 6)})[UP].name == "float32"
    ((name, weight),) = loader.weights({UP: (4, 6)})
    assert name == UP
    assert torch.equal(weight, stored)
