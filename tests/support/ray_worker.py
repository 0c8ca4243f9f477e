"""A worker without a model, for executors with workers elsewhere, and their launches."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hardpoint.plugins import HardpointError, ModelError, ModelRunnerOutput, WorkerInfo
from hardpoint.plugins.executor import WorkerLaunch
from hardpoint.plugins.requests.stats import PluginMeter


class SmallWorker:
    """Returns its arguments; the data of its launch names the failing call."""

    def __init__(self, launch, progress):
        self.rank = launch.rank
        self.fault = launch.data.decode()
        self.progress = progress
        self.seen = []

    def load_model(self):
        if self.fault == "load" and self.rank == 1:
            raise ModelError("the weights are of another model")
        if self.fault == "slow load":
            for done in range(1, 5):
                self.progress("weights", done, 4)
                time.sleep(0.6)
        return WorkerInfo(bytes_per_block=1, available_bytes=100 + self.rank)

    def initialize_cache(self, num_blocks):
        self.seen.append(num_blocks)

    def execute_model(self, plan):
        if plan.step == 666 and self.rank == 0:
            raise HardpointError("no such step")
        if plan.step >= 1000:
            time.sleep(plan.step / 1000)
        self.seen.append(plan.step)
        return ModelRunnerOutput({}, num_nans_in_logits={str(n): n for n in self.seen})

    def start_parts(self, weights):
        time.sleep(float(weights) if self.rank else 0)
        return {}

    def stop_profile(self):
        return f"{os.getpid()} {os.environ.get('SMALL_WORKER', '')}"

    def plugin_meters(self):
        return {str(step): PluginMeter(steps=step) for step in self.seen}

    def abort(self, reason):
        if self.fault.startswith("/"):
            (Path(self.fault) / f"abort {self.rank}").write_text(reason)

    def close(self):
        if self.fault.startswith("/"):
            (Path(self.fault) / str(self.rank)).touch()


def make(launch: WorkerLaunch, progress):
    """Make the worker of a launch."""
    if launch.data == b"open" and launch.rank == 1:
        raise HardpointError("torch: the engine has version 1, rank 1 has 2")
    return SmallWorker(launch, progress)
