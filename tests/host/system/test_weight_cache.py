"""The weight cache: later starts map packed weights; whatever is wrong with a file, tokens stay."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from support.adapters import write_model
from support.builtins.hostile_files import write_folder
from support.plugins.plain_ops import PlainOps
from support.waiting import PATIENCE_S

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.host.system import tensor_files, weight_cache
from hardpoint.host.system.weight_cache import WeightCache
from hardpoint.kernels import cpu
from hardpoint.plugins.config_tables import WeightCacheConfig

PROMPTS = [[1, 2, 3], list(range(40, 60))]
KEY = "a key"
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, detokenize=False)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let `close` wait until a slow machine has written the file."""
    monkeypatch.setattr(weight_cache, "_PATIENCE_S", PATIENCE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start(folder, tmp_path, caplog):
    """Start the model; return its results, and the lines that the cache logged."""

    def run(model=folder, cache=tmp_path / "cache", sleeps=False, **config):
        caplog.clear()
        config = {
            "dtype": "float32",
            "ops": {"use": f"{PlainOps.__module__}:PlainOps"},
            "weight_cache": {"path": str(cache)},
        } | config
        with caplog.at_level(logging.INFO, "hardpoint"), LLM(str(model), config=config) as llm:
            if sleeps:
                llm.sleep(level=2)
                llm.wake_up()
            outputs = [o.outputs[0] for o in llm.generate(PROMPTS, PARAMS)]
        return [(o.token_ids, o.logprobs) for o in outputs], messages(caplog)

    return run


def messages(caplog):
    return [
        f"{record.levelname}: {record.getMessage()}"
        for record in caplog.records
        if record.getMessage().startswith(("weight cache: ", "packed weights: "))
    ]


def skip_without_kernels():
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(str(cause))


def test_a_later_start_names_the_matrices_of_few_bits(start, caplog):
    skip_without_kernels()
    lines = []
    for _ in range(2):
        start(quantization={"use": "int8"}, ops={"use": "native_cpu"})
        lines.append([line for line in caplog.messages if line.startswith("quantized weights")])
    assert lines[0] == lines[1]
    assert "in int8" in lines[0][0]
    assert "packed weights: mapped" in caplog.text


def only_file(cache):
    (file,) = cache.iterdir()
    return file


def never(*_args):
    raise AssertionError("the model's files were read")


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"architectures": ["Qwen3ForCausalLM"]}],
    ids=["Llama", "tied", "Qwen3"],
)
def test_a_later_start_maps_the_weights_and_computes_the_same(
    start, tmp_path, monkeypatch, changes
):
    model = write_folder(tmp_path / "model")
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if "architectures" in changes:
        add_head_norms(model)
    wanted, written = start(model)
    file = only_file(tmp_path / "cache")
    assert [line[:28] for line in written] == ["INFO: packed weights: wrote "]
    assert str(file) in written[0]
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    monkeypatch.setattr(SafetensorsLoader, "weights", never)
    found, used = start(model)
    assert found == wanted
    assert [line[:29] for line in used] == ["INFO: packed weights: mapped "]
    assert str(file) in used[0]
    found, used = start(model, sleeps=True)
    assert found == wanted
    assert len(used) == 2  # also when it woke up


def test_a_later_start_through_transformers_maps_the_weights(start, tmp_path):
    model = tmp_path / "model"
    write_model(model)
    results, lines = zip(
        *(start(model, models={"use": "transformers"}) for _ in range(2)), strict=True
    )
    assert results[0] == results[1]
    assert [[line.split()[3] for line in each] for each in lines] == [["wrote"], ["mapped"]]


def add_head_norms(model):
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    generator = torch.Generator().manual_seed(0)
    norms = {
        f"model.layers.{i}.self_attn.{part}_norm.weight": torch.rand(16, generator=generator)
        for i in range(2)
        for part in "qk"
    }
    save_file(norms, model / "c.safetensors")
    index["weight_map"] |= dict.fromkeys(norms, "c.safetensors")
    path.write_text(json.dumps(index))


