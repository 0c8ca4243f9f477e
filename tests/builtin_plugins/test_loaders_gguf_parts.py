"""GGUF files as they are published: split into parts, and with ends of turns that are not named."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.builtins.checkpoint_harness import random_model, write_gguf
from support.builtins.model_harness import load_model, open_loader

from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.plugins import ModelError

TOKENS = [f"t{number}" for number in range(200)]


def copy(source: Path, path: Path, tokens: list[str] | None = None, per_part: int = 0) -> None:
    """Copy a GGUF file, with a vocabulary, or split into parts of so many tensors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=per_part)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    if tokens is not None:
        writer.add_token_list(tokens)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.gguf"
    write_gguf(path, random_model("Llama"), "llama")
    return path


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    """The parts of a file, as llama-gguf-split writes them."""
    copy(whole, tmp_path / "m.gguf", per_part=8)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) > 2
    return files


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    loader = open_loader(GGUFLoader, path)
    model = load_model(Llama, loader, dtype=torch.float32, max_model_len=64)
    shapes = model.weight_shapes()
    assert loader.formats(shapes).keys() == shapes.keys()
    return {name: weight.clone() for name, weight in loader.weights(shapes)}


def test_a_split_file_has_the_weights_of_the_whole_one(whole: Path, parts: list[Path]) -> None:
    expected, weights = weights_of(whole), weights_of(parts[0])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_a_part_that_changes_is_noticed(parts: list[Path]) -> None:
    loader = open_loader(GGUFLoader, parts[0])
    before = loader.fingerprint()
    assert before is not None
    assert loader.content_hash(lambda path: path.name) == " ".join(path.name for path in parts)
    os.utime(parts[-1], (1, 1))
    assert loader.fingerprint() is None


def test_another_part_than_the_first_is_refused(parts: list[Path]) -> None:
    count = len(parts)
    message = rf"{parts[1].name}: split.count: it is part 2 of {count}; expected the first one, "
    with pytest.raises(ModelError, match=message + rf".*-00001-of-0000{count}\.gguf"):
        weights_of(parts[1])


def test_a_part_that_is_missing_or_renamed_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelError, match=parts[1].name):
        weights_of(parts[0])
    renamed = parts[0].rename(parts[0].with_name("other.gguf"))
    with pytest.raises(ModelError, match=r"other.gguf: split.count: it is part 1 of"):
        weights_of(renamed)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, (2, 5)),
        ({40: "<end_of_turn>"}, (2, 5, 40)),  # as of Gemma 3, whose metadata lacks it
        ({7: "<|end|>", 9: "<|endoftext|>"}, (2, 5, 7, 9)),  # of Phi-3
        ({7: "<|end|>", 8: "<|return|>", 9: "<|call|>"}, (2, 5, 8, 9)),  # of gpt-oss
        ({190: "<|im_end|>"}, (2, 5)),  # of no row of the model
    ],
)
def test_ends_of_turns_are_found_by_their_texts(
    texts: dict[int, str], expected: tuple[int, ...], whole: Path, tmp_path: Path
) -> None:
    tokens = [texts.get(number, text) for number, text in enumerate(TOKENS)]
    copy(whole, tmp_path / "m.gguf", tokens)
    assert open_loader(GGUFLoader, tmp_path / "m.gguf").config().eos_token_ids == expected
