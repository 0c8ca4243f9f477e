from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.builtins.checkpoint_harness import TINY, random_model, refused
from support.builtins.model_harness import Runner, load_model, open_loader

from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.plugins import ModelFiles


class TestSafetensors:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        random_model("Llama").save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def edit(self, folder: Path, name: str, **fields) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | fields))

    def test_config_and_weights(self, folder: Path) -> None:
        loader = open_loader(SafetensorsLoader, folder)
        config = loader.config()
        assert config.architecture == "LlamaForCausalLM"
        assert config.eos_token_ids == (2,)
        assert config.dtype == "float32"
        assert config.hf["hidden_size"] == 64
        weights = random_model("Llama").state_dict()
        got = dict(loader.weights({name: t.shape for name, t in weights.items()}))
        assert set(got) == set(weights)
        assert all(torch.equal(got[name], weights[name]) for name in weights)

    def test_only_wanted_weights_are_read(self, folder: Path) -> None:
        loader = open_loader(SafetensorsLoader, folder)
        wanted = {"model.norm.weight": (64,), "absent.weight": (1,)}
        assert [name for name, _ in loader.weights(wanted)] == ["model.norm.weight"]

    def test_shards_give_the_same_as_one_file(self, folder: Path, tmp_path: Path) -> None:
        random_model("Llama").save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
        shapes = {name: t.shape for name, t in random_model("Llama").state_dict().items()}
        single = dict(open_loader(SafetensorsLoader, folder).weights(shapes))
        many = dict(open_loader(SafetensorsLoader, tmp_path / "sharded").weights(shapes))
        assert set(single) == set(many)
        assert all(torch.equal(single[name], many[name]) for name in single)

    def test_missing_shard_is_named(self, tmp_path: Path) -> None:
        random_model("Llama").save_pretrained(tmp_path / "m", max_shard_size="60KB")
        lost = sorted((tmp_path / "m").glob("*.safetensors"))[1]
        lost.unlink()
        refused(open_loader(SafetensorsLoader, tmp_path / "m"), f"m: {lost.name} is missing")

    @pytest.mark.parametrize("end", [3, 200, -100])
    def test_truncated_file_is_named(self, end: int, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:end])
        refused(
            open_loader(SafetensorsLoader, folder),
            "model/model.safetensors is damaged or truncated",
        )

    @pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([7, 9], (7, 9)), (None, (2,))])
    def test_generation_config_names_eos(self, eos, expected, folder: Path) -> None:
        self.edit(folder, "generation_config.json", eos_token_id=eos)
        assert open_loader(SafetensorsLoader, folder).config().eos_token_ids == expected

    @pytest.mark.parametrize(
        ("outside", "inside", "expected"),
        [([3, 4], [5], (3, 4)), (None, [5, 6], (5, 6)), (None, 5, (5,)), (None, None, ())],
    )
    def test_an_inner_configuration_names_eos(
        self, outside, inside, expected, folder: Path
    ) -> None:
        self.edit(folder, "generation_config.json", eos_token_id=None)
        text = json.loads((folder / "config.json").read_text())
        text["eos_token_id"] = inside
        self.edit(folder, "config.json", eos_token_id=outside, text_config=text)
        assert open_loader(SafetensorsLoader, folder).config().eos_token_ids == expected

    def test_generation_config_recommends_how_to_sample(self, folder: Path) -> None:
        assert open_loader(SafetensorsLoader, folder).config().default_sampling == {}
        stated = {"temperature": 1, "top_k": 20, "min_p": None, "do_sample": True, "num_beams": 2}
        self.edit(folder, "generation_config.json", **stated)
        for loader in (SafetensorsLoader, DummyLoader):
            sampling = open_loader(loader, folder).config().default_sampling
            assert sampling == {"temperature": 1.0, "top_k": 20}

    @pytest.mark.parametrize(
        ("name", "fields", "message"),
        [
            ("config.json", {"architectures": None}, "architectures: expected a list .* got None"),
            ("config.json", {"architectures": [3]}, r"architectures\[0\]: expected a string"),
            ("config.json", {"vocab_size": "many"}, "vocab_size: expected a whole number"),
            ("config.json", {"max_position_embeddings": 0}, "max_position_embeddings: expected"),
            ("config.json", {"vocab_size": None, "model_type": "x"}, "vocab_size: missing, and it"),
            ("config.json", {"quantization_config": {"bits": 4}}, "expected none .*'bits': 4"),
            ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id: expected a token id"),
            ("generation_config.json", {"top_p": 7}, "top_p: expected a number <= 1, got 7"),
            (
                "generation_config.json",
                {"temperature": "hot"},
                "temperature: expected a number >= 0",
            ),
        ],
    )
    def test_wrong_fields_are_refused(self, name, fields, message, folder: Path) -> None:
        self.edit(folder, name, **fields)
        refused(open_loader(SafetensorsLoader, folder), f"model/{name}: .*{message}|{message}")

    @pytest.mark.parametrize(
        ("fields", "length"),
        [
            ({"model_type": "gpt2"}, 1024),  # that of its class of transformers
            ({"model_type": "bloom"}, 1 << 20),  # it has no length, and none is stated
            ({"model_type": "x", "seq_length": 96}, 96),
            ({"model_type": "x", "context_length": 80}, 80),
            ({"model_type": "xmod", "max_position_embeddings": 66}, 64),
            ({"text_config": {"model_type": "gemma3_text"}}, 131_072),
        ],
    )
    def test_the_longest_context_has_several_names(
        self, fields: dict[str, object], length: int, folder: Path
    ) -> None:
        self.edit(folder, "config.json", **({"max_position_embeddings": None} | fields))
        config = open_loader(SafetensorsLoader, folder).config()
        assert config.max_position_embeddings == length

    def test_missing_and_invalid_config_are_refused(self, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        refused(open_loader(SafetensorsLoader, folder), "model/config.json is not valid JSON")
        (folder / "config.json").write_text("[]")
        refused(open_loader(SafetensorsLoader, folder), "config.json: expected an object, got list")
        (folder / "config.json").unlink()
        refused(
            open_loader(SafetensorsLoader, folder),
            "model/config.json cannot be read: No such file",
        )

    def test_several_files_without_an_index_are_refused(self, folder: Path) -> None:
        shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
        (folder / "model.safetensors").rename(folder / "b.safetensors")
        refused(
            open_loader(SafetensorsLoader, folder),
            "expected model.safetensors or .*index.json, found a.safetensors, b.safetensors",
        )

    @pytest.mark.parametrize("weight_map", [None, [], {}])
    def test_index_without_a_map_is_refused(self, weight_map, folder: Path) -> None:
        self.edit(folder, "model.safetensors.index.json", weight_map=weight_map)
        refused(open_loader(SafetensorsLoader, folder), "weight_map: expected a table")

    def test_recognises_directories_with_weights(self, folder: Path, demo_gguf: Path) -> None:
        assert SafetensorsLoader.recognises(ModelFiles("m", folder))
        (folder / "model.safetensors").unlink()
        assert not SafetensorsLoader.recognises(ModelFiles("m", folder))
        assert not SafetensorsLoader.recognises(ModelFiles("demo", demo_gguf))


class TestDummy:
    SHAPES = {"a.weight": (400, 300), "b.weight": (400, 300), "a.bias": (9,), "norm.weight": (9,)}

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        fields = TINY | {"architectures": ["LlamaForCausalLM"], "initializer_range": 0.05}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    def test_weights_depend_on_name_and_seed_alone(self, folder: Path) -> None:
        first = dict(open_loader(DummyLoader, folder).weights(self.SHAPES))
        backwards = dict(reversed(self.SHAPES.items()))
        again = dict(open_loader(DummyLoader, folder / "config.json").weights(backwards))
        other = dict(open_loader(DummyLoader, folder, seed=1).weights(self.SHAPES))
        assert {name: tuple(t.shape) for name, t in first.items()} == self.SHAPES
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["a.weight"], other["a.weight"])
        assert not torch.equal(first["a.weight"], first["b.weight"])

    def test_values(self, folder: Path) -> None:
        weights = dict(open_loader(DummyLoader, folder).weights(self.SHAPES))
        assert weights["a.weight"].std().item() == pytest.approx(0.05, rel=0.02)
        assert torch.equal(weights["norm.weight"], torch.ones(9))
        assert torch.equal(weights["a.bias"], torch.zeros(9))

    def test_a_model_runs_on_them(self, folder: Path) -> None:
        model = load_model(Llama, open_loader(DummyLoader, folder), dtype=torch.float32)
        assert Runner(model, dtype=torch.float32).logits([("a", [1, 2])]).isfinite().all()

    def test_is_never_chosen_by_itself(self, folder: Path) -> None:
        assert not DummyLoader.recognises(ModelFiles("m", folder))

    def test_missing_config_is_refused(self, tmp_path: Path) -> None:
        refused(open_loader(DummyLoader, tmp_path), "config.json cannot be read")