@pytest.mark.nightly
def test_the_demo_model_has_the_same_tokens_with_and_without(tmp_path, monkeypatch):
    skip_without_kernels()
    config = {"dtype": "bfloat16", "weight_cache": {"path": str(tmp_path)}, "max_model_len": 64}
    results = []
    for _ in range(2):
        with LLM("smollm2", config=config) as llm:
            outputs = llm.generate(["The capital of France is", "2, 4, 6,"], PARAMS)
            results.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
        monkeypatch.setattr(GGUFLoader, "weights", never)
    assert results[0] == results[1]
    assert len(list(tmp_path.iterdir())) == 1


def flip(place):
    def damage(file):
        data = bytearray(file.read_bytes())
        data[place] ^= 16
        file.write_bytes(data)

    return damage


def swap(file):
    data = bytearray(file.read_bytes())
    data[-4096:-4088], data[-4088:-4080] = data[-4088:-4080], data[-4096:-4088]
    assert data != file.read_bytes()
    file.write_bytes(data)


def replace_with(make):
    def damage(file):
        file.unlink()
        make(file)

    return damage


def of_another_key(file):
    file.unlink()
    write(open_cache(file.parent), "another key")
    only_file(file.parent).rename(file)


DAMAGE = {
    "a byte of a weight": (flip(-500), "damaged: its checksum differs"),
    "two numbers of a page": (swap, "damaged: its checksum differs"),
    "a byte of the header": (flip(100), "its header is damaged"),
    "the first byte": (flip(0), "it is no file of packed weights"),
    "cut": (
        lambda file: os.truncate(file, file.stat().st_size - 4096),
        "it is not whole: expected",
    ),
    "cut to nothing": (lambda file: os.truncate(file, 0), "it is not whole: it has 0 bytes"),
    "longer": (lambda file: os.truncate(file, 1 << 20), "it is not whole: expected"),
    "of another key": (of_another_key, "its name is of other weights"),
    "text": (lambda file: file.write_text("weights" * 9), "it is no file of packed weights"),
    "a folder": (replace_with(lambda file: file.mkdir()), "expected a regular file"),
    "a pipe": (replace_with(os.mkfifo), "expected a regular file"),
    "a link": (replace_with(lambda f: f.symlink_to("/etc/passwd")), "symbolic link"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_file_that_is_not_whole_is_not_used(tmp_path, caplog, what):
    write(open_cache(tmp_path), KEY)
    file = only_file(tmp_path)
    damage, reason = DAMAGE[what]
    damage(file)
    cache = open_cache(tmp_path)
    assert not cache.load(KEY, Holder(1000))
    (line,) = messages(caplog)
    assert line.startswith(f"WARNING: weight cache: {file}: ")
    assert reason in line
    assert line.endswith("; the weights are packed again")
    write(cache, KEY)
    if what == "a folder":  # it stays
        assert messages(caplog)[1:] == [
            f"WARNING: weight cache: {file} cannot be written: Is a directory; the weights are "
            f"packed at each start"
        ]
    else:
        assert open_cache(tmp_path).load(KEY, Holder(1000))


def test_damage_changes_no_token_and_is_mended(start, tmp_path):
    wanted, _ = start()
    flip(-5000)(only_file(tmp_path / "cache"))
    found, lines = start()
    assert found == wanted
    assert [line.split()[3] for line in lines[1:]] == ["wrote"]
    assert "is damaged: its checksum differs; the weights are packed again" in lines[0]
    found, lines = start()
    assert found == wanted
    assert [line.split()[3] for line in lines] == ["mapped"]


def test_a_folder_of_another_user_is_left_alone(start, tmp_path, monkeypatch):
    wanted, _ = start()
    before = only_file(tmp_path / "cache").stat()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    found, lines = start()
    assert found == wanted
    file = only_file(tmp_path / "cache")
    assert lines == [
        f"WARNING: weight cache: {file}: its folder belongs to user {os.getuid()}, expected 12345, "
        f"who runs this; the weights are packed again"
    ]
    assert file.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("kind", ["full", "read-only", "file"])
def test_a_place_that_cannot_be_written_to_is_logged_once(start, tmp_path, monkeypatch, kind):
    wanted, _ = start(weight_cache={"path": "off"})
    cache = tmp_path / "cache"
    if kind == "file":
        cache.write_text("")
    else:
        cache.mkdir()
        number = errno.ENOSPC if kind == "full" else errno.EROFS
        place = {"full": (tensor_files, "_write_all"), "read-only": (weight_cache, "os")}[kind]
        monkeypatch.setattr(*place, Failing(number))
    found, lines = start()
    assert found == wanted
    reason = {
        "full": "cannot be written: No space left on device; the weights are packed at each start",
        "read-only": "cannot be written: Read-only file system; the weights are packed at each st",
        "file": "its folder is not a directory; the weights are packed again",
    }[kind]
    (line,) = lines
    assert line.startswith(f"WARNING: weight cache: {cache}/")
    assert reason in line
    assert kind == "file" or list(cache.iterdir()) == []


class Failing:
    """`os` on a system that cannot be written to; called, a write on a full one."""

    def __init__(self, number):
        self._error = OSError(number, os.strerror(number))

    def __call__(self, *_args):
        raise self._error

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, *mode):
        if flags & os.O_CREAT:
            raise self._error
        return os.open(path, flags, *mode)


def test_nothing_is_kept_where_it_is_off_or_has_no_fingerprint(start, tmp_path, folder):
    for more in (
        {"weight_cache": {"path": "off"}},
        {"load": {"use": "dummy"}},
        {"ops": {"use": "torch"}},
        {"load": {"updates": [str(folder)]}},
    ):
        assert start(**more)[1] == []
    assert not (tmp_path / "cache").exists()


def test_whatever_the_weights_depend_on_is_in_the_key(start, tmp_path, monkeypatch):
    model = write_folder(tmp_path / "model")
    cache = tmp_path / "cache"
    module = tmp_path / "rows.py"
    module.write_text(
        f"from {PlainOps.__module__} import PlainOps\nclass Rows(PlainOps):\n    contract = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def touch(path):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1000))

    def count(**more):
        lines = start(model, **more)[1]
        assert [line.split()[3] for line in lines] == ["wrote"]
        return len(list(cache.iterdir()))

    config = json.loads((model / "config.json").read_text())
    assert count() == 1
    assert count(dtype="bfloat16") == 2
    assert count(plugin={"plain_ops": {"layout": "other"}}) == 3
    touch(model / "a.safetensors")
    assert count() == 4
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert count() == 5
    assert count(ops={"use": "rows:Rows"}) == 6
    touch(module)
    assert count(ops={"use": "rows:Rows"}) == 7
    assert [line.split()[3] for line in start(model)[1]] == ["mapped"]


class Holder:
    """A model that holds one tensor."""

    def __init__(self, size):
        self.tensors = {"it": torch.arange(size, dtype=torch.int32)}

    def packed_weights(self):
        return self.tensors

    def load_packed(self, tensors):
        assert torch.equal(tensors["it"], self.tensors["it"])


def open_cache(folder, max_bytes=1 << 30, num_ranks=1):
    return WeightCache(WeightCacheConfig(path=str(folder), max_bytes=max_bytes), num_ranks)


def write(cache, key, size=1000):
    cache.save(key, Holder(size))
    cache.close()


class TwoNames(Holder):
    """A model that has one tensor under two names, and some of its numbers under a third one."""

    def packed_weights(self):
        whole = self.tensors["it"]
        return {"table": whole, "head": whole.view(whole.shape), "part": whole[:500]}

    def load_packed(self, tensors):
        self.loaded = tensors


def test_a_tensor_of_two_names_is_there_once(tmp_path):
    model, cache = TwoNames(4096), open_cache(tmp_path, max_bytes=20_480)
    cache.save(KEY, model)  # the limit does not count it twice either
    cache.close()
    assert cache.load(KEY, model)
    loaded, packed = model.loaded, model.packed_weights()
    assert {name: found.tolist() for name, found in loaded.items()} == {
        name: found.tolist() for name, found in packed.items()
    }
    assert loaded["table"].data_ptr() == loaded["head"].data_ptr() != loaded["part"].data_ptr()
    assert only_file(tmp_path).stat().st_size == 4096 + 16_384 + 4096


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path):
    caches = [open_cache(tmp_path) for _ in range(8)]
    threads = [threading.Thread(target=write, args=(c, "key", 1 << 20)) for c in caches]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        open_cache(tmp_path).load("key", Holder(1 << 20))  # asserts what it gets
    assert open_cache(tmp_path).load("key", Holder(1 << 20))
    assert only_file(tmp_path).suffix == ".weights"


def test_files_that_were_used_least_recently_are_removed(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hardpoint")
    cache = open_cache(tmp_path, max_bytes=20_000)
    (tmp_path / "notes.txt").write_text("somebody else's")
    for place, key in enumerate("abcd"):
        write(cache, key)  # of 8192 bytes each
        for file in tmp_path.glob("*.weights"):
            found = file.stat()
            os.utime(file, (0, found.st_mtime - 100 * (4 - place)))
        if key == "b":
            assert open_cache(tmp_path).load("a", Holder(1000))
    loaded = [key for key in "abcd" if cache.load(key, Holder(1000))]
    assert "d" in loaded
    assert len(loaded) <= 2
    assert any("above weight_cache.max_bytes" in line for line in messages(caplog))
    assert (tmp_path / "notes.txt").exists()
    write(cache, "e", 10_000)
    assert messages(caplog)[-1] == (
        "INFO: packed weights: not kept: they have 40960 bytes, weight_cache.max_bytes is 20000"
    )


@pytest.mark.parametrize(("max_bytes", "kept"), [(12_288, ["rank 0", "rank 1"]), (8_191, [])])
def test_ranks_keep_the_files_of_all_or_none(tmp_path, caplog, max_bytes, kept):
    caplog.set_level(logging.INFO, "hardpoint")
    caches = {f"rank {rank}": open_cache(tmp_path, max_bytes, num_ranks=2) for rank in (0, 1)}
    for key, cache in caches.items():
        write(cache, key)  # of 4096 bytes each, and a header
    assert [key for key, cache in caches.items() if cache.load(key, Holder(1000))] == kept
    lines = messages(caplog)
    assert not any("removed" in line for line in lines)
    if not kept:
        assert lines == 2 * [
            "INFO: packed weights: not kept: they have 4096 bytes in each of 2 ranks, "
            "weight_cache.max_bytes is 8191"
        ]


def test_temporary_files_of_killed_writers_are_removed(tmp_path):
    abandoned, recent = tmp_path / "a.0.temporary", tmp_path / "b.0.temporary"
    for file in (abandoned, recent):
        file.write_text("half")
    os.utime(abandoned, (0, time.time() - 7200))
    write(open_cache(tmp_path), "key")
    assert not abandoned.exists()
    assert recent.exists()


def test_files_that_others_rename_meanwhile_are_passed_over(tmp_path, monkeypatch):
    listed = type(tmp_path).iterdir
    monkeypatch.setattr(
        type(tmp_path), "iterdir", lambda folder: [folder / "gone.0.temporary", *listed(folder)]
    )
    write(open_cache(tmp_path), "key")
    monkeypatch.undo()
    assert [file.suffix for file in tmp_path.iterdir()] == [".weights"]


def test_closing_gives_up_where_writing_takes_long(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hardpoint")
    began = threading.Event()

    def slow(*_args):
        began.set()
        cache_closed.wait(PATIENCE_S)

    cache_closed = threading.Event()
    monkeypatch.setattr(tensor_files, "_write_all", slow)
    monkeypatch.setattr(weight_cache, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(weight_cache, "_DELAY_S", 0.0)
    monkeypatch.setattr(tensor_files, "_CHUNK", 1000)
    cache = open_cache(tmp_path)
    cache.save("key", Holder(1000))
    assert began.wait(PATIENCE_S)
    cache.close()
    cache_closed.set()
    for thread in threading.enumerate():
        if thread.name == "hardpoint-weight-cache":
            thread.join()
    assert list(tmp_path.iterdir()) == []
    closed = "INFO: packed weights: not kept, because the model was closed before"
    assert messages(caplog) == [closed]


def test_the_default_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write(WeightCache(WeightCacheConfig()), "key")
    assert only_file(tmp_path / "hardpoint")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(WeightCache(WeightCacheConfig()), "key")
    assert only_file(tmp_path / "home" / ".cache" / "hardpoint")
