"""Workers and executors refuse what they cannot serve, instead of leaving requests to wait."""

import pytest
import torch

from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.core.worker.worker import LocalWorker
from hardpoint.plugins import EngineConfig, ExecutorContext, SchedulerOutput
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.executor import WorkerLaunch


@pytest.fixture
def worker():
    return LocalWorker(
        WorkerSpec(
            config=EngineConfig(),
            plugins=None,
            loader=None,
            model_config=None,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=8,
            progress=None,
        )
    )


def prepared_worker(launch, progress):
    return launch.prepared


@pytest.fixture
def executor(worker):
    return UniprocExecutor(
        ExecutorContext(
            name="uniproc",
            options=None,
            parallel=ParallelConfig(),
            launch=lambda rank: WorkerLaunch(f"{__name__}:prepared_worker", rank, 1, b"", worker),
            start_process=None,
            progress=None,
        )
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"draft_token_ids": {"a": [1], "b": [2]}},
            "step 3: the worker verifies no drafts, got some for a, b",
        ),
        ({"encoder_inputs": {"a": [0]}}, "step 3: the worker encodes no features, got some for a"),
        (
            {"encoder_inputs": {"b": [0]}, "draft_token_ids": {"a": [1]}},
            "step 3: the worker verifies no drafts, got some for a; it encodes no features, got "
            "some for b",
        ),
    ],
)
def test_a_worker_refuses_a_plan_that_it_cannot_serve(executor, fields, message):
    future = executor.execute_model(SchedulerOutput(step=3, **fields))
    with pytest.raises(NotImplementedError) as error:
        future.result(0)
    assert str(error.value) == message
