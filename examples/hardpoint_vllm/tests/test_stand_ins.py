"""Processors that import vLLM load without it; missing stand-ins are named."""

import importlib.util
import sys
from random import Random

import pytest
from driving import alone, run
from hardpoint_vllm import VLLM
from hardpoint_vllm.batch_classes import ExternalBatchUpdate, MoveDirectionality
from hardpoint_vllm.stand_ins import process_dict_updates

from hardpoint import SamplingParams
from hardpoint.errors import PluginContractError, PluginLoadError
from hardpoint.plugins.component import Source
from hardpoint.testing import scripted_engine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed"
)

HERE = "vllm_importing"
FORMS = {
    "v0": {"use": f"{HERE}:NoRepeat", "name": "v0"},
    "v1": {"use": f"{HERE}:NoRepeatV1", "name": "v1"},
    "batch": {"use": f"{HERE}:NoRepeatBatch", "name": "batch"},
    "v2": {"use": f"{HERE}:NoRepeatV2", "name": "v2"},
}


def jobs_of(name):
    """Return requests; every second one uses the processor `name`."""
    arguments = {} if name == "v0" else {"extra_args": {"size": 2}}
    return [
        (
            f"r{index}",
            [1 + index % 3] * (2 + index % 5),
            SamplingParams(
                temperature=0.6,
                seed=index,
                ignore_eos=True,
                max_tokens=10 + index % 7,
                logit_bias={70: 9.0, 71: 9.0, 72: 9.0},
                plugin_args={name: arguments} if index % 2 else {},
            ),
        )
        for index in range(12)
    ]


def engine_with(scripted, **extra):
    settings = {"plugins": {"enable": [*FORMS.values(), "vllm"]}, "scheduler": {"max_num_seqs": 4}}
    return scripted_engine(scripted, settings | extra)


def test_the_three_generations_of_one_method_give_the_same_tokens(scripted):
    engine = engine_with(scripted)
    results = {name: run(engine, jobs_of(name), per_step=2) for name in FORMS}
    plain = run(engine, [(i, p, SamplingParams(**_bare(params))) for i, p, params in jobs_of("v0")])
    assert results["v0"] == results["v1"] == results["batch"] == results["v2"]
    assert results["v0"] == alone(engine, jobs_of("v2"))
    same = {int(i[1:]) for i in plain if results["v0"][i] == plain[i]}
    assert set(range(0, 12, 2)) <= same
    assert len(same) < 9
    engine.close()
    replies = [
        [prompt, tokens] for i, prompt, _ in jobs_of("v0") for _, tokens, *_ in results["v0"][i][0]
    ]
    engine = engine_with(
        scripted,
        speculation={"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False},
        plugin={"scripted_speculator": {"right": 0.7, "replies": replies}},
    )
    for name in FORMS:
        assert run(engine, jobs_of(name), per_step=2) == results["v0"]
    assert engine.call_utility("scheduler_stats").num_accepted_drafts > 0
    engine.close()


def _bare(params):
    fields = ("temperature", "seed", "ignore_eos", "max_tokens", "logit_bias")
    return {field: getattr(params, field) for field in fields}


def test_the_modules_are_gone_after_the_import(scripted):
    engine_with(scripted).close()
    assert [name for name in sys.modules if name.partition(".")[0] == "vllm"] == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import vllm.compilation", "there is no module 'vllm.compilation': vLLM is not installed"),
        ("from vllm.config import CacheConfig", "there is no 'CacheConfig' of vllm.config: vLLM"),
        ("import vllm; vllm.LLM", "there is no 'LLM' of vllm: vLLM is not installed"),
    ],
)
def test_what_does_not_stand_in_is_named(scripted, tmp_path, monkeypatch, source, message):
    (tmp_path / "reading_vllm.py").write_text(f"{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginLoadError, match=message):
        scripted_engine(scripted, {"plugins": {"enable": ["vllm", "reading_vllm:Thing"]}})
    assert "reading_vllm" not in sys.modules


OTHER_KINDS = [
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "CopyBlocksOp", "kv_connectors"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector", "Nixl", "kv_connectors"),
    ("vllm.plugins.io_processors", "get_io_processor", "io_processors"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "schedulers"),
    ("vllm.v1.core.sched.interface", "SchedulerInterface", "schedulers"),
    ("vllm.v1.executor.abstract", "Executor", "executors"),
    ("vllm.v1.attention.backend", "AttentionBackend", "attention_backends"),
    ("vllm.v1.metrics.loggers", "LoggingStatLogger", "stat_sinks"),
    ("vllm.model_executor.models.interfaces", "SupportsLoRA", "models"),
]


@pytest.mark.parametrize(("module", "name", "kind"), OTHER_KINDS)
def test_errors_about_classes_of_other_kinds_do_not_advise_vllm(
    scripted, tmp_path, monkeypatch, module, name, kind
):
    (tmp_path / "of_vllm.py").write_text(f"from {module} import {name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginLoadError) as error:
        scripted_engine(scripted, {"plugins": {"enable": ["vllm", "of_vllm:Thing"]}})
    message = str(error.value)
    assert "install vLLM" not in message
    assert f"The kind {kind} takes their place" in message
    assert "docs/migrate-from-vllm.md lists the differences" in message


@pytest.mark.parametrize(("module", "name", "kind"), OTHER_KINDS)
def test_classes_of_other_kinds_with_vllm_installed(module, name, kind):
    base = type(name, (), {"__module__": module})
    subclass = type("Mine", (base,), {"__module__": "own_module"})
    for wanted in (None, kind):
        assert VLLM.matches(subclass, wanted) is True
    with pytest.raises(PluginContractError) as error:
        VLLM.adapt(subclass, Source.of_module("mine", "own_module:Mine", "a test"))
    assert str(error.value).startswith("plugin 'mine' (own_module:Mine)")
    assert f"The kind {kind} takes their place" in str(error.value)


@pytest.mark.parametrize("seed", range(4))
def test_states_by_row_follow_the_batch(seed):
    """Against a list of who is in which row."""
    random = Random(seed)
    rows: list[int | None] = [None] * 6
    states: dict[int, int] = {}
    for number in range(200):
        removed = [row for row in range(6) if rows[row] is not None and random.random() < 0.2]
        for row in removed:
            rows[row] = None
        added = [
            (row, number, None, []) for row in random.sample(range(6), 1) if row not in removed
        ]
        for row, *_ in added:
            rows[row] = number if number % 3 else None
        moved = []
        for _ in range(random.randrange(3)):
            source, destination = random.sample(range(6), 2)
            direction = random.choice(list(MoveDirectionality))
            moved.append((source, destination, direction))
            back = rows[destination] if direction == MoveDirectionality.SWAP else None
            rows[destination], rows[source] = rows[source], back
        before = dict(states)
        update = ExternalBatchUpdate(6, tuple(removed), tuple(added), tuple(moved))
        changed = process_dict_updates(states, update, lambda n, *_: n if n % 3 else None)
        assert states == {row: owner for row, owner in enumerate(rows) if owner is not None}
        assert changed == (states != before)
    assert process_dict_updates(states, None, lambda *_: 1) is False
