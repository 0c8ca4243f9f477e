"""The resources of several ranks on a host: its memory once, and no port that others can reach."""

from __future__ import annotations

import contextlib
import ipaddress
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.internals import config_of, engine_of
from support.parallel import open_llm, parallel_config, write_random_model
from support.plugins.parallel_broken import Uneven

from hardpoint import LLM, SamplingParams, typed
from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.core.engine.worker_launch import WorkerLauncher
from hardpoint.core.kv_cache import size_cache
from hardpoint.core.worker import loaded_model
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.host.system.memory import MemoryLimit
from hardpoint.plugins import EngineConfig, WorkerInfo
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.executor import open_worker
from hardpoint.testing import scripted_config

MEMORY = 96 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    fields = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 384}
    fields |= {"num_hidden_layers": 4, "intermediate_size": 384, "head_dim": 64}
    return write_random_model(tmp_path_factory.mktemp("m") / "m", "LlamaForCausalLM", **fields)


def cache_bytes(folder, tensor, pipeline, monkeypatch):
    """Load so many ranks in threads, on a host of little memory; return the bytes per rank."""
    monkeypatch.setattr(loaded_model, "memory_limit", lambda _: MemoryLimit(MEMORY, "the test"))
    extra = {"load": {"use": "dummy"}, "scheduler": {"max_num_seqs": 256}}
    extra |= {"kv_cache": {"num_blocks": None, "memory_fraction": 0.9}}
    settings = parallel_config(tensor, pipeline, model=str(folder), **extra)
    config = typed.convert(settings, EngineConfig, path="")
    sources = ConfigSources({})
    spec = prepare_worker(config, resolve_plugins(config, sources), sources, lambda *_: None)
    launcher = WorkerLauncher(spec, sources, Activity())
    count = tensor * pipeline
    with contextlib.closing(launcher):
        workers = [open_worker(launcher.launch(rank)) for rank in range(count)]
        with ThreadPoolExecutor(count) as threads:
            infos = list(threads.map(lambda each: each.load_model(), workers))
        for each in workers:
            each.close()
    blocks = min(size_cache(config, spec.max_model_len, info).num_blocks for info in infos)
    return [blocks * info.bytes_per_block for info in infos]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (3, 1), (1, 3)])
def test_the_caches_of_all_ranks_take_what_one_would(folder, tensor, pipeline, monkeypatch):
    (alone,) = cache_bytes(folder, 1, 1, monkeypatch)
    shared = cache_bytes(folder, tensor, pipeline, monkeypatch)
    assert len(shared) == tensor * pipeline
    print(f"{alone} bytes alone, {shared} in {len(shared)} ranks")
    assert MEMORY // 2 < alone < MEMORY  # so that memory is the limit, not what requests need
    assert alone // 2 < sum(shared) <= alone


def test_the_tightest_rank_decides_the_number_of_blocks(scripted):
    extra = {
        "executor": {"use": "support.plugins.parallel_broken:Uneven"},
        "parallel": {"pipeline": 2},
        "kv_cache": {"block_size": 8, "memory_fraction": 1.0},
        "max_model_len": 64,
    }
    with LLM(config=scripted_config(scripted, extra)) as llm:
        config = config_of(engine_of(llm))
        with pytest.raises(Exception, match=r"level: expected 0 or 2, got 1"):
            llm.sleep(1)
    assert Uneven.num_blocks == 10_000 // 200
    assert config.kv_cache.num_blocks == Uneven.num_blocks  # what the engine itself goes by
    assert config.max_model_len == 64


def test_ranks_with_other_groups_are_refused(scripted, monkeypatch):
    """The block tables of a plan are for the groups of all ranks."""
    infos = [WorkerInfo(100, 10**6, windows=(None, 64)), WorkerInfo(100, 10**6)]
    monkeypatch.setattr(Uneven, "infos", infos)
    extra = {
        "executor": {"use": "support.plugins.parallel_broken:Uneven"},
        "parallel": {"pipeline": 2},
    }
    message = (
        r"Uneven.*: its start\(\) gave workers with KV cache groups of the windows "
        r"\(None, 64\) and \(None,\), expected the same in all ranks"
    )
    with pytest.raises(PluginFaultError, match=message):
        LLM(config=scripted_config(scripted, extra))


def test_no_rank_takes_more_than_the_configured_bytes(scripted, monkeypatch):
    infos = [WorkerInfo(200, 10**6), WorkerInfo(100, 6_000)]  # the second has less room, unasked
    monkeypatch.setattr(Uneven, "infos", infos)
    extra = {
        "executor": {"use": "support.plugins.parallel_broken:Uneven"},
        "parallel": {"pipeline": 2},
        "kv_cache": {"memory_bytes": 8_000},
        "max_model_len": 64,
    }
    with LLM(config=scripted_config(scripted, extra)):
        assert Uneven.num_blocks == 8_000 // 200


@pytest.mark.nightly
@pytest.mark.parametrize("communicator", ["auto", "torch"])
def test_no_one_else_can_reach_a_port(folder, communicator):
    """Every process of an engine listens on addresses of this host alone, if at all."""
    config = parallel_config(
        2, 2, model=str(folder), load={"use": "dummy"}, engine={"in_process": False}
    )
    config["parallel"]["communicator"] = communicator
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with open_llm(config) as llm:
        llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))
        children = psutil.Process().children(recursive=True)
        processes = [child for child in children if child.pid not in before]
        assert len(processes) >= 5  # the engine and four workers
        listening = [
            (process.pid, connection.laddr.ip)
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN or not connection.raddr
        ]
    print(f"{len(processes)} processes listen on {listening}")
    assert all(ipaddress.ip_address(address).is_loopback for _, address in listening)
    assert bool(listening) == (communicator == "torch")
