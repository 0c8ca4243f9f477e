"""Wrong adapters: each is refused with one error, and changes nothing."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import change_config, lora, write_adapter, write_model, write_tensors
from support.parallel import write_random_model

from hardpoint import LLM, ConfigError, LoRARequest, ModelError, RequestError, SamplingParams
from hardpoint.builtin_plugins.step_parts.adapters.identity import read_files

SETTINGS = {"adapters": {"max_loras": 1, "max_lora_rank": 4}, "kv_cache": {"num_blocks": 16}}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    model = write_model(folder / "model")
    write_adapter(folder / "good", model, target_modules=["q_proj"])
    return folder


@pytest.fixture(scope="module")
def llm(base):
    with LLM(str(base / "model"), config=SETTINGS, max_model_len=32) as llm:
        yield llm


def tensors(change):
    def apply(folder):
        file = folder / "adapter_model.safetensors"
        stored = load_file(file)
        change(stored)
        save_file(stored, file)

    return apply


def renamed(old, new):
    return tensors(lambda stored: stored.__setitem__(new, stored.pop(old)))


def set_value(name, value):
    return tensors(lambda stored: stored[name].__setitem__((0, 0), value))


def pickled(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def linked(name, target):
    def apply(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return apply


def piped(folder):
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def config(**fields):
    return lambda folder: change_config(folder, **fields)


A, B = Q0.format("A"), Q0.format("B")
CASES = {
    "no folder": (shutil.rmtree, "adapter_config.json: cannot be read: No such file"),
    "pickle": (pickled, "adapter_model.bin is a pickle, which is never read"),
    "link": (
        linked("adapter_model.safetensors", "../other/adapter_model.safetensors"),
        "expected files inside the folder .*/bad, got 'adapter_model.safetensors', which leads to",
    ),
    "device": (linked("adapter_config.json", "/dev/zero"), "which leads to /dev/zero"),
    "circle": (linked("adapter_config.json", "adapter_config.json"), "'adapter_config.json' canno"),
    "pipe": (piped, "adapter_config.json: expected a regular file"),
    "no JSON": (written("adapter_config.json", b"{"), "expected a JSON object"),
    "no object": (written("adapter_config.json", b"[]"), "expected a JSON object"),
    "large config": (written("adapter_config.json", b" " * (1 << 20) + b"{}"), "at most 1048576"),
    "type": (config(peft_type="IA3"), 'peft_type: expected "LORA", got \'IA3\''),
    "dora": (config(use_dora=True), "use_dora: expected false, as DoRA's magnitudes"),
    "bias": (config(bias="all"), "bias: expected \"none\", as trained biases .* got 'all'"),
    "modules": (config(modules_to_save=["lm_head"]), r"modules_to_save: .* got \['lm_head'\]"),
    "experts": (config(target_parameters=["experts.w1"]), "target_parameters: .*experts"),
    "kasa": (config(kasa_config={"a": 1}), r"kasa_config: expected no such .* got {'a': 1}"),
    "init": (config(init_lora_weights="new"), "init_lora_weights: 'new' may change weights of"),
    "unknown": (config(b_new=1, a_new=True), "a_new: expected no such field, .* got True"),
    "pissa": (config(init_lora_weights="pissa_niter_4"), "init_lora_weights: 'pissa_niter_4'"),
    "rank type": (config(r="four"), r"adapter_config.json: .*int.*\$.r"),
    "rank zero": (config(r=0), "r: expected a rank of at least 1, got 0"),
    "rank differs": (config(r=3), r"q_proj: expected rank 3, .* lora_A \[4, 64\]"),
    "alpha": (config(lora_alpha=None), r"lora_alpha"),
    "alpha too large": (config(lora_alpha=1e308), "q_proj: expected finite .* of 2.5e.307"),
    "alpha overflows": (config(lora_alpha=1e42), "q_proj: expected finite products in"),
    "sparse": (
        lambda folder: os.truncate(folder / "adapter_model.safetensors", 1 << 31),
        "adapter_model.safetensors: expected [0-9]+ bytes of tensors, as the header has it, got 2",
    ),
    "pattern": (config(rank_pattern={"(a+)+!": 4}), r"rank_pattern: expected a name.*'\(a\+\)\+!'"),
    "set": (config(alpha_pattern={"[9-0]": 4}), r"alpha_pattern: expected .*'\[9-0\]': bad char"),
    "long": (config(alpha_pattern={".*" * 200: 4}), "alpha_pattern: expected at most 256 char"),
    "many": (config(rank_pattern={f"{n}.*": 4 for n in range(70)}), "at most 64 keys .*got 70"),
    "broken": (written("adapter_model.safetensors", b"\0" * 64), "expected a safetensors file"),
    "short": (written("adapter_model.safetensors", b"{}"), "expected a safetensors file"),
    "cut": (written("adapter_model.safetensors", b"\x08" + b"\0" * 7 + b'{"a": 1}'), "safetensors"),
    "nan": (set_value(A, float("nan")), "q_proj.lora_A: expected finite numbers, got NaN"),
    "inf": (set_value(B, float("inf")), "q_proj.lora_B: expected finite numbers"),
    "no B": (tensors(lambda stored: stored.pop(B)), "q_proj: expected lora_B, as there is lora_A"),
    "no A": (tensors(lambda stored: stored.pop(A)), "q_proj: expected lora_A, as there is lora_B"),
    "other name": (renamed(A, A.replace("A.weight", "magnitude")), "lora_magnitude: expected"),
    "long name": (renamed(A, A.replace("q_proj", "q" * 600)), r"at most 512 characters"),
    "no prefix": (renamed(A, A.removeprefix("base_model.")), "model.layers.0.*expected tensors"),
    "layer": (
        tensors(
            lambda stored: stored.update(
                {n.replace("rs.0.", "rs.7."): stored.pop(n) for n in (A, B)}
            )
        ),
        r"'bad': the model has no linear layer model.layers.7.self_attn.q_proj, which",
    ),
    "tower": (
        tensors(
            lambda stored: stored.update(
                {n.replace("model.lay", "vision_model.lay"): stored.pop(n) for n in (A, B)}
            )
        ),
        "no linear layer vision_model.layers.0.self_attn.q_proj",
    ),
    "twice": (
        tensors(
            lambda stored: stored.update(
                {n.replace("l.lay", "l.language_model.lay"): stored[n].clone() for n in (A, B)}
            )
        ),
        "q_proj: expected one change of each layer, got model.*layers.0.self_attn.q_proj too",
    ),
    "two names": (
        tensors(lambda stored: stored.update({A.replace(".w", ".default.w"): stored[A].clone()})),
        "expected one lora_A of model.layers.0.self_attn.q_proj, got two",
    ),
    "embeddings": (
        tensors(
            lambda stored: stored.update(
                {n.replace("layers.0.self_attn.q_proj", "lm_head"): stored.pop(n) for n in (A, B)}
            )
        ),
        "lm_head: adapters of embeddings and of the head are not supported",
    ),
    "shape": (
        tensors(lambda stored: stored.update({B: torch.zeros(72, 4)})),
        r"lora_B of 64 rows, as the model's matrix is \[64, 64\], got 64 and 72",
    ),
    "dtype": (
        tensors(lambda stored: stored.update({A: stored[A].to(torch.int32)})),
        "lora_A: expected a matrix of floating-point numbers of .* got torch.int32",
    ),
    "float8": (
        tensors(lambda stored: stored.update({B: stored[B].to(torch.float8_e4m3fn)})),
        r"safetensors: model.*q_proj.lora_B: expected .* .* got torch.float8_e4m3fn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_error_names_file_field_and_value(llm, base, tmp_path, case):
    folder = tmp_path / "bad"
    shutil.copytree(base / "good", folder)
    change, message = CASES[case]
    change(folder)
    before = llm.adapters.list()
    with pytest.raises(ModelError, match=message):
        llm.adapters.add(lora("bad", 7, folder))
    with pytest.raises(RequestError, match="expected one of .*'bad'"):
        llm.generate([[1, 2]], SamplingParams(max_tokens=1), lora_request=lora("bad", 7))
    assert llm.adapters.list() == before


def test_rank_above_the_limit(llm, base, tmp_path):
    write_adapter(tmp_path, write_model(tmp_path / "m"), r=5, target_modules=["q_proj"])
    with pytest.raises(ModelError, match=r"at most 4, adapters.max_lora_rank, got 5"):
        llm.adapters.add(lora("large", 7, tmp_path))


def test_requests_and_calls(llm, base):
    good = base / "good"
    added = llm.adapters.add(lora("good", 1, good))
    prompt, params = [[1, 2, 3]], SamplingParams(max_tokens=1)
    for request, error, message in (
        ("good", RequestError, "lora_request: expected a LoRARequest, got 'good'"),
        (lora("", 1), RequestError, "lora.name: expected a name"),
        (lora("good", 0), RequestError, "lora.id: expected at least 1, got 0"),
        (lora("other", 1, good), RequestError, "lora.id: 1 belongs to 'good', got it for 'other'"),
        (lora("other", 2), RequestError, "expected one of 'good', or the path .* got 'other'"),
        (lora("good", 1, base), RequestError, "lora_request.path: 'good' was loaded from"),
        (LoRARequest("good", 1, "", "0" * 64), RequestError, "content_hash: 'good' has content"),
    ):
        with pytest.raises(error, match=message):
            llm.generate(prompt, params, lora_request=request)
    with pytest.raises(RequestError, match="lora_request: expected one or 1, one per"):
        llm.generate(prompt, params, lora_request=[None, None])
    with pytest.raises(ModelError, match="lora.content_hash: expected .*, got 0000"):
        llm.adapters.add(LoRARequest("good", 1, str(good), "0" * 64))
    with pytest.raises(RequestError, match="lora.path: expected the folder of 'x'"):
        llm.adapters.add(lora("x", 2))
    with pytest.raises(RequestError, match='mode: expected "drain" or "end", got \'now\''):
        llm.adapters.remove(1, "now")
    with pytest.raises(RequestError, match="lora_id: "):
        llm.adapters.remove("good")
    for method, arguments in (("rename", {}), ("load", {"name": 3}), ("poll", {"ticket": 0})):
        with pytest.raises(RequestError, match="method: |arguments: |ticket: "):
            llm.plugins.call_part("adapters", method, arguments)
    assert llm.adapters.list() == [added]
    assert (llm.adapters.pin(1), llm.adapters.pin(5)) == (True, False)
    assert (llm.adapters.remove(1), llm.adapters.list()) == (True, [])


def test_the_error_of_an_engine_without_adapters_names_the_setting(base):
    with LLM(str(base / "model"), config={"kv_cache": {"num_blocks": 32}}) as llm:
        for call in (llm.adapters.add, lambda x: llm.generate([[1]], lora_request=x)):
            with pytest.raises(RequestError, match="expected none, as adapters.max_loras is 0"):
                call(lora("good", 1, base / "good"))
        assert (llm.adapters.list(), llm.adapters.remove(1), llm.adapters.pin(1)) == (
            [],
            False,
            False,
        )


def test_adapters_of_the_configuration(base, tmp_path):
    model, good = str(base / "model"), str(base / "good")

    def settings(**fields):
        return {"adapters": {"max_loras": 1, **fields}, "kv_cache": {"num_blocks": 32}}

    with LLM(model, config=settings(paths={"good": good}), max_model_len=32) as llm:
        (loaded,) = llm.adapters.list()
        assert (loaded.name, loaded.id, loaded.path) == ("good", 1, good)
        (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=2), lora_request=loaded)
        assert output.finished
    with pytest.raises(ModelError, match="adapter_config.json: cannot be read"):
        LLM(model, config=settings(paths={"bad": str(tmp_path)}))
    change_config(shutil.copytree(good, tmp_path / "dora"), use_dora=True)
    with pytest.raises(ModelError, match="use_dora"):
        LLM(model, config=settings(paths={"bad": str(tmp_path / "dora")}))
    with pytest.raises(ConfigError, match="adapters: max_cpu_loras has to be at least max_loras"):
        LLM(model, config={"adapters": {"max_loras": 2, "max_cpu_loras": 1}})
    with pytest.raises(ConfigError, match="paths names 1 adapters, which is more than max_loras"):
        LLM(model, config={"adapters": {"paths": {"good": good}}})


def test_a_link_into_the_cache_of_the_hub_is_followed(base, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    shutil.copytree(base / "good", blobs)
    snapshot.mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (snapshot / file).symlink_to(f"../../blobs/{file}")
    assert read_files(str(snapshot)) == read_files(str(base / "good"))


def test_a_file_that_grows_while_it_is_read_is_refused(base, tmp_path, monkeypatch):
    folder = shutil.copytree(base / "good", tmp_path / "grows")
    real = os.fstat

    def grow(descriptor):
        status = real(descriptor)
        with (folder / "adapter_config.json").open("ab") as file:
            file.write(b" " * 100)
        return status

    monkeypatch.setattr(os, "fstat", grow)
    with pytest.raises(ModelError, match="adapter_config.json: its size, .* changed while it was"):
        read_files(str(folder))


def test_fields_that_change_nothing_are_accepted(llm, base, tmp_path):
    folder = shutil.copytree(base / "good", tmp_path / "fields")
    change_config(
        folder,
        velora_config=None,
        arrow_config={},
        a_new=False,
        eva_config={"rho": 2},
        revision="1",
    )
    added = llm.adapters.add(lora("fields", 7, folder))
    assert llm.adapters.list() == [added]
    assert llm.adapters.remove(7)


@pytest.mark.parametrize("relative", ["good", "~/good"])
def test_a_relative_path_is_that_of_the_program(llm, base, tmp_path, monkeypatch, relative):
    monkeypatch.chdir(base)
    monkeypatch.setenv("HOME", str(base))
    request = lora("relative", 5, relative)
    added = llm.adapters.add(request)
    assert added.path == str(base / "good")
    with LLM(
        str(base / "model"),
        config=SETTINGS | {"adapters": {"max_loras": 1, "paths": {"relative": relative}}},
        max_model_len=32,
    ) as other:
        monkeypatch.chdir(tmp_path)
        assert [lora.path for lora in other.adapters.list()] == [added.path]
    monkeypatch.chdir(base)
    (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=1), lora_request=request)
    assert output.finished
    assert llm.adapters.remove(5)


OTHERS = {
    "experts": ("Qwen2MoeForCausalLM", "layers.0.mlp.experts.1.up_proj", 96, 64),
    "fused": ("Phi3ForCausalLM", "layers.1.self_attn.q_proj", 64, 64),
    "head": ("LlamaForCausalLM", "lm_head", 257, 64),
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize("case", OTHERS)
def test_modules_that_are_no_layers_here_are_refused_by_name(tmp_path, case):
    """Experts are multiplied at once; a checkpoint with fused matrices has no parts of them."""
    architecture, module, rows, columns = OTHERS[case]
    shape = {"hidden_size": 64, "intermediate_size": 96, "shared_expert_intermediate_size": 64}
    model = write_random_model(tmp_path / "model", architecture, **shape, **MOE)
    name = module if case == "head" else f"model.{module}"
    write_tensors(tmp_path / "adapter", name, 2, rows=rows, columns=columns)
    settings = SETTINGS | {"load": {"use": "dummy"}}
    message = (
        "lm_head: adapters of embeddings and of the head are not supported"
        if case == "head"
        else f"'other': the model has no linear layer {name}, which the adapter changes"
    )
    with LLM(str(model), config=settings, max_model_len=32) as llm:
        with pytest.raises(ModelError, match=message):
            llm.adapters.add(lora("other", 1, tmp_path / "adapter"))
        assert llm.adapters.list() == []
