"""Adapters read again after a sleep or a restart: an unreadable one fails its own requests."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from types import SimpleNamespace

import msgspec
import pytest
from support.adapters import lora, write_adapter, write_model
from support.cases import nightly_but
from support.waiting import HeldSteps, wait_until

from hardpoint import LLM, HardpointError, LoRARequest, RequestError, SamplingParams
from hardpoint.builtin_plugins.step_parts.adapters import Adapters
from hardpoint.builtin_plugins.step_parts.adapters.engine_half import AdapterSlots
from hardpoint.builtin_plugins.step_parts.adapters.messages import Call, Keep, Progress
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


def test_an_adapter_is_removed_while_the_engine_sleeps(base):
    with LLM(str(base / "model"), config=settings_of("in process"), max_model_len=64) as llm:
        for index, name in enumerate(("first", "second")):
            llm.adapters.add(lora(name, index + 1, base / name))
        llm.sleep(2)
        assert llm.adapters.remove(1)
        llm.wake_up()
        assert [request.name for request in llm.adapters.list()] == ["second"]
        (output,) = llm.generate([PROMPTS[0]], PARAMS, lora_request=lora("second", 2))
        assert output.outputs[0].error is None


class Ranks:
    """The worker halves of two ranks, with answers that a test sets, and the contents they keep."""

    def __init__(self):
        self.progress = [Progress(is_done=True, content=CONTENT)] * 2
        self.calls, self.kept = [], set()

    def __call__(self, message):
        call = msgspec.msgpack.decode(message, type=Call)
        self.calls.append(type(call).__name__)
        self.kept -= set(getattr(call, "forgotten", ()))
        self.kept |= {self.progress[0].content} if isinstance(call, Keep) else set()
        return [msgspec.msgpack.encode(answer) for answer in self.progress]


CONTENT = "c" * 64


def half_of(ranks, max_cpu_loras=2):
    config = SimpleNamespace(adapters=AdaptersConfig(max_loras=2, max_cpu_loras=max_cpu_loras))
    context = SimpleNamespace(clock=time.monotonic, call_workers=ranks)
    half = AdapterSlots("adapters", config, context)
    assert half.workers_started() == {}
    return half


def load(half, folder, content=CONTENT):
    ticket = half.call("load", {"lora": {"name": "a", "id": 1, "path": str(folder)}})
    assert half.call("poll", {"ticket": ticket})["content_hash"] == content


def request_of(name, folder="", content=CONTENT, **fields):
    adapter = LoRARequest("a", 1, str(folder), content)
    fields |= {"prompt_token_ids": [1], "params": PARAMS, "lora": adapter}
    return EngineCoreRequest(request_id=name, **fields)


def admit(half, request):
    half.check(request)
    while half.gate(SimpleNamespace(request_id=request.request_id)) is not None:
        pass


def test_a_rank_alone_that_cannot_read_ends_the_requests_of_the_adapter(base):
    ranks = Ranks()
    half = half_of(ranks)
    load(half, base / "first")
    for name in ("x", "y"):
        admit(half, request_of(name))
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


def test_an_engine_reads_the_adapter_of_a_request_that_it_does_not_know(base, tmp_path):
    """As after a restart; the adapter gets no name by that, but may be removed."""
    half = half_of(Ranks())
    with pytest.raises(RequestError, match="it was removed, replaced or never added"):
        half.check(request_of("x"))
    with pytest.raises(RequestError, match="engine that had 'a' .* is gone; add the adapter again"):
        half.check(request_of("x", tmp_path / "gone"))
    admit(half, request_of("x", base / "first"))
    assert half.call("list", {}) == []
    assert half.call("remove", {"lora_id": 1, "mode": "end"})
    with pytest.raises(RequestError, match='was removed with mode "end"'):
        half.gate(SimpleNamespace(request_id="x"))
    half.ended("x")
    assert not half.call("remove", {"lora_id": 1, "mode": "end"})


def test_a_removed_adapter_is_read_for_requests_of_other_engines_alone(base):
    half = half_of(Ranks())
    load(half, base / "first")
    admit(half, request_of("x"))
    for _ in range(2):  # while a request has the content, and later
        assert half.call("remove", {"lora_id": 1, "mode": "drain"})
        with pytest.raises(RequestError, match="it was removed, replaced or never added"):
            half.check(request_of("y", base / "first"))
        admit(half, request_of("y", base / "first", is_admitted=True))
        for name in ("x", "y"):
            half.ended(name)
        assert not half.call("remove", {"lora_id": 1, "mode": "drain"})
        load(half, base / "first")
    admit(half, request_of("y"))


def test_workers_forget_replaced_contents(base):
    """But for the last one, which requests may name, and contents of requests."""
    ranks = Ranks()
    half = half_of(ranks, max_cpu_loras=32)

    def replace(*contents):
        for content in contents:
            ranks.progress = [Progress(is_done=True, content=content)] * 2
            load(half, base / "first", content)

    replace("1")
    admit(half, request_of("x", content="1"))
    replace("2", "3", "4")
    assert ranks.kept == {"1", "3", "4"}
    admit(half, request_of("y", content="3"))
    half.ended("x")
    replace("5", "6", "5")
    assert ranks.kept == {"3", "6", "5"}
    half.ended("y")
    assert half.call("remove", {"lora_id": 1, "mode": "drain"})
    replace("7")
    assert ranks.kept == {"7"}


ONE, TWO = ({"name": "a", "id": 1, "path": path, "content_hash": "1"} for path in ("/a", "/b"))
OTHER = ONE | {"content_hash": "2"}
MERGED = {
    "resolve": ([[ONE, None, ONE], [TWO, None, None]], [ONE, None, None]),
    "list": ([[], [TWO], [ONE, OTHER | {"name": "b"}]], [TWO, OTHER | {"name": "b"}]),
    "remove": ([False, True], True),
    "pin": ([False, False], False),
    "removed": ([[3, 1], [], [2, 3]], [1, 2, 3]),
    "poll": ([ONE, TWO], ONE),
    "load": ([7, 7], 7),
}


@pytest.mark.parametrize("method", MERGED)
def test_engines_may_lack_adapters(method):
    answers, expected = MERGED[method]
    assert Adapters.merge_answers(method, answers) == expected


@pytest.mark.parametrize(
    ("method", "answers"), [("resolve", [[ONE], [OTHER]]), ("list", [[ONE], [OTHER]])]
)
def test_engines_have_one_content_of_a_name(method, answers):
    with pytest.raises(HardpointError, match=f"{method}: the engines answered differently"):
        Adapters.merge_answers(method, answers)


def test_a_restarted_or_added_engine_gets_the_adapters_of_requests(base, tmp_path):
    held = HeldSteps(tmp_path)
    settings = settings_of("in process", max_loras=1) | {
        "parallel": {"data": 2},
        "engine": {"restart": "on_failure"},
        "plugins": {"enable": ["support.plugins.slow:Slow"]},
    }
    adapter, slow = base / "first", held.slow(0.2)
    with LLM(str(base / "model"), config=settings, max_model_len=64) as llm:

        def tokens(request, rank):
            options = {"lora_request": request, "data_parallel_rank": rank}
            (output,) = llm.generate([PROMPTS[0]], PARAMS, **options)
            return output.outputs[0].token_ids

        expected = tokens(lora("a", 1, adapter), 0)
        params = msgspec.structs.replace(PARAMS, plugin_args=slow)
        options = {"lora_request": lora("a", 1), "data_parallel_rank": 1}
        stream = llm.stream(PROMPTS[0], params, **options)
        begun = next(stream).outputs[0].token_ids
        old = llm.engines[1].pid
        os.kill(old, signal.SIGKILL)
        held.let_go()
        rest = [output.outputs[0] for output in stream]
        assert [*begun, *(token for output in rest for token in output.token_ids)] == expected
        assert (rest[-1].error, rest[-1].num_resumes) == (None, 1)
        wait_until(lambda: llm.engines[1].pid not in (None, old), 60.0, "the restart")
        assert [request.path for request in llm.adapters.list()] == [str(adapter)]
        assert tokens(lora("a", 1), 1) == expected
        assert llm.engines.scale(3).ranks == (0, 1, 2)
        assert llm.adapters.pin(1)
        assert tokens(lora("a", 1, adapter), 2) == expected
        assert llm.adapters.remove(1)
        assert llm.adapters.list() == []
