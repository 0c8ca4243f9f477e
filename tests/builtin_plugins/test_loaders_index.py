"""The index of a checkpoint assigns tensors to files, for everything that reads files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.builtins.checkpoint_harness import random_model
from support.builtins.model_harness import open_loader

from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader

INDEX = "model.safetensors.index.json"
STALE = {
    "values": lambda right: torch.zeros_like(right),
    "shape": lambda _right: torch.zeros(8, 8),
    "dtype": lambda right: torch.zeros(right.shape, dtype=torch.bfloat16),
    "codes": lambda right: torch.zeros(right.shape, dtype=torch.int32),
}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    random_model("Llama").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    return tmp_path / "model"


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def add(folder: Path, file: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write further tensors into a shard, without a change of the index."""
    save_file({**load_file(folder / file), **tensors}, folder / file, {"format": "pt"})


def copies(folder: Path, stale: str) -> None:
    """Put a stale copy of each tensor into every shard that it is not assigned to."""
    files, weights = weight_map(folder), random_model("Llama").state_dict()
    for file in dict.fromkeys(files.values()):
        others = {name for name, assigned in files.items() if assigned != file}
        add(folder, file, {name: STALE[stale](weights[name]) for name in sorted(others)})


@pytest.mark.parametrize("order", ["as written", "reversed"])
@pytest.mark.parametrize("stale", STALE)
def test_weights_come_from_the_file_of_the_index(sharded, stale, order):
    copies(sharded, stale)
    if order == "reversed":  # the order of the table is that in which files are opened
        index = json.loads((sharded / INDEX).read_text())
        index["weight_map"] = dict(reversed(index["weight_map"].items()))
        (sharded / INDEX).write_text(json.dumps(index))
    weights = random_model("Llama").state_dict()
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    read = list(open_loader(SafetensorsLoader, sharded).weights(shapes))
    assert sorted(name for name, _ in read) == sorted(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read)


@pytest.mark.parametrize("stale", ["values", "codes"])
def test_tensors_beside_a_weight_in_another_file_make_it_no_quantized_one(sharded, stale):
    """Scales of a stale shard do not turn a plain matrix into codes."""
    files = weight_map(sharded)
    name = next(name for name in files if name.endswith("q_proj.weight"))
    other = next(file for file in files.values() if file != files[name])
    weights = random_model("Llama").state_dict()
    add(sharded, other, {name: STALE[stale](weights[name])})
    shapes = {weight_name: tensor.shape for weight_name, tensor in weights.items()}
    read = dict(open_loader(SafetensorsLoader, sharded).weights(shapes))
    assert torch.equal(read[name], weights[name])


def test_a_file_that_the_index_does_not_name_is_not_read(sharded):
    expected = random_model("Llama").state_dict()
    stale = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    save_file(stale, sharded / "a-leftover.safetensors", {"format": "pt"})
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    read = dict(open_loader(SafetensorsLoader, sharded).weights(shapes))
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_a_tensor_that_its_own_file_lacks_is_not_taken_from_another(sharded):
    """The index names a file without it: a copy elsewhere is stale."""
    files = weight_map(sharded)
    name = next(name for name in files if name.endswith("q_proj.weight"))
    tensors = load_file(sharded / files[name])
    right = tensors.pop(name)
    save_file(tensors, sharded / files[name], {"format": "pt"})
    other = next(file for file in files.values() if file != files[name])
    add(sharded, other, {name: torch.zeros_like(right)})
    read = dict(open_loader(SafetensorsLoader, sharded).weights({name: right.shape}))
    assert name not in read
