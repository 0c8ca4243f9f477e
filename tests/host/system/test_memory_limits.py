"""The memory that this process may use, and the message when a model needs more."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch
from support.control_groups import V2, system
from support.internals import worker_of
from support.processes import run

from hardpoint import LLM, ModelError, SamplingParams
from hardpoint.errors import EngineDeadError
from hardpoint.host.system.control_groups import oom_kills
from hardpoint.host.system.memory import memory_limit
from hardpoint.testing import scripted_config

MIB = 1 << 20
CPU = torch.device("cpu")


V1 = (
    "30 23 0:27 / {top}/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / {top}/memory rw,relatime - cgroup cgroup rw,memory\n"
)
NO_LIMIT = 9223372036854771712


@pytest.mark.parametrize(
    ("group", "mounts", "files", "mebibytes", "source"),
    [
        (  # a container of version 2: its own group is the root
            "0::/\n",
            V2,
            {"memory.max": 500 * MIB, "memory.high": "max", "memory.current": 100 * MIB},
            400,
            "memory.max, of 500 MiB",
        ),
        (  # memory.high is closer; cached files are released
            "0::/app\n",
            V2,
            {
                "app/memory.max": 500 * MIB,
                "app/memory.high": 300 * MIB,
                "app/memory.current": 200 * MIB,
                "app/memory.stat": f"anon 5\ninactive_file {40 * MIB}\nactive_file {10 * MIB}",
            },
            150,
            "app/memory.high, of 300 MiB",
        ),
        (  # a group around it is closer
            "0::/user/app\n",
            V2,
            {
                "user/memory.max": 200 * MIB,
                "user/memory.current": 180 * MIB,
                "user/app/memory.max": "max",
                "user/app/memory.current": 10 * MIB,
            },
            20,
            "user/memory.max, of 200 MiB",
        ),
        (  # the path is the host's, and what is mounted is the container's
            "4:memory:/docker/abc\n0::/\n",
            "35 31 0:32 /docker/abc {top}/memory ro - cgroup cgroup rw,memory\n",
            {
                "memory/memory.limit_in_bytes": 700 * MIB,
                "memory/memory.usage_in_bytes": 300 * MIB,
                "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}",
            },
            500,
            "memory.limit_in_bytes, of 700 MiB",
        ),
        (  # version 1, nested
            "4:memory:/jobs/one\n1:cpu:/other\n0::/\n",
            V1,
            {
                "memory/memory.limit_in_bytes": NO_LIMIT,
                "memory/memory.usage_in_bytes": 10**9,
                "memory/jobs/memory.limit_in_bytes": 64 * MIB,
                "memory/jobs/memory.usage_in_bytes": 100 * MIB,
                "memory/jobs/one/memory.limit_in_bytes": NO_LIMIT,
                "memory/jobs/one/memory.usage_in_bytes": 50 * MIB,
            },
            0,
            "jobs/memory.limit_in_bytes, of 64 MiB",
        ),
        (  # its group is not below what is mounted
            "0::/../outside\n",
            V2,
            {"memory.max": 90 * MIB, "memory.current": 10 * MIB},
            80,
            "memory.max, of 90 MiB",
        ),
    ],
)
def test_control_groups_limit_memory(group, mounts, files, mebibytes, source, tmp_path):
    limit = memory_limit(CPU, system(tmp_path, group, mounts, files))
    assert limit.available == mebibytes * MIB
    assert limit.source.endswith(source)


@pytest.mark.parametrize("group", ["", "nonsense\n", "0::/\n"])
def test_without_control_groups_the_machine_is_the_limit(group, tmp_path):
    limit = memory_limit(CPU, system(tmp_path, group, V2 + "x\n", {}))
    assert limit.source == "free on this machine"
    assert limit.available > MIB
    assert memory_limit(CPU, tmp_path / "nowhere").source == "free on this machine"


def test_a_resource_limit_is_seen_and_what_does_not_fit_is_refused(scripted, tmp_path):
    """The limit is a real one, of a program of its own."""
    source = """
        import json, resource, sys
        from hardpoint import LLM, ModelError
        from hardpoint.testing import scripted_config

        with LLM(config=scripted_config(FOLDER)):
            pass  # everything is imported
        held = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (held + (128 << 20), resource.RLIM_INFINITY))
        with LLM(config=scripted_config(FOLDER)) as llm:
            llm.generate("say abc")
        try:
            LLM(config=scripted_config(FOLDER, {"kv_cache": {"num_blocks": 1 << 22}}))
        except ModelError as error:
            print(json.dumps(str(error)))
    """
    source = textwrap.dedent(source).replace(
        "FOLDER", f"__import__('pathlib').Path({str(scripted)!r})"
    )
    message = json.loads(run(sys.executable, "-c", source, cwd=tmp_path))
    assert "does not fit into memory: weights" in message
    assert "KV cache 512 MiB, working memory" in message
    assert "this process may use 1" in message
    assert "RLIMIT_AS, ulimit -v, of" in message
    assert "a kv_cache of " in message


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(scripted, monkeypatch):
    def read(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr("hardpoint.builtin_plugins.loaders.dummy.DummyLoader.weights", read)
    with pytest.raises(ModelError, match=r"weights .* KV cache 8.0 TiB|KV cache 8192.0 GiB"):
        LLM(config=scripted_config(scripted, {"kv_cache": {"num_blocks": 1 << 36}}))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("x: can't allocate memory: 9")])
def test_an_allocation_that_fails_gives_the_figures(error, scripted):
    with LLM(config=scripted_config(scripted, {"kv_cache": {"num_blocks": 64}})) as llm:

        def fail(_plan):
            raise error

        worker_of(llm.llm_engine).runner.execute = fail
        expected = "not enough memory .*weights .*, KV cache 8 KiB, working memory .*may use"
        with pytest.raises(EngineDeadError, match=expected):
            llm.generate("say abc", SamplingParams(max_tokens=2))


def test_an_engine_that_is_dropped_closes_its_parts(scripted, monkeypatch):
    closed = []
    close = "hardpoint.host.system.memory.trim_memory"
    monkeypatch.setattr(close, lambda: closed.append("memory released"))
    llm = LLM(config=scripted_config(scripted))
    llm.generate("say abc", SamplingParams(max_tokens=2))
    del llm
    assert closed == ["memory released"]


@pytest.mark.parametrize(
    ("group", "mounts", "files", "count"),
    [
        ("0::/\n", V2, {"memory.events": "oom 5\noom_kill 3\noom_group_kill 0"}, 3),
        ("0::/app\n", V2, {"memory.events": "oom_kill 3", "app/memory.events": "oom_kill 1"}, 1),
        ("0::/app\n", V2, {"memory.events": "oom_kill 3", "app/memory.max": "max"}, None),
        ("4:memory:/\n", V1, {"memory/memory.oom_control": "under_oom 0\noom_kill 2"}, 2),
        ("4:memory:/\n", V1, {}, None),
    ],
)
def test_how_many_processes_the_kernel_killed_to_get_memory(tmp_path, group, mounts, files, count):
    assert oom_kills(system(tmp_path, group, mounts, files)) == count
