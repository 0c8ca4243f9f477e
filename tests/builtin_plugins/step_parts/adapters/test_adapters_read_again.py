"""Adapters read again after a sleep: an unreadable adapter fails its own requests."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from types import SimpleNamespace

import msgspec
import pytest
from support.adapters import lora, write_adapter, write_model
from support.cases import nightly_but

from hardpoint import LLM, LoRARequest, SamplingParams
from hardpoint.builtin_plugins.step_parts.adapters.engine_half import AdapterSlots
from hardpoint.builtin_plugins.step_parts.adapters.messages import Call, Progress
from hardpoint.plugins import EngineCoreRequest
from hardpoint.plugins.config_tables import AdaptersConfig

PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5] * 4, [2, 7, 1, 8] * 6, [1, 6, 1, 8, 0, 3]]
MULTIPROC = {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}}
FORMS = {
    "in process": {},
    "two ranks": MULTIPROC,
    "ahead": {"executor": {"use": "multiproc"}, "scheduler": {"asynchronous": True}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("again")
    model = write_model(folder / "model")
    for seed, name in enumerate(("first", "second")):
        write_adapter(folder / name, model, seed=seed, size=0.4)
    return folder


def settings_of(form, **adapters):
    adapters = {"max_loras": 2, "max_lora_rank": 4, **adapters}
    return {"adapters": adapters, "kv_cache": {"num_blocks": 64}, **FORMS[form]}


def remove(folder):
    shutil.rmtree(folder)


def change(folder):
    shutil.copytree(folder.parent / "second", folder, dirs_exist_ok=True)


DAMAGES = {
    "gone": (remove, "gone/adapter_config.json: cannot be read: No such file"),
    "changed": (change, "changed: its files have changed since the adapter was added"),
}


@pytest.mark.parametrize(
    ("damage", "form"),
    nightly_but(
        itertools.product(DAMAGES, FORMS), ("gone", "two ranks"), ("changed", "in process")
    ),
)
def test_requests_of_one_adapter_end_and_the_others_go_on(base, tmp_path, form, damage):
    apply, message = DAMAGES[damage]
    first, second = (shutil.copytree(base / name, tmp_path / name) for name in ("first", "second"))
    broken = first.rename(tmp_path / damage)
    with LLM(str(base / "model"), config=settings_of(form), max_model_len=64) as llm:
        expected = [
            llm.generate([prompt], PARAMS, lora_request=request)[0].outputs[0].token_ids
            for prompt, request in zip(
                PROMPTS, (lora("a", 1, broken), lora("b", 2, second), None), strict=True
            )
        ]
        llm.reset_prefix_cache()
        streams = [
            llm.stream(prompt, PARAMS, lora_request=request)
            for prompt, request in zip(PROMPTS, (lora("a", 1), lora("b", 2), None), strict=True)
        ]
        begun = [next(stream).outputs[0].token_ids for stream in streams]
        llm.sleep(2, "keep")
        apply(broken)
        llm.wake_up()
        ends = [[output.outputs[0] for output in stream] for stream in streams]
        assert message in ends[0][-1].error
        assert ends[0][-1].error.startswith("lora: ")
        for index in (1, 2):
            assert ends[index][-1].error is None
            tokens = begun[index] + [t for end in ends[index] for t in end.token_ids]
            assert tokens == expected[index]
        (refused,) = llm.generate([PROMPTS[0]], PARAMS, lora_request=lora("a", 1))
        assert message in refused.outputs[0].error
        shutil.copytree(base / "first", broken, dirs_exist_ok=True)
        for prompt, request, tokens in zip(
            PROMPTS, (lora("a", 1), lora("b", 2), None), expected, strict=True
        ):
            (output,) = llm.generate([prompt], PARAMS, lora_request=request)
            assert output.outputs[0].token_ids == tokens


def test_a_folder_of_the_configuration_that_went_away_wakes_up(base, tmp_path):
    folder = shutil.copytree(base / "first", tmp_path / "gone")
    settings = settings_of("in process", paths={"poet": str(folder)})
    with LLM(str(base / "model"), config=settings, max_model_len=64) as llm:
        before = llm.generate([PROMPTS[0]], PARAMS, lora_request=lora("poet", 1))
        llm.sleep(2)
        os.rename(folder, tmp_path / "away")
        llm.wake_up()
        assert llm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].error is None
        (refused,) = llm.generate([PROMPTS[0]], PARAMS, lora_request=lora("poet", 1))
        assert "gone/adapter_config.json: cannot be read" in refused.outputs[0].error
        os.rename(tmp_path / "away", folder)
        after = llm.generate([PROMPTS[0]], PARAMS, lora_request=lora("poet", 1))
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids


class Ranks:
    """The worker halves of two ranks, with answers that a test sets."""

    def __init__(self):
        self.progress = [Progress(is_done=True, content=CONTENT)] * 2
        self.calls = []

    def __call__(self, message):
        call = msgspec.msgpack.decode(message, type=Call)
        self.calls.append(type(call).__name__)
        return [msgspec.msgpack.encode(answer) for answer in self.progress]


CONTENT = "c" * 64


def test_a_rank_alone_that_cannot_read_ends_the_requests_of_the_adapter(base):
    ranks = Ranks()
    config = SimpleNamespace(adapters=AdaptersConfig(max_loras=2, max_cpu_loras=2))
    half = AdapterSlots(
        "adapters", config, SimpleNamespace(clock=time.monotonic, call_workers=ranks)
    )
    assert half.workers_started() == {}
    ticket = half.call("load", {"lora": {"name": "a", "id": 1, "path": str(base / "first")}})
    assert half.call("poll", {"ticket": ticket})["content_hash"] == CONTENT
    for name in ("x", "y"):
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[1],
            params=PARAMS,
            lora=LoRARequest("a", 1, "", CONTENT),
        )
        half.check(request)
        assert half.gate(SimpleNamespace(request_id=name)) is None
    assert half.workers_started() == {}
    ranks.progress[1] = Progress(is_done=True, error="a/adapter_config.json: cannot be read: why")
    ranks.calls.clear()
    ended = half.workers_started()
    assert ended.keys() == {"x", "y"}
    assert {fault.message for fault in ended.values()} == {f"lora: {ranks.progress[1].error}"}
    assert ranks.calls == ["Read", "Ask", "Drop"]  # no rank keeps what one of them lacks
    for name in ended:
        half.ended(name)
    ranks.progress[1] = ranks.progress[0]
    assert [lora["name"] for lora in half.call("list", {})] == ["a"]
    assert half.workers_started() == {}
