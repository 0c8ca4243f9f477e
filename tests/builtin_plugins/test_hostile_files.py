"""Files of a model that are damaged or hostile: they load or are soon refused with a message."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
from support.builtins.hostile_files import (
    FOLDER_FILES,
    Opener,
    measured,
    mutants,
    raw_array,
    raw_gguf,
    raw_tensor,
    shapes,
    write_folder,
    write_gguf,
)

import hardpoint.builtin_plugins.models.transformers.model  # noqa: F401 - no cost of a file
from hardpoint import ConfigError, ModelError

SECONDS, MEBIBYTES = 30.0, 200.0
BLOCKS = ("Q8_0", "Q4_1", "Q4_0", "F16", "Q5_1")


@pytest.fixture(scope="module")
def opener() -> Opener:
    return Opener()


@pytest.fixture(scope="module")
def bases(opener: Opener, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints that are mutated, by format; each has been opened once."""
    work = tmp_path_factory.mktemp("bases")
    folder = write_folder(work / "folder")
    by_format = {"gguf": write_gguf(work / "model.gguf")} | dict.fromkeys(FOLDER_FILES, folder)
    by_format["gguf-blocks"] = write_gguf(work / "blocks.gguf", BLOCKS)
    for path in dict.fromkeys(by_format.values()):
        opener.open_and_close(path)
    return by_format


@pytest.mark.parametrize("format", ["gguf", "gguf-blocks", *FOLDER_FILES])
@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 550), marks=pytest.mark.nightly)], ids=["20", "530"]
)
def test_mutants_load_or_are_refused(format, seeds, bases, opener, tmp_path):
    refusals = []
    for label, path in mutants(format, bases[format], tmp_path, seeds):
        with measured() as cost:
            try:
                opener.open_and_close(path)
            except (ModelError, ConfigError) as error:
                refusals.append(str(error))
        assert cost.seconds < SECONDS, (label, cost)
        assert cost.mebibytes < MEBIBYTES, (label, cost)
    assert len(seeds) // 10 < len(refusals) < len(seeds) * 19 // 20
    assert max(map(len, refusals)) < 2_000


STRING, ARRAY, F32, F16 = 8, 9, 0, 1
MANY = 10**6
NESTED = b"".join(raw_array(ARRAY, 1, b"")[4:] for _ in range(500)) + struct.pack("<IQ", 0, 0)

GGUF_FILES = {
    "arrays of arrays": (
        raw_gguf(raw_array(ARRAY, MANY, struct.pack("<IQ", 4, 0) * MANY)),
        "expected arrays of numbers or strings, got an array of arrays",
    ),
    "arrays 500 deep": (raw_gguf(struct.pack("<I", 9) + NESTED), "got an array of arrays"),
    "a million empty strings": (raw_gguf(raw_array(STRING, MANY, bytes(8 * MANY))), "missing|None"),
    "a count past the end": (raw_gguf(raw_array(STRING, 2**61, bytes(64))), "truncated"),
    "a count that wraps": (raw_gguf(raw_array(10, 2**61 + 1, bytes(64))), "truncated"),
    "a length that wraps": (
        raw_gguf(raw_array(STRING, 2, struct.pack("<Q", 2**64 - 8) + bytes(64))),
        "truncated",
    ),
    "big-endian": (
        struct.pack(">4sIQQ", b"GGUF", 3, 0, 0) + bytes(64),
        "it is big-endian; expected a little-endian file",
    ),
    "an offset past the end": (
        raw_gguf(tensors=(raw_tensor("t", [32], F32, 1 << 40),)),
        "truncated: the header refers to byte 1099511627",
    ),
    "an offset that wraps": (raw_gguf(tensors=(raw_tensor("t", [32], F32, 2**64 - 64),)), "trunc"),
    "a size that wraps": (raw_gguf(tensors=(raw_tensor("t", [2**32, 2**32], F32, 0),)), "truncat"),
    "no elements": (raw_gguf(tensors=(raw_tensor("t", [0, 8], F32, 0),)), "at least 1, got"),
    "nine dimensions": (raw_gguf(tensors=(raw_tensor("t", [1] * 9, F32, 0),)), "1 to 4 dimensions"),
    "tensors that overlap": (
        raw_gguf(tensors=tuple(raw_tensor(f"t{i}", [1024], F32, 0) for i in range(9))),
        "its tensors have 36864 bytes and overlap: the file has",
    ),
    "too many fields": (
        struct.pack("<4sIQQ", b"GGUF", 3, 0, MANY) + bytes(64),
        "expected at most 65536 metadata fields, got 1000000",
    ),
    "too many tensors": (
        struct.pack("<4sIQQ", b"GGUF", 3, MANY, 0) + bytes(64),
        "expected at most 65536 tensors, got 1000000",
    ),
}


