"""Adapters that a program has as tensors: kept where all ranks read them, as long as needed."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.adapters import all_logprobs, difference, lora, write_adapter, write_model
from support.cases import nightly_but

from hardpoint import LLM, AsyncLLM, ModelError, RequestError, SamplingParams

PROMPT = [5, 17, 200, 31, 8, 99, 64, 3]
NEAR = 1e-4
MULTIPROC = {"executor": {"use": "multiproc"}}
FORMS = {
    "plain": {},
    "process": {"engine": {"in_process": False}},
    "tensor ranks": {**MULTIPROC, "parallel": {"tensor": 2}},
}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


class Given:
    """An adapter as a program has it."""

    def __init__(self, folder, model, seed):
        self.folder = folder
        self.merged = write_adapter(folder, model, seed=seed)
        self.tensors = load_file(folder / "adapter_model.safetensors")
        self.config = json.loads((folder / "adapter_config.json").read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensors")
    model = write_model(folder / "model")
    return str(folder / "model"), [Given(folder / f"a{seed}", model, seed) for seed in range(3)]


def settings_of(form="plain", **fields):
    adapters = {"max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 4}
    return {"adapters": adapters, "kv_cache": {"num_blocks": 32}, **FORMS[form]} | fields


def check(llm, name, adapter):
    (output,) = llm.generate([PROMPT], all_logprobs(3), lora_request=lora(name, 1))
    assert difference(output, PROMPT, adapter.merged) < NEAR


@pytest.mark.parametrize("form", nightly_but(FORMS, "plain", "process"))
def test_tensors_are_found_again_and_freed(base, form):
    """After others took their place in CPU memory, and after both levels of sleep."""
    model, (first, second, third) = base
    with LLM(model, config=settings_of(form), max_model_len=64) as llm:
        mine = {name: tensor.clone() for name, tensor in first.tensors.items()}
        request = llm.adapters.add(lora("one", 1), mine, first.config)
        for tensor in mine.values():  # which are the program's again
            tensor.fill_(torch.nan)
        two = llm.adapters.add(lora("two", 2), second.tensors, second.config)
        assert request.content_hash != two.content_hash
        folders = [Path(request.path), Path(two.path)]
        assert all(folder.is_dir() for folder in folders)
        check(llm, "one", first)
        (of_two,) = llm.generate([PROMPT], all_logprobs(3), lora_request=two)
        assert difference(of_two, PROMPT, second.merged) < NEAR
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            check(llm, "one", first)
        assert llm.adapters.remove(2)
        assert not folders[1].exists()
        llm.generate([PROMPT], SamplingParams(max_tokens=1))  # whose plan reports the end of "one"
        again = llm.adapters.add(lora("one", 1), third.tensors, third.config)  # takes its place
        check(llm, "one", third)
        assert not folders[0].exists()
        assert llm.adapters.list() == [again]
    assert not Path(again.path).exists()


def test_a_request_keeps_removed_tensors_to_its_end(base):
    model, (first, *_) = base
    with LLM(model, config=settings_of(), max_model_len=64) as llm:
        request = llm.adapters.add(lora("one", 1), first.tensors, first.config)
        stream = llm.stream(
            PROMPT, SamplingParams(max_tokens=9, temperature=0), lora_request=request
        )
        next(stream)
        assert llm.adapters.remove(1)
        assert Path(request.path).exists()
        llm.sleep(2, "keep")
        llm.wake_up()
        tokens = [token for output in stream for token in output.outputs[0].token_ids]
        assert len(tokens) == 8
        llm.generate([PROMPT], SamplingParams(max_tokens=1))  # whose plan reports it
        assert not Path(request.path).exists()


def test_each_engine_keeps_tensors_as_long_as_it_needs_them(base):
    model, (first, second, _) = base
    several = {"parallel": {"data": 2}, "engine": {"in_process": False}}
    with LLM(model, config=settings_of(**several), max_model_len=64) as llm:
        request = llm.adapters.add(lora("one", 1), first.tensors, first.config)
        (folder,) = Path(request.path).parents[:1]
        assert len(list(folder.iterdir())) == 2
        two = llm.adapters.add(lora("two", 2), second.tensors, second.config)  # takes its place
        for output in llm.generate([PROMPT] * 4, all_logprobs(3), lora_request=two):
            assert difference(output, PROMPT, second.merged) < NEAR
        llm.engines.scale(1)
        assert len(list(folder.iterdir())) == 1
        check(llm, "one", first)
        assert llm.adapters.remove(1)
        llm.generate([PROMPT], SamplingParams(max_tokens=1))
    assert not folder.exists()


def test_replaced_tensors_go_with_the_next_ones_or_the_name(base):
    """Until then, a request may name them by their hash; one that has them keeps them."""
    model, adapters = base
    adapters_of = {"max_loras": 2, "max_cpu_loras": 32, "max_lora_rank": 4}
    greedy = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with LLM(model, config=settings_of(adapters=adapters_of), max_model_len=64) as llm:

        def add(index):
            adapter = adapters[index % 3]
            config = adapter.config | {"lora_alpha": 1 + index}
            return llm.adapters.add(lora("policy", 1), adapter.tensors, config)

        def kept():
            return [request for request in requests if Path(request.path).exists()]

        requests = [add(0)]
        stream = llm.stream(PROMPT, greedy, lora_request=requests[0])
        next(stream)
        for index in range(1, 6):
            requests.append(add(index))
            assert kept() == [requests[0], *requests[1:][-2:]]
        (late,) = llm.generate([PROMPT], greedy, lora_request=requests[-2])
        assert (late.lora_request, late.outputs[0].error) == (requests[-2], None)
        assert [output.outputs[0].error for output in stream] == [None] * 8
        llm.generate([PROMPT], SamplingParams(max_tokens=1))  # whose plan reports the end
        assert kept() == requests[-2:]
        assert llm.adapters.remove(1)
        assert kept() == []


def test_equal_tensors_are_one_content(base):
    model, (first, *_) = base
    backwards = dict(reversed(first.config.items()))
    with LLM(model, config=settings_of(), max_model_len=64) as llm:
        request = llm.adapters.add(lora("one", 1), first.tensors, first.config)
        same = llm.adapters.add(lora("same", 2), dict(reversed(first.tensors.items())), backwards)
        assert request.content_hash == same.content_hash
        assert llm.adapters.remove(2)
        check(llm, "one", first)
    assert not Path(request.path).exists()


def test_async(base):
    model, (first, *_) = base

    async def run():
        async with AsyncLLM(model, config=settings_of(), max_model_len=64) as llm:
            added = await llm.adapters.add(lora("one", 1), first.tensors, first.config)
            stream = llm.generate(PROMPT, all_logprobs(3), lora_request=lora("one", 1))
            outputs = [output async for output in stream]
            assert await llm.adapters.remove(1)
            return outputs[-1], Path(added.path)

    output, folder = asyncio.run(run())
    assert difference(output, PROMPT, first.merged) < NEAR
    assert not folder.exists()


def changed(tensors, change):
    clones = {name: tensor.clone() for name, tensor in tensors.items()}
    change(clones)
    return clones


A, B = Q0.format("A"), Q0.format("B")
WRONG = {
    "path": (
        lambda adapter: ({"path": adapter.folder}, adapter.tensors, adapter.config),
        RequestError,
        "lora.path: expected an empty one, as tensors are given, got '",
    ),
    "no config": (
        lambda adapter: ({}, adapter.tensors, None),
        RequestError,
        "config: expected the fields of adapter_config.json .*, as tensors are given, got None",
    ),
    "no tensors": (
        lambda adapter: ({}, None, adapter.config),
        RequestError,
        "config: expected none without tensors",
    ),
    "empty": (
        lambda adapter: ({}, {}, adapter.config),
        RequestError,
        "tensors: expected tensors by their names, got none",
    ),
    "list": (
        lambda adapter: ({}, list(adapter.tensors.values()), adapter.config),
        RequestError,
        "tensors: expected tensors by their names, got",
    ),
    "no tensor": (
        lambda adapter: ({}, {A: 3}, adapter.config),
        RequestError,
        "tensors: expected tensors by their names, got 3 for '",
    ),
    "object": (
        lambda adapter: ({}, adapter.tensors, adapter.config | {"task_type": object()}),
        RequestError,
        "config: expected the fields of adapter_config.json",
    ),
    "nan": (
        lambda adapter: (
            {},
            changed(adapter.tensors, lambda tensors: tensors[A].fill_(torch.nan)),
            adapter.config,
        ),
        ModelError,
        "q_proj.lora_A: expected finite numbers, got NaN",
    ),
    "shape": (
        lambda adapter: (
            {},
            changed(adapter.tensors, lambda tensors: tensors.update({B: torch.zeros(7, 4)})),
            adapter.config,
        ),
        ModelError,
        r"lora_B of 64 rows, as the model's matrix is \[64, 64\], got 64 and 7",
    ),
    "module": (
        lambda adapter: (
            {},
            {name.replace("layers.0", "layers.9"): t for name, t in adapter.tensors.items()},
            adapter.config,
        ),
        ModelError,
        "'bad': the model has no linear layer model.layers.9",
    ),
    "rank": (
        lambda adapter: (
            {},
            {A: torch.zeros(5, 64), B: torch.zeros(64, 5)},
            adapter.config | {"r": 5},
        ),
        ModelError,
        "at most 4, adapters.max_lora_rank, got 5",
    ),
    "field": (
        lambda adapter: ({}, adapter.tensors, adapter.config | {"use_dora": True}),
        ModelError,
        "use_dora: expected false",
    ),
}


@pytest.fixture(scope="module")
def llm(base):
    with LLM(base[0], config=settings_of(), max_model_len=64) as llm:
        yield llm


@pytest.mark.parametrize("case", WRONG)
def test_one_error_names_field_and_value(llm, base, tmp_path, monkeypatch, case):
    monkeypatch.setattr("hardpoint.calls.weights._MEMORY", tmp_path)
    arguments, error, message = WRONG[case]
    fields, tensors, config = arguments(base[1][0])
    with pytest.raises(error, match=message):
        llm.adapters.add(lora("bad", 1, fields.get("path", "")), tensors, config)
    assert llm.adapters.list() == []
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_one_error(llm, base, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hardpoint.calls.weights.write_tensors", full)
    adapter = base[1][0]
    with pytest.raises(Exception, match=r"tensors: .* cannot be written to .*: .*No space left"):
        llm.adapters.add(lora("bad", 1), adapter.tensors, adapter.config)
    assert llm.adapters.list() == []


def test_folders_go_with_a_program_that_closes_nothing(base, tmp_path, monkeypatch):
    from hardpoint.calls.weights import TensorFolders

    monkeypatch.setattr("hardpoint.calls.weights._MEMORY", tmp_path)
    folders = TensorFolders("adapter-", "tensors")
    folder = folders.write("adapter_model.safetensors", base[1][0].tensors)
    assert folder.parent == tmp_path
    del folders
    gc.collect()
    assert not folder.exists()
