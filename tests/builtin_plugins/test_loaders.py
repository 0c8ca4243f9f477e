from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model_harness import Runner, load_model, open_loader

from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.loaders.gguf import _BLOCK_NAMES, _NAMES, GGUFLoader
from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.builtin_plugins.models.qwen import Qwen2, Qwen3
from hardpoint.plugins import ModelError, ModelFiles

TINY = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def random_model(family: str, **fields):
    import transformers

    torch.manual_seed(2)
    config = getattr(transformers, f"{family}Config")(**TINY | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def write_gguf(path: Path, model, architecture: str, *, changes: dict | None = None) -> None:
    """Write a transformers model as llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 16,
        "context_length": config.max_position_embeddings,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    } | (changes or {})
    for key, value in values.items():
        name = f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 5)
    inner = {hf: name for name, hf in _BLOCK_NAMES.items()}
    outer = {hf: name for name, hf in _NAMES.items()}
    for name, tensor in model.state_dict().items():
        array = tensor.detach().float().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = array.shape[0] // 16
            array = permute_as_llama_cpp(array, heads)
        if name in outer:
            writer.add_tensor(outer[name], array)
        else:
            _, _, layer, *middle, end = name.split(".")
            writer.add_tensor(f"blk.{layer}.{inner['.'.join(middle)]}.{end}", array)
    if "rope_factors" in values:
        raise ValueError("rope factors are a tensor")
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute_as_llama_cpp(array: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: HF rows j and j + half of a head become neighbours 2j and 2j + 1."""
    size = array.shape[0] // heads
    out = np.empty_like(array)
    for head in range(heads):
        for j in range(size // 2):
            out[head * size + 2 * j] = array[head * size + j]
            out[head * size + 2 * j + 1] = array[head * size + j + size // 2]
    return out


def refused(loader, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        loader.config()


class TestGGUF:
    def test_demo_config(self, demo_loader: GGUFLoader) -> None:
        config = demo_loader.config()
        assert config.architecture == "LlamaForCausalLM"
        assert config.vocab_size == 49152
        assert config.max_position_embeddings == 8192
        assert config.eos_token_ids == (2,)
        assert config.dtype is None
        expected = {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        }
        assert expected.items() <= config.hf.items()

    def test_fast_reader_gives_what_the_library_gives(self, demo_gguf: Path) -> None:
        ours, theirs = open_gguf(demo_gguf), gguf.GGUFReader(demo_gguf)
        assert list(ours.fields) == list(theirs.fields)
        for name, field in theirs.fields.items():
            assert ours.value(name) == field.contents(), name
        assert [t[:6] for t in map(list_of, ours.tensors)] == [
            t[:6] for t in map(list_of, theirs.tensors)
        ]

    def test_q_and_k_are_unpermuted(self, demo_loader: GGUFLoader) -> None:
        raw = {t.name: t for t in open_gguf(demo_loader.context.files.path).tensors}
        wanted = {
            "model.layers.3.self_attn.q_proj.weight": ("blk.3.attn_q.weight", 9),
            "model.layers.3.self_attn.k_proj.weight": ("blk.3.attn_k.weight", 3),
        }
        got = dict(demo_loader.weights(dict.fromkeys(wanted, ())))
        assert set(got) == set(wanted)
        for name, (source, heads) in wanted.items():
            stored = gguf.quants.dequantize(raw[source].data, raw[source].tensor_type)
            assert not np.array_equal(got[name].numpy(), stored)
            assert np.array_equal(permute_as_llama_cpp(got[name].numpy(), heads), stored)

    @pytest.mark.parametrize(
        ("architecture", "family", "kind", "fields"),
        [
            ("llama", "Llama", Llama, {}),
            ("qwen2", "Qwen2", Qwen2, {}),
            ("qwen3", "Qwen3", Qwen3, {"head_dim": 16}),
        ],
    )
    def test_architectures_equal_transformers(
        self, architecture, family, kind, fields, tmp_path: Path
    ) -> None:
        reference = random_model(family, **fields)
        path = tmp_path / "tiny.gguf"
        write_gguf(path, reference, architecture)
        loader = open_loader(GGUFLoader, path)
        config = loader.config()
        assert config.architecture == f"{family}ForCausalLM"
        assert config.eos_token_ids == (2, 5)
        assert config.dtype == "float32"
        model = load_model(kind, loader, dtype=torch.float32, max_model_len=64)
        tokens = list(range(40))
        got = Runner(model, dtype=torch.float32).logits([("a", tokens)])
        assert (got - reference(torch.tensor([tokens])).logits[0]).abs().max() < 1e-4

    def test_linear_rope_scaling_is_read(self, tmp_path: Path) -> None:
        changes = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
        write_gguf(tmp_path / "tiny.gguf", random_model("Llama"), "llama", changes=changes)
        rope = open_loader(GGUFLoader, tmp_path / "tiny.gguf").config().hf["rope_parameters"]
        assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

    def test_llama3_rope_factors_are_used(self, tmp_path: Path) -> None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        reference = random_model("Llama", rope_parameters=rope)
        scaled = reference.model.rotary_emb.inv_freq
        plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
        factors = torch.nn.Parameter(plain / scaled, requires_grad=False)
        assert not torch.allclose(factors, torch.ones(8))
        reference.register_parameter("rope_freqs", factors)
        _NAMES_WITH = {"rope_freqs": "rope_freqs.weight"}
        path = tmp_path / "tiny.gguf"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(_NAMES, "rope_freqs.weight", "rope_freqs")
            write_gguf(path, reference, "llama")
        model = load_model(Llama, open_loader(GGUFLoader, path), dtype=torch.float32)
        tokens = list(range(60))
        got = Runner(model, dtype=torch.float32).logits([("a", tokens)])
        assert (got - reference(torch.tensor([tokens])).logits[0]).abs().max() < 1e-4

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"block_count": None}, "tiny.gguf: llama.block_count: missing"),
            ({"block_count": 0}, r"llama: block_count: expected a whole number >= 1, got 0"),
            ({"context_length": 0}, "context_length: expected a whole number >= 1, got 0"),
            ({"rope.dimension_count": 8}, "dimension_count: expected the head size 16 .* got 8"),
            ({"expert_count": 8}, "expert_count: mixtures of experts are not supported, got 8"),
            ({"rope.scaling.type": "longrope"}, "expected none, linear or yarn, got 'longrope'"),
        ],
    )
    def test_wrong_metadata_is_refused(self, changes, words, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", random_model("Llama"), "llama", changes=changes)
        refused(open_loader(GGUFLoader, tmp_path / "tiny.gguf"), words)

    def test_unknown_architecture_names_the_known_ones(self, tmp_path: Path) -> None:
        finish(gguf.GGUFWriter(tmp_path / "m.gguf", "mamba"))
        refused(
            open_loader(GGUFLoader, tmp_path / "m.gguf"),
            "m.gguf: general.architecture: 'mamba' is not supported; "
            "supported are llama, qwen2, qwen3",
        )

    def test_file_without_tensors_is_refused(self, tmp_path: Path) -> None:
        finish(gguf.GGUFWriter(tmp_path / "m.gguf", "llama"))
        refused(open_loader(GGUFLoader, tmp_path / "m.gguf"), "no tensor token_embd.weight")

    @pytest.mark.parametrize(
        ("content", "cause"),
        [
            (b"", "empty file"),
            (b"hello, this is no model", "magic"),
            (b"GG", "truncated"),
            (b"GGUF" + struct.pack("<I", 99) + bytes(16), "version 99"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "truncated: its header asks for byte"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "truncated: its header asks"),
        ],
    )
    def test_other_files_are_refused(self, content: bytes, cause: str, tmp_path: Path) -> None:
        path = tmp_path / "broken.gguf"
        path.write_bytes(content)
        refused(
            open_loader(GGUFLoader, path), f"broken.gguf is not a readable GGUF file: .*{cause}"
        )

    def test_missing_file_is_refused(self, tmp_path: Path) -> None:
        refused(open_loader(GGUFLoader, tmp_path / "no.gguf"), "no.gguf .*No such file")

    @pytest.mark.parametrize("share", [0.001, 0.01, 0.5, 0.999])
    def test_truncated_file_is_refused(self, share: float, demo_gguf: Path, tmp_path: Path) -> None:
        path = tmp_path / "cut.gguf"
        with demo_gguf.open("rb") as source, path.open("wb") as target:
            target.write(source.read(int(demo_gguf.stat().st_size * share)))
        refused(open_loader(GGUFLoader, path), "cut.gguf .* truncated: its header asks for byte")

    def test_every_early_cut_is_a_model_error(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", random_model("Llama"), "llama")
        whole = (tmp_path / "tiny.gguf").read_bytes()
        path = tmp_path / "cut.gguf"
        for end in [*range(0, 1200, 7), len(whole) - 40]:
            path.write_bytes(whole[:end])
            refused(open_loader(GGUFLoader, path), "cut.gguf is not a readable GGUF file")

    def test_recognises_by_suffix(self, demo_gguf: Path, tmp_path: Path) -> None:
        assert GGUFLoader.recognises(ModelFiles("demo", demo_gguf))
        assert not GGUFLoader.recognises(ModelFiles("folder", tmp_path))


def list_of(tensor: gguf.ReaderTensor) -> list:
    return [tensor.name, tensor.tensor_type, tensor.shape.tolist(), *tensor[3:6]]


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
        one = dict(open_loader(SafetensorsLoader, folder).weights(shapes))
        many = dict(open_loader(SafetensorsLoader, tmp_path / "sharded").weights(shapes))
        assert set(one) == set(many)
        assert all(torch.equal(one[name], many[name]) for name in one)

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
        ("name", "fields", "words"),
        [
            ("config.json", {"architectures": None}, "architectures: expected a list .* got None"),
            ("config.json", {"architectures": [3]}, r"architectures\[0\]: expected a string"),
            ("config.json", {"vocab_size": "many"}, "vocab_size: expected a whole number"),
            ("config.json", {"max_position_embeddings": None}, "max_position_embeddings: missing"),
            ("config.json", {"quantization_config": {"bits": 4}}, "expected none .*'bits': 4"),
            ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id: expected a token id"),
        ],
    )
    def test_wrong_fields_are_refused(self, name, fields, words, folder: Path) -> None:
        self.edit(folder, name, **fields)
        refused(open_loader(SafetensorsLoader, folder), f"model/{name}: .*{words}|{words}")

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