@pytest.mark.parametrize("kind", GGUF_FILES)
def test_gguf_headers_that_lie_are_refused(kind, opener, tmp_path):
    data, message = GGUF_FILES[kind]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with measured() as cost, pytest.raises(ModelError, match=message):
        opener.open_and_close(path)
    assert cost.seconds < SECONDS
    assert cost.mebibytes < MEBIBYTES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": MANY}, "llama.block_count: expected 2, the number of blocks that have"),
        ({"context_length": 2**31 - 1}, "does not fit into memory: .* KV cache 1024.0 GiB"),
        ({"attention__head_count": 2**31 - 1}, "head"),
        ({"embedding_length": 2**31 - 2}, "does not fit into memory: weights "),
    ],
)
def test_gguf_fields_that_the_tensors_contradict_are_refused(changes, message, opener, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", **changes)
    with measured() as cost, pytest.raises((ModelError, ConfigError), match=message):
        opener.open_and_close(path)
    assert cost.seconds < SECONDS
    assert cost.mebibytes < MEBIBYTES


def test_scales_that_are_not_finite_are_refused_before_there_is_a_cache(opener, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", BLOCKS)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.attn_output.weight")
    assert tensor.tensor_type in gguf.GGML_QUANT_SIZES.keys() - {F32, F16}
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset))
        file.write(b"\xff\xff")
    message = r"'model.layers.1.self_attn.o_proj.weight' of .*: q._.: a scale or offset is not fin"
    with measured() as cost, pytest.raises(ModelError, match=message):
        opener.open_and_close(path)
    assert cost.seconds < SECONDS
    assert cost.mebibytes < MEBIBYTES


@pytest.fixture
def folder(bases: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(bases["config"], tmp_path / "m"))


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": MANY}, "num_hidden_layers: expected at most 1024, got 1000000"),
        ({"num_hidden_layers": 1000}, "lacks 8982 weights"),
        ({"vocab_size": 10**9}, "vocab_size: expected 260, the rows of model.embed_tokens.weight"),
        ({"vocab_size": 10**30}, "vocab_size: expected at most 2147483647, got 1000000"),
        ({"head_dim": 10**9}, "head_dim: expected an even number .* of at most 65536"),
        ({"max_position_embeddings": 2**31 - 1}, "does not fit into memory: .* 1024.0 GiB"),
        ({"rope_theta": float("inf")}, "rope_theta: expected a number > 0, got inf"),
        ({"rope_scaling": {"rope_type": ["default"]}}, "rope_type: expected a string"),
        ({"rope_scaling": {"rope_type": "factors"}}, "factors: expected 8 numbers > 0, got None"),
        ({"torch_dtype": "int8"}, "its dtype 'int8' is none of bfloat16, float16, float32"),
        ({"architectures": ["os:system"]}, "architecture 'os:system' is not supported"),
    ],
)
def test_config_fields_cost_nothing_before_they_are_checked(fields, message, folder, opener):
    edit(folder / "config.json", **fields)
    with measured() as cost, pytest.raises((ModelError, ConfigError), match=message):
        opener.open_and_close(folder)
    assert cost.seconds < SECONDS
    assert cost.mebibytes < MEBIBYTES


