"""Adapters added and removed under requests: each request keeps the adapter of its admission."""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
from typing import ClassVar

import msgspec
import pytest
from support.adapters import lora, write_adapter, write_model

from hardpoint import LLM, RequestError, SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
HALF = 0.5  # scale of some requests
PROMPTS = [[3, 1, 4, 1, 5] * 4, [2, 7, 1, 8] * 6, [1, 6, 1, 8, 0, 3]]
SETTINGS = {
    "adapters": {"max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 4},
    "kv_cache": {"num_blocks": 64},
    "scheduler": {"max_num_seqs": 6},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """The folder of a model, and the folders of 5 adapters."""
    base = tmp_path_factory.mktemp("adapters")
    model = write_model(base / "model")
    folders = [base / f"adapter{index}" for index in range(5)]
    for index, folder in enumerate(folders):
        write_adapter(folder, model, seed=index, size=0.4, r=1 + index % 4)
    return base / "model", folders


@pytest.fixture(scope="module")
def expected_by_dtype(adapters):
    """A function that returns the tokens of each prompt with each adapter and with none, alone."""
    return functools.cache(lambda dtype: expected_of(adapters, dtype))


@pytest.fixture(scope="module")
def expected(expected_by_dtype):
    return expected_by_dtype("auto")


def expected_of(adapters, dtype):
    """Return the same of a KV cache of a dtype; for the scales of requests as well."""
    model, folders = adapters
    cache = {"kv_cache": {"num_blocks": 64, "dtype": dtype}}
    settings = SETTINGS | {"adapters": {"max_loras": 5, "max_lora_rank": 4}} | cache
    tokens = {}
    with LLM(str(model), config=settings, max_model_len=64) as llm:
        for index, folder in enumerate([None, *folders]):
            request = None if folder is None else lora(f"a{index}", index, folder)
            for prompt in range(len(PROMPTS)):
                (output,) = llm.generate([PROMPTS[prompt]], PARAMS, lora_request=request)
                tokens[folder, prompt] = output.outputs[0].token_ids
                if folder is not None:
                    half = msgspec.structs.replace(request, scale=HALF)
                    (output,) = llm.generate([PROMPTS[prompt]], PARAMS, lora_request=half)
                    tokens[folder, prompt, HALF] = output.outputs[0].token_ids
    assert len(set(map(tuple, tokens.values()))) == len(tokens)
    return tokens


@pytest.fixture
def llm(adapters):
    with LLM(str(adapters[0]), config=SETTINGS, max_model_len=64) as llm:
        yield llm


class Live:
    """A stream, its tokens so far, and its expected tokens."""

    def __init__(self, llm, request, expected):
        self.stream = llm.stream(PROMPTS[expected[1]], PARAMS, lora_request=request)
        self.expected, self.tokens, self.error, self.is_ended = expected, [], None, False
        self.name = None if request is None else request.name

    def step(self):
        """Take an output; return whether there may be more."""
        output = next(self.stream, None)
        if output is None:
            return False
        self.tokens += output.outputs[0].token_ids
        self.error = output.outputs[0].error
        return not output.finished

    def finish(self, expected):
        while self.step():
            pass
        if self.is_ended and self.error is not None:
            assert 'was removed with mode "end"' in self.error
        else:
            assert (self.error, self.tokens) == (None, expected[self.expected])


def test_a_running_request_keeps_its_adapter_when_the_name_gets_another(llm, adapters, expected):
    _, (first, second, *_) = adapters
    old = llm.adapters.add(lora("poet", 1, first))
    before = Live(llm, old, (first, 0))
    assert before.step()
    new = llm.adapters.add(lora("poet", 2, second))
    assert (new.name, new.content_hash != old.content_hash) == ("poet", True)
    assert llm.adapters.list() == [new]
    after = Live(llm, lora("poet", 2), (second, 0))
    late = Live(llm, old, (first, 1))  # a request with the hash that it was given before
    for live in (after, late, before):
        live.finish(expected)


@pytest.mark.parametrize("mode", ["drain", "end"])
def test_remove_while_requests_run_and_wait(llm, adapters, expected, mode):
    _, (first, second, third, *_) = adapters
    first_lora, two = (
        llm.adapters.add(lora("one", 1, first)),
        llm.adapters.add(lora("two", 2, second)),
    )
    three = llm.adapters.add(lora("three", 3, third))
    lives = [
        Live(llm, first_lora, (first, 0)),
        Live(llm, two, (second, 1)),
        Live(llm, three, (third, 2)),
    ]
    none = Live(llm, None, (None, 0))
    assert lives[0].step()
    waiting = [live for live in llm.engines.live_requests() if live.waits_for is not None]
    assert "2 others run (adapters.max_loras)" in waiting[0].waits_for.message
    stats = llm.engines.scheduler_stats()
    assert stats.num_requests_by_adapter == {"one": 1, "two": 1, "three": 0}
    assert (stats.num_waiting_by_adapter, stats.num_adapter_slots) == ({"three": 1}, 2)
    for number in (1, 3):  # one that runs, and the one that waits
        assert llm.adapters.remove(number, mode)
    for name in ("one", "three"):
        with pytest.raises(RequestError, match=f"expected one of 'two', .* got '{name}'"):
            llm.generate([[1]], lora_request=lora(name, 1))
    for live in (lives[0], lives[2]):
        live.is_ended = mode == "end"
        live.finish(expected)
        assert (live.error is not None) == (mode == "end")
    for live in (lives[1], none):
        live.finish(expected)
    assert [x.name for x in llm.adapters.list()] == ["two"]


def test_an_end_concerns_all_requests_of_a_name_and_no_others(llm, adapters, expected):
    """Also requests with an earlier adapter of the name; other names stay unaffected."""
    _, (first, second, *_) = adapters
    llm.adapters.add(lora("poet", 1, first))
    old = Live(llm, lora("poet", 1), (first, 0))
    assert old.step()
    llm.adapters.add(lora("poet", 1, second))
    llm.adapters.add(lora("other", 2, second))
    new, other = Live(llm, lora("poet", 1), (second, 0)), Live(llm, lora("other", 2), (second, 1))
    assert llm.adapters.pin(2)
    assert llm.adapters.remove(1, "end")
    for live in (old, new):
        live.is_ended = True
        live.finish(expected)
        assert live.error is not None
    other.finish(expected)
    assert llm.adapters.remove(2)


def test_a_pin_goes_with_its_name(llm, adapters, expected):
    _, (first, second, *_) = adapters
    for _ in range(3):
        for folder in (first, second):
            llm.adapters.add(lora("poet", 1, folder))
            assert llm.adapters.pin(1)
    assert llm.adapters.remove(1)


def test_an_adapter_that_is_read_again_is_the_same_or_an_error(llm, adapters, expected, tmp_path):
    _, folders = adapters
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    llm.adapters.add(lora("copied", 9, copy))
    for index, folder in enumerate(folders[1:]):  # more than are kept in CPU memory
        Live(llm, lora(f"a{index}", index + 1, folder), (folder, 0)).finish(expected)
    Live(llm, lora("copied", 9), (folders[0], 1)).finish(expected)
    for index, folder in enumerate(folders[1:]):
        Live(llm, lora(f"a{index}", index + 1), (folder, 1)).finish(expected)
    shutil.copytree(folders[1], copy, dirs_exist_ok=True)
    other = Live(llm, lora("a1", 2), (folders[2], 2))
    (output,) = llm.generate([PROMPTS[2]], PARAMS, lora_request=lora("copied", 9))
    assert "copy: its files have changed since the adapter was added" in output.outputs[0].error
    other.finish(expected)
    llm.adapters.add(lora("copied", 9, copy))
    Live(llm, lora("copied", 9), (folders[1], 2)).finish(expected)


STORE = {
    "kv_connector": {"stores": ["memory"]},
    "plugin": {"memory": {"size_bytes": 1 << 22}},
}
CACHES = {
    "auto": {},
    "int8": {"kv_cache": {"num_blocks": 64, "dtype": "int8"}},
    "fp8": {"kv_cache": {"num_blocks": 64, "dtype": "fp8"}},
    "store": STORE,
    "int8 and a store": STORE | {"kv_cache": {"num_blocks": 64, "dtype": "int8"}},
}
FOUND = 43  # a removal of what workers were reading
ALWAYS = {*(("auto", seed) for seed in range(3)), ("store", FOUND), ("int8 and a store", 0)}
SEEDS = [
    pytest.param(
        cache,
        seed,
        id=f"{cache}-{seed}",
        marks=[] if (cache, seed) in ALWAYS else [pytest.mark.nightly],
    )
    for cache in CACHES
    for seed in range(200)
]


class Schedule:
    """Actions in a random order, with the expected tokens of each request."""

    WEIGHTS: ClassVar = {"request": 8, "step": 10, "load": 4, "remove": 2, "sleep": 1, "reset": 1}

    def __init__(self, llm, rng, folders, expected):
        self.llm, self.rng, self.folders, self.expected = llm, rng, folders, expected
        self.names = {}
        self.lives = []

    def run(self, count):
        for action in self.rng.choices([*self.WEIGHTS], [*self.WEIGHTS.values()], k=count):
            getattr(self, action)()
        for live in self.lives:
            live.finish(self.expected)
        for name in self.names:
            assert self.llm.adapters.remove(ord(name))

    def request(self):
        name, prompt = self.rng.choice([None, *self.names]), self.rng.randrange(len(PROMPTS))
        request = None if name is None else lora(name, ord(name))
        expected = self.names.get(name), prompt
        if request is not None and self.rng.random() < 0.3:
            request, expected = msgspec.structs.replace(request, scale=HALF), (*expected, HALF)
        self.lives.append(Live(self.llm, request, expected))

    def step(self):
        live = self.rng.choice(self.lives) if self.lives else None
        if live is not None and not live.step():
            live.finish(self.expected)
            self.lives.remove(live)

    def load(self):
        name, folder = self.rng.choice("abcd"), self.rng.choice(self.folders)
        self.llm.adapters.add(lora(name, ord(name), folder))
        self.names[name] = folder

    def remove(self):
        if not self.names:
            return
        name, mode = self.rng.choice(sorted(self.names)), self.rng.choice(["drain", "end"])
        del self.names[name]
        assert self.llm.adapters.remove(ord(name), mode)
        if mode == "end":
            for live in self.lives:
                live.is_ended |= live.name == name

    def sleep(self):
        self.llm.sleep(self.rng.choice([1, 2]), "keep")
        self.llm.wake_up()

    def reset(self):
        self.llm.reset_prefix_cache(recompute_running=self.rng.random() < 0.5)


@pytest.mark.parametrize(("cache", "seed"), SEEDS)
def test_random_schedules(adapters, opened, cache, seed):
    _, folders = adapters
    llm, expected = opened(cache)
    Schedule(llm, random.Random(seed), folders, expected).run(40)
    assert llm.adapters.list() == []
    assert llm.engines.scheduler_stats().num_running == 0


@pytest.fixture(scope="module")
def opened(adapters, expected_by_dtype):
    """Returns an engine with a KV cache of some form, and the expected tokens of its requests."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def open_one(cache):
            settings = SETTINGS | CACHES[cache]
            expected = expected_by_dtype(settings["kv_cache"].get("dtype", "auto"))
            llm = LLM(str(adapters[0]), config=settings, max_model_len=64)
            return stack.enter_context(llm), expected

        yield open_one
