"""Each call of a worker runs on the GPU of its rank, in whatever thread."""

from __future__ import annotations

import pytest
import torch

from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.core.worker.worker import LocalWorker
from hardpoint.plugins import EngineConfig, SchedulerOutput

PLAN = SchedulerOutput(step=1, num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1)
CALLS = {
    "load_model": lambda worker: worker.load_model(),
    "initialize_cache": lambda worker: worker.initialize_cache(1),
    "execute_model": lambda worker: worker.execute_model(PLAN),
    "sample_tokens": lambda worker: worker.sample_tokens(PLAN),
    "execute_dummy_batch": lambda worker: worker.execute_dummy_batch(),
    "sleep": lambda worker: worker.sleep(1),
    "wake_up": lambda worker: worker.wake_up(["weights"]),
}


class UsedError(Exception):
    """The device was set, before anything else could fail."""


@pytest.fixture
def used(monkeypatch):
    devices = []

    def use(device):
        devices.append(device)
        raise UsedError

    monkeypatch.setattr(torch.cuda, "set_device", use)
    return devices


def worker(device):
    return LocalWorker(
        WorkerSpec(
            config=EngineConfig(),
            plugins=None,
            loader=None,
            model_config=None,
            dtype=torch.float32,
            device=torch.device(device),
            max_model_len=8,
            progress=None,
        )
    )


@pytest.mark.parametrize("call", CALLS)
def test_calls_use_the_gpu_of_the_rank(used, call):
    with pytest.raises(UsedError):
        CALLS[call](worker("cuda:3"))
    assert used == [torch.device("cuda:3")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_device_is_set_where_there_is_one_at_most(used, device):
    with pytest.raises(RuntimeError, match="the worker has no model"):
        worker(device).execute_model(PLAN)
    assert not used