def test_weights_of_whole_numbers_are_refused(folder, opener):
    weights = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes().items()}
    (folder / "model.safetensors.index.json").unlink()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"dtype torch.int32, expected a floating one of at least"):
        opener.open_and_close(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../b.safetensors", r"weight_map: expected files inside the folder .*/m, got '../b.safe"),
        ("/etc/hostname", r"expected files inside the folder .*, got '/etc/hostname'"),
        ("link.safetensors", r"got 'link.safetensors', which leads to .*outside.safetensors"),
        ("pytorch_model.bin", "pytorch_model.bin is a pickle, which can run any code"),
        ("pipe.safetensors", "pipe.safetensors: expected a regular file"),
        ("folder.safetensors", "folder.safetensors: expected a regular file"),
        ("x" * 5000, "weight_map: 'xxx.*xxx' cannot be read: File name too long|got a path"),
        ("a\0b", "weight_map: expected the name of a file"),
        (["b.safetensors"], r"weight_map: expected names of files, got \['b.safetensors'\]"),
    ],
)
def test_an_index_names_files_of_its_folder(name, message, folder, opener):
    outside = folder.parent / "outside.safetensors"
    shutil.copy(folder / "b.safetensors", outside)
    shutil.copy(folder / "b.safetensors", folder.parent)
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "folder.safetensors").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={k: name if v == "b.safetensors" else v for k, v in weights.items()})
    with pytest.raises(ModelError, match=message):
        opener.open_and_close(folder)


def test_links_inside_a_folder_and_to_the_hub_cache_are_followed(folder, opener):
    snapshot = folder.parent / "hub" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    (snapshot / "a.safetensors").rename(blobs / "0a")
    (snapshot / "a.safetensors").symlink_to("../../blobs/0a")
    (snapshot / "b.safetensors").rename(snapshot / "c.safetensors")
    (snapshot / "b.safetensors").symlink_to("c.safetensors")
    opener.open_and_close(snapshot)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_pipes_are_never_opened(name, folder, opener):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=rf"m/{name}: expected a regular file"):
        opener.open_and_close(folder)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickles_are_refused_by_name(suffix, folder, opener):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    pickle = folder / f"pytorch_model{suffix}"
    pickle.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    expected = (
        f"{pickle.name} is a pickle, which can run any code .* expected .safetensors or .gguf"
    )
    for path in (folder, pickle):
        with pytest.raises(ModelError, match=expected):
            opener.open_and_close(path)


def test_code_in_a_folder_never_runs(folder, opener, monkeypatch):
    """Nor is the user asked: the answer on the standard input is not read."""
    code = "open({0!r}, 'w').close()\nclass T: pass\nclass C: pass\n"
    for name in ("tok.py", "conf.py", "modeling.py"):
        (folder / name).write_text(code.format(str(folder.parent / "ran")))
    auto_map = {"AutoConfig": "conf.C", "AutoTokenizer": ["tok.T", "tok.T"], "AutoModel": "x.y"}
    edit(folder / "config.json", auto_map=auto_map)
    edit(folder / "tokenizer_config.json", auto_map=auto_map)
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", answers)
    opener.open_and_close(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="auto_map: expected no code .* but a tokenizer.json"):
        opener.open_and_close(folder)
    edit(folder / "tokenizer_config.json", auto_map=None, tokenizer_class="GPT2Tokenizer")
    with pytest.raises(ModelError):
        opener.open_and_close(folder)
    assert answers.tell() == 0
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "[" * 100_000, "config.json is not valid JSON: maximum recursion depth"),
        ("tokenizer_config.json", '{"a":' * 5_000, "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": {"x": 1}}', "eos_token: expected a string, got"),
        ("tokenizer.json", '{"model":' * 5_000, "tokenizer.json is not readable"),
    ],
)
def test_deep_and_wrong_json_is_refused(name, text, message, folder, opener):
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        opener.open_and_close(folder)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_double_a_text_again_and_again_are_refused(part, folder, opener):
    twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    once = {"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"}
    for count, refused in ((3, False), (40, True)):
        parts = {"type": "Sequence", f"{part}s": [*[twice] * count, once]}
        edit(folder / "tokenizer.json", **{part: parts})
        if not refused:
            opener.open_and_close(folder)
            continue
        with pytest.raises(ModelError, match=f"tokenizer.json: {part}: expected .* got 1.09"):
            opener.open_and_close(folder)
