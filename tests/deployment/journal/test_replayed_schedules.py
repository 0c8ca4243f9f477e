"""Random schedules are recorded, and replayed bit for bit."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from support.adapters import write_two_models
from support.driving import varied_jobs
from support.journal.schedules import record
from support.plugins.changing import Pick, Slow
from support.waiting import PATIENCE_S

from hardpoint import LLM, RequestOutputKind, SamplingParams
from hardpoint.builtin_plugins.kv_connectors.planning import StoresScheduler
from hardpoint.errors import HardpointError, ModelError
from hardpoint.journal import run
from hardpoint.journal.replay import replay
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import scripted_config

IN_GATE, IN_ALL, PER_ENGINE, APART = 50, 1000, 5, 10
TIGHT = {
    "max_model_len": 128,
    "kv_cache": {"block_size": 8, "num_blocks": 24},
    "scheduler": {"max_num_batched_tokens": 48, "policy": "priority"},
}
RANKS = {
    "tensor 2": {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}},
    "pipeline 2": {"executor": {"use": "multiproc"}, "parallel": {"pipeline": 2}},
}
STORES = {"kv_connector": {"stores": ["memory"]}, "plugin": {"memory": {"size_bytes": 1 << 22}}}


def schedules(first: int, last: int) -> list[range]:
    return [range(seed, seed + PER_ENGINE) for seed in range(first, last, APART)]


def check_same(path, at_least: int) -> None:
    report = replay(path)
    assert report.difference is None, str(report.difference)
    assert report.notes == []
    assert report.tokens >= at_least


@pytest.mark.parametrize(
    "seeds",
    [range(4), *(pytest.param(s, marks=pytest.mark.nightly) for s in schedules(0, IN_GATE))],
    ids=str,
)
def test_random_schedules(scripted, tmp_path, seeds):
    record(seeds, scripted, tmp_path / "journal")
    check_same(tmp_path / "journal", 50 * len(seeds))


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", schedules(IN_GATE, IN_ALL), ids=str)
def test_many_random_schedules(scripted, tmp_path, seeds):
    record(seeds, scripted, tmp_path / "journal")
    check_same(tmp_path / "journal", 50 * len(seeds))


def generate(config) -> list:
    """Run the varied jobs and some with grammars, with changes between them."""
    jobs = varied_jobs(24)
    prompts = [prompt for _, prompt, _ in jobs]
    params = [params for _, _, params in jobs]
    grammars = [
        SamplingParams(
            temperature=1.0,
            max_tokens=20,
            structured=StructuredOutputs(regex="[a-z]{3,15}"),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    ]
    with LLM(config=config) as llm:
        outputs = llm.generate(prompts, params)
        llm.plugins.set_policy("fair")
        llm.plugins.change(enable=["support.broken.processors:Bias"])
        biased = SamplingParams(max_tokens=9, plugin_args={"bias": {"by": 3.0}}, seed=4)
        outputs += llm.generate([[7] * 9], biased)
        outputs += llm.generate([[5] * 20] * 3, grammars * 3)
        llm.reset_prefix_cache()
        outputs += llm.generate(prompts[:8], params[:8])
        assert llm.engines.scheduler_stats().num_preemptions > 0
        return outputs


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one rank"),
        pytest.param(RANKS["tensor 2"], id="tensor 2"),
        pytest.param(RANKS["pipeline 2"], id="pipeline 2", marks=pytest.mark.nightly),
        pytest.param(STORES, id="stores"),
    ],
)
@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "own process"])
def test_engines_of_each_kind(scripted, tmp_path, settings, in_process):
    path = tmp_path / "journal"
    engine = {"engine": {"journal": str(path), "in_process": in_process}}
    outputs = generate(scripted_config(scripted, TIGHT | settings | engine))
    num_tokens = sum(
        len(completion.token_ids) for output in outputs for completion in output.outputs
    )
    check_same(path, num_tokens)


class Held(Pick):
    """Is built once it may be."""

    contract = 1
    may_be_built = threading.Event()

    def __init__(self, context) -> None:
        super().__init__(context)
        assert self.may_be_built.wait(PATIENCE_S)


@pytest.fixture
def held():
    """The event that lets `Held` be built; set at the end."""
    Held.may_be_built.clear()
    yield Held.may_be_built
    Held.may_be_built.set()


def change_and_generate(llm, plugin) -> None:
    llm.plugins.change(enable=[plugin])
    name = plugin.__name__.lower()
    params = SamplingParams(max_tokens=6, ignore_eos=True, plugin_args={name: {"step": 2}})
    llm.generate("a", params)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one rank"),
        pytest.param(RANKS["tensor 2"], id="tensor 2", marks=pytest.mark.nightly),
    ],
)
def test_a_change_that_is_prepared_later_than_it_was(scripted, tmp_path, settings, monkeypatch):
    path = tmp_path / "journal"
    config = scripted_config(scripted, settings | {"engine": {"journal": str(path)}})
    with LLM(config=config) as llm:
        change_and_generate(llm, Slow)
    monkeypatch.setenv(Slow.variable, "0.7")
    check_same(path, 6)


def test_a_change_that_is_not_prepared_in_time(scripted, tmp_path, monkeypatch, held):
    path = tmp_path / "journal"
    held.set()
    with LLM(config=scripted_config(scripted, {"engine": {"journal": str(path)}})) as llm:
        change_and_generate(llm, Held)
    held.clear()
    monkeypatch.setattr(run, "_PATIENCE_S", 0.2)
    difference = str(replay(path).difference)
    assert "error of the call 'live_change'" in difference
    assert "it was done when it was recorded; here, after 0.2 s, it is not done by" in difference
    assert "worker 0" in difference


def test_weights_that_were_replaced_are_replaced_again(tmp_path):
    """Also after an update that failed, and for a request that kept keys and values."""
    first, second = write_two_models(tmp_path)
    save_file({"x": torch.ones(2)}, tmp_path / "bad.safetensors")
    path = tmp_path / "journal"
    tables = {"engine": {"journal": str(path)}, "kv_cache": {"num_blocks": 64}}
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(str(first), config=tables, max_model_len=128) as llm:
        stream = llm.stream([3, 1, 4, 1, 5], params)
        next(stream)
        llm.weights.update(second)
        with pytest.raises(ModelError, match="the model has no weight 'x'"):
            llm.weights.update(tmp_path / "bad.safetensors")
        next(stream)
        llm.weights.update(first, recompute=False)
        *_, last = stream
        assert [run.version for run in last.outputs[0].weight_runs] == ["0", "1", "2"]
    check_same(path, 8)


@pytest.mark.parametrize("is_sooner", [True, False])
def test_a_change_that_was_given_up(scripted, tmp_path, held, is_sooner):
    """It is prepared sooner at the replay than it was, or later: it is given up all the same."""
    path = tmp_path / "journal"
    tables = {"engine": {"journal": str(path)}, "plugins": {"change_seconds": 0.2}}
    with LLM(config=scripted_config(scripted, tables)) as llm:
        with pytest.raises(HardpointError, match=r"not prepared within 0\.2 s"):
            llm.plugins.change(enable=[Held])
        held.set()
        llm.plugins.change(config={"plugins.change_seconds": PATIENCE_S})  # the next one has time
        llm.plugins.set_policy("fair")
        llm.generate("a", SamplingParams(max_tokens=6, ignore_eos=True))
    if not is_sooner:
        held.clear()
    check_same(path, 6)


def test_a_connector_that_knows_later_what_can_be_loaded(scripted, tmp_path, monkeypatch):
    path = tmp_path / "journal"
    config = scripted_config(scripted, STORES | {"engine": {"journal": str(path)}})
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(config=config) as llm:
        llm.generate([[7] * 60], params)
        llm.reset_prefix_cache()
        (output,) = llm.generate([[7] * 60], params)
    assert output.num_cached_tokens > 0
    look_up, lookups = StoresScheduler.get_num_new_matched_tokens, Counter()

    def look_up_later(self, request, num_computed_tokens):
        matched = look_up(self, request, num_computed_tokens)
        if matched[0] is None:
            return matched
        lookups[request.request_id] += 1
        return matched if lookups[request.request_id] > 3 else (None, False)

    monkeypatch.setattr(StoresScheduler, "get_num_new_matched_tokens", look_up_later)
    check_same(path, 12)
    assert lookups.total() == 8
