"""Models and executors that cannot be used with several workers."""

from __future__ import annotations

import os

from hardpoint import plugins
from hardpoint.plugins import Executor, LogitsProcessor, Phase, WorkerInfo
from hardpoint.testing import ScriptedModel
from support.samples import Sample


class Whole(ScriptedModel):
    """Cannot be divided."""

    contract = 1
    parallelism = ()


class Layered(ScriptedModel):
    """Can be divided into stages only."""

    contract = 1
    parallelism = ("pipeline",)


class NoInfos(Sample, Executor, contract=1):
    """Starts nothing."""

    def start(self):
        return None

    def initialize_cache(self, num_blocks):
        raise AssertionError("there is no worker")

    execute_model = sample_tokens = collective_rpc = initialize_cache


class OneInfo(NoInfos):
    def start(self):
        return [WorkerInfo(bytes_per_block=8, available_bytes=1 << 20)]


class OtherThings(NoInfos):
    def start(self):
        return ["ready", "ready"]


class BreaksLate(LogitsProcessor):
    """Raises in its third step, which `plugins.on_error` lets end the engine."""

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        pass

    def apply(self, logits, rows):
        if len(rows.requests[0].output_token_ids) >= 3:
            raise RuntimeError(f"broken in process {os.getpid()}")
        return logits


class Uneven(NoInfos):
    """Two stages; the first has twice the layers, and the second less memory."""

    infos = [
        WorkerInfo(200, 10_000, sleep_levels=(1, 2)),
        WorkerInfo(100, 6_000, sleep_levels=(2,)),
    ]
    num_blocks = 0

    def start(self):
        return self.infos

    def initialize_cache(self, num_blocks):
        Uneven.num_blocks = num_blocks
