"""Encoders and their weights: names in checkpoints, quantization, weight updates, sleep."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.builtins.checkpoint_harness import write_gguf
from support.cases import nightly_but
from support.gemma_images import config, image, prompt, reference, write_model

from hardpoint import LLM, ModelError, RequestError, SamplingParams
from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.gemma.images import Gemma3Images, Gemma3WithImages
from hardpoint.plugins import ModelConfig
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.toolkit.images import ImageReader

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3)
PROMPTS = [prompt("see ", 0, " and ", 1, "."), prompt("text alone"), prompt("again ", 0)]

LONG = prompt("new ", 2, " and a text after it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma3"), num_hidden_layers=2, layer_types=None)


def open_llm(folder: Path, **tables: Any) -> LLM:
    config = {"dtype": "float32", "max_model_len": 256, "kv_cache": {"block_size": 8}, **tables}
    return LLM(str(folder), config=config)


def results(outputs) -> list[Any]:
    return [
        (out.outputs[0].token_ids, [dict(entry) for entry in out.outputs[0].logprobs])
        for out in outputs
    ]


def copy_of(folder: Path, target: Path, change) -> Path:
    """Return a copy of a model with changed tensors."""
    shutil.copytree(folder, target)
    path = target / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return target


def test_names_of_earlier_checkpoints_are_read(folder, tmp_path):
    def renamed(tensors):
        prefix = "vision_tower."
        return {
            name.replace(prefix, f"{prefix}vision_model.")
            if name.startswith(prefix)
            else name: tensor
            for name, tensor in tensors.items()
        }

    with open_llm(folder) as llm:
        expected = results(llm.generate(PROMPTS, GREEDY))
    with open_llm(copy_of(folder, tmp_path / "earlier", renamed)) as llm:
        assert results(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param({"quantization": {"use": "int8"}}, marks=pytest.mark.nightly),
        {"kv_cache": {"block_size": 8, "dtype": "int8"}},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.nightly),
    ],
    ids=["int8 weights", "int8 cache", "bfloat16"],
)
def test_batches_are_the_same_as_alone_in_few_bits(folder, tables):
    with open_llm(folder, **tables) as llm:
        alone = [results(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS]
        llm.reset_prefix_cache()
        assert results(llm.generate(PROMPTS, GREEDY)) == alone


def test_other_weights_encode_images_again(folder, tmp_path):
    def other(tensors):
        name = "multi_modal_projector.mm_input_projection_weight"
        return tensors | {name: -tensors[name]}

    changed = copy_of(folder, tmp_path / "other", other)
    with open_llm(changed) as llm:
        expected = results(llm.generate(PROMPTS, GREEDY))
    with open_llm(folder) as llm:
        before = results(llm.generate(PROMPTS, GREEDY))
        llm.weights.update(str(changed), version="2")
        after = results(llm.generate(PROMPTS, GREEDY))
    assert after == expected
    assert after != before


@pytest.mark.parametrize("level", nightly_but([1, 2], 2))
def test_images_after_a_sleep_are_those_before_it(folder, level):
    with open_llm(folder) as llm:
        before = results(llm.generate(PROMPTS, GREEDY))
        llm.sleep(level)
        llm.wake_up()
        assert results(llm.generate(PROMPTS, GREEDY)) == before


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("do_pan_and_scan", True, "do_pan_and_scan: expected false"),
        ("resample", 3, r"resample: expected 2 \(bilinear\), got 3"),
        ("size", {"height": 64, "width": 64}, r"size: expected 32 x 32, got \{'height': 64"),
        ("image_mean", [0.5], r"image_mean: expected three numbers, got \[0.5\]"),
        ("do_normalize", False, "do_normalize: expected true, got false"),
        ("rescale_factor", -1, "rescale_factor: expected a number > 0, got -1"),
    ],
)
def test_settings_of_images_that_are_not_supported_are_refused(
    folder, tmp_path, field, value, words
):
    target = tmp_path / "model"
    shutil.copytree(folder, target)
    path = target / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ModelError, match=f"image processor: {words}"):
        open_llm(target)


class Causal(TorchAttention):
    """A backend in which no token sees a later one."""

    contract = 1
    sees_ahead = False


def test_a_backend_in_which_tokens_see_no_later_ones_is_refused_by_name(folder, monkeypatch):
    use = f"{__name__}:Causal"
    monkeypatch.setattr(SafetensorsLoader, "cut_weights", _not_read)
    words = rf"attention.use: .*{use}.* has no tokens that see later ones .*choose another"
    with pytest.raises(ModelError, match=words):
        open_llm(folder, attention={"use": use})


def _not_read(self, *arguments):
    raise AssertionError("weights are read")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "mmproj.gguf",
            "mmproj.gguf: general.architecture: 'clip' is the encoder of images of another file's "
            "model; expected that file, which is read as a model of text alone",
        ),
        ("", "it is a directory; expected the path of a file in it, mmproj.gguf for example"),
    ],
    ids=["file", "folder"],
)
def test_gguf_files_of_encoders_are_refused_before_weights_are_read(
    folder, tmp_path, monkeypatch, path, words
):
    target = shutil.copytree(folder, tmp_path / "model")
    (target / "model.safetensors").unlink()
    write_encoder(target / "mmproj.gguf")
    monkeypatch.setattr(GGUFLoader, "cut_weights", _not_read)
    with pytest.raises(ModelError, match=words):
        open_llm(target / path)


def write_encoder(path: Path) -> None:
    """Write the encoder of a Gemma 3, as llama.cpp's converter does beside the text model."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "gemma3")
    writer.add_tensor("mm.input_projection.weight", np.zeros((48, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_text_model_of_gguf_takes_no_images(folder, tmp_path):
    whole = transformers.Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    text = transformers.Gemma3ForCausalLM(whole.config.text_config)
    write_gguf(tmp_path / "text.gguf", text, "gemma3")
    words = "multi_modal_data: 'image': the model Gemma3ForCausalLM takes text alone"
    with open_llm(tmp_path / "text.gguf", tokenizer={"path": str(folder)}) as llm:
        with pytest.raises(RequestError, match=words):
            llm.generate(PROMPTS[:1], GREEDY)
        assert llm.generate(PROMPTS[1:2], GREEDY)[0].finished


def test_a_fault_of_the_encoder_ends_the_requests_with_images_alone(folder, monkeypatch):
    with open_llm(folder) as llm:
        expected = results(llm.generate(PROMPTS, GREEDY))
        other = results(llm.generate([LONG], GREEDY))
        llm.reset_prefix_cache()
        llm.engines.reset_encoder_cache()

        def failing(self, modality, items):
            raise RuntimeError("no encoder today")

        encode = Gemma3WithImages.encode_media
        monkeypatch.setattr(Gemma3WithImages, "encode_media", failing)
        ended = llm.generate([LONG, PROMPTS[1]], GREEDY)
        monkeypatch.setattr(Gemma3WithImages, "encode_media", encode)
        assert "no encoder today" in ended[0].outputs[0].error
        assert results(ended[1:]) == expected[1:2]
        # Keys and values without its embeddings are not found.
        assert results(llm.generate([LONG], GREEDY)) == other
        assert results(llm.generate(PROMPTS, GREEDY)) == expected


def test_plain_torch_numbers_are_read_as_transformers_does(folder):
    known = reference(folder).inputs(prompt(0))["pixel_values"][0]
    media = Gemma3Images(
        ModelConfig(
            architecture="x", hf=config().to_dict(), vocab_size=120, max_position_embeddings=512
        ),
        {},
    )
    array = image(0)
    with contextlib.closing(ImageReader(ImagesConfig(), media=media)) as reader:
        (decoded,) = reader.read([("x", array)])
    pixels = torch.frombuffer(bytearray(decoded.data), dtype=torch.uint8).view(media.item_shape)
    assert torch.equal(media.numbers(pixels), known)
