"""How many threads compute, and how long they spin when they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.control_groups import V2, system

from hardpoint import LLM, ConfigError
from hardpoint.host.system.threads import (
    ComputeThreads,
    CPUUsage,
    ThreadCount,
    adapted,
    crowding,
    fastest,
    shared_limit,
    short_spin,
    thread_limit,
)
from hardpoint.testing import scripted_config

V1 = "32 31 0:29 / {top} rw - cgroup cgroup rw,cpuacct,cpu\n"
SPIN = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Eight CPUs that the process may use."""
    cpus = set(range(2, 10))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cpus)
    return cpus


@pytest.fixture
def threads():
    """The number of torch's threads, to change."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("group", "mounts", "files", "count", "source"),
    [
        ("0::/app\n", V2, {"app/cpu.max": "max 100000"}, 8, "cores that this process may use"),
        ("0::/app\n", V2, {"app/cpu.max": "350000 100000"}, 3, "app/cpu.max, 3.5 CPUs"),
        ("0::/u/app\n", V2, {"u/cpu.max": "20000 100000", "u/app/x": ""}, 1, "cpu.max, 0.2 CPUs"),
        (
            "1:cpu,cpuacct:/app\n",
            V1,
            {"app/cpu.cfs_quota_us": -1, "app/cpu.cfs_period_us": 100000},
            8,
            "cores that this process may use",
        ),
        (
            "1:cpu,cpuacct:/app\n",
            V1,
            {"app/cpu.cfs_quota_us": 200000, "app/cpu.cfs_period_us": 50000},
            4,
            "app/cpu.cfs_quota_us, 4 CPUs",
        ),
        ("nonsense\n", V2, {"cpu.max": "1 0"}, 8, "cores that this process may use"),
    ],
)
def test_quotas_of_control_groups_are_kept(
    group, mounts, files, count, source, tmp_path, eight
) -> None:
    limit = thread_limit(64, system(tmp_path, group, mounts, files), tmp_path)
    assert limit.count == count
    assert limit.source.endswith(source)


def test_the_cpus_of_a_core_count_once_and_what_is_set_is_kept(tmp_path: Path, eight) -> None:
    for cpu in eight:
        file = tmp_path / f"cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    assert thread_limit(64, tmp_path, tmp_path).count == 4
    limit = thread_limit(3, tmp_path, tmp_path)
    assert str(limit) == "3 threads (set for torch, as by OMP_NUM_THREADS or set_num_threads)"


@pytest.mark.parametrize(
    ("limit", "seconds", "count"),
    [
        (16, {16: 1.0, 8: 0.95}, 16),
        (16, {16: 1.0, 8: 0.8, 4: 0.79}, 8),
        (16, {16: 1.0, 8: 0.5, 4: 0.3, 2: 0.1}, 2),
        (3, {}, 3),
    ],
)
def test_fewer_threads_are_chosen_where_that_is_clearly_faster(limit, seconds, count) -> None:
    assert fastest(ThreadCount(limit, "the cores"), seconds.__getitem__).count == count


@pytest.mark.parametrize(
    ("current", "ranks", "count", "source"),
    [
        (64, 1, 8, "the cores that this process may use"),
        (64, 2, 4, "the cores that this process may use: 8, divided by 2 ranks"),
        (64, 3, 2, "the cores that this process may use: 8, divided by 3 ranks"),
        (64, 9, 1, "the cores that this process may use: 8, divided by 9 ranks"),
        (2, 3, 2, "set for torch, as by OMP_NUM_THREADS or set_num_threads"),
        (3, 3, 2, "the cores that this process may use: 8, divided by 3 ranks"),
    ],
)
def test_ranks_share_the_cores_of_their_host(
    current, ranks, count, source, tmp_path, eight
) -> None:
    assert shared_limit(current, ranks, tmp_path, tmp_path) == ThreadCount(count, source)


def test_more_ranks_than_cores_are_reported(tmp_path: Path, eight) -> None:
    assert crowding(8, tmp_path, tmp_path) is None
    message = crowding(9, tmp_path, tmp_path)
    assert message is not None
    assert message.startswith("9 ranks share 8 cores (the cores that this process may use): ")


def test_threads_leave_others_the_cpus_that_they_use() -> None:
    assert CPUUsage(1.0, 5.0, 2.0).free_until(CPUUsage(3.0, 5.5, 4.5)) == 1.5
    assert [adapted(2, free) for free in (2.0, 1.6, 1.4, 0.2)] == [2, 2, 1, 1]
    assert [adapted(1, free) for free in (1.0, 1.7, 1.8, 2.0)] == [1, 1, 2, 2]
    assert [adapted(16, free) for free in (14.8, 8.2)] == [15, 8]


def test_the_number_follows_the_use_of_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.process_time", lambda: now[0])  # one CPU is ours, one is idle
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})

    def pass_seconds(idle: float) -> None:
        now[0] += 1
        total[0] += idle * os.sysconf("SC_CLK_TCK")
        lines = [f"cpu{number} 9 9 9 {int(total[0])} 0 9" for number in (0, 7)]
        (tmp_path / "stat").write_text("cpu 1 2 3\n" + "\n".join(lines))

    total = [0.0]
    pass_seconds(0)
    torch.set_num_threads(3)
    compute = ComputeThreads("auto", tmp_path)
    found = []
    for idle in (2, 1, 0, 0.2, 2):
        pass_seconds(idle)
        compute.adapt()
        found.append(torch.get_num_threads())
    assert found == [3, 2, 1, 1, 3]
    # While it waited for requests, others used all CPUs: that is no measure of the next step.
    monkeypatch.setattr("time.process_time", lambda: own)
    own = now[0]
    for _ in range(10):
        pass_seconds(0)
    compute.adapt()
    assert torch.get_num_threads() == 3
    pass_seconds(0)
    own += 0.6
    compute.adapt()
    assert torch.get_num_threads() == 1
    compute.close()
    assert torch.get_num_threads() == 3


def test_a_configured_number_is_used_and_restored(scripted, threads: int, caplog) -> None:
    config = scripted_config(scripted, {"executor": {"threads": 3}})
    with caplog.at_level("INFO", "hardpoint"), LLM(config=config):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == threads
    assert "computing with 3 threads (executor.threads)" in caplog.messages


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "a whole number >= 1"), (9999, "a whole number"), ("many", "auto")]
)
def test_a_wrong_number_is_refused(value, expected, tmp_path: Path) -> None:
    config = scripted_config(tmp_path, {"executor": {"threads": value}})
    with pytest.raises(ConfigError, match=rf"executor\.threads: expected .*{expected}"):
        LLM(config=config)


_IMPORTS = """
import os, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(*map(os.environ.get, NAMES))
            raise ImportError("enough seen")

sys.meta_path.insert(0, Finder())
from hardpoint import LLM, AsyncLLM

try:
    LLM()
except ImportError as error:
    print(*map(os.environ.get, NAMES), error)
"""


def environment_at_import(**environment: str) -> list[str]:
    """Return the variables that torch's import sees in a program, and those that remain."""
    clean = {k: v for k, v in os.environ.items() if k not in (*SPIN, "OMP_WAIT_POLICY")}
    return subprocess.run(
        [sys.executable, "-c", f"NAMES = {SPIN}\n{_IMPORTS}"],
        env=clean | environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()


def test_torch_is_loaded_with_a_short_spin_and_the_environment_is_restored() -> None:
    assert environment_at_import() == ["2000 1", "None None enough seen"]
    assert environment_at_import(GOMP_SPINCOUNT="7") == ["7 None", "7 None enough seen"]


def test_where_torch_is_loaded_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (*SPIN, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level("DEBUG", "hardpoint"), short_spin():
        assert "GOMP_SPINCOUNT" not in os.environ
    assert "set GOMP_SPINCOUNT=2000 for the program" in caplog.text
