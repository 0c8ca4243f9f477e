"""Plugins of measured engines: an asynchronous device, and timed collectives."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardpoint.plugins import ModelContext, OpsContext, Wrapper
from hardpoint.plugins.parallel import Communicator
from hardpoint.testing import HistoryAttention, ScriptedModel
from hardpoint.testing.timing.device_stream import DeviceStream
from hardpoint.testing.timing.stream_ops import StreamOps

TIMES = "HARDPOINT_BENCHMARK_TIMES"
"""Environment variable with the file of `Timed`: two numbers in float64."""
MAX_SEQS = 256


_POLLED = 0.0003  # seconds at the end of a wait; a sleep may take so much longer than asked for


def _poll(seconds: float) -> None:
    """Wait as for a GPU, which is polled, so that no wake-up of a process counts as host time."""
    end = time.perf_counter() + seconds
    if seconds > _POLLED:
        time.sleep(seconds - _POLLED)
    while time.perf_counter() < end:
        pass


class DeviceOps(StreamOps):
    """An asynchronous device, which can write down when its steps are launched."""

    contract = 1

    class Options(StreamOps.Options):
        """Options of the device.

        Attributes:
            launches: file of float64, of the size of the most steps, for their times; "" for none.
        """

        launches: str = ""

    def __init__(self, context: OpsContext) -> None:
        """Map the file into memory."""
        super().__init__(context)
        self.stream = DeviceStream(sleep=_poll)
        file = context.options.launches
        self._launches = np.memmap(file, np.float64) if file else np.zeros(0)
        self._num_launches = 0

    def launch_forward(self) -> None:
        """Note the time, and occupy the device."""
        if self._num_launches < len(self._launches):
            self._launches[self._num_launches] = time.perf_counter()
            self._num_launches += 1
        super().launch_forward()


class NoAttention(HistoryAttention):
    """The only layer of a model, for which the host computes nothing."""

    contract = 1

    def attend(self, spec: Any, cache: Any, plan: Any, q: torch.Tensor, *_: Any) -> torch.Tensor:  # noqa: ARG002
        """Return the queries."""
        return q


class SameToken(ScriptedModel):
    """A model that always gives the same token, so that the host computes nothing for it."""

    contract = 1

    def __init__(self, context: ModelContext) -> None:
        """Make the logits of all steps."""
        super().__init__(context)
        self._logits = torch.zeros(MAX_SEQS, context.config.vocab_size)
        self._logits[:, 65] = 1.0

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, vocab]."""
        return self._logits[: len(hidden)]


def on_device(milliseconds: float, launches: Path | None = None) -> dict[str, Any]:
    """Return tables of the configuration of the scripted model on such a device.

    Args:
        milliseconds: time of a step.
        launches: file for the times of launches.
    """
    options = {"step_seconds": milliseconds / 1000, "launches": str(launches or "")}
    return {
        "plugins": {"enable": [{"use": f"{__name__}:SameToken", "name": "ScriptedForCausalLM"}]},
        "attention": {"use": f"{__name__}:NoAttention"},
        "ops": {"use": f"{__name__}:DeviceOps"},
        "plugin": {"device_ops": options},
    }


class Timed(Wrapper[Communicator], Communicator):
    """Adds the time of collectives, and their number, to the file of rank 0."""

    contract = 1
    devices = ("cpu", "cuda")

    class Options(Wrapper.Options):
        """Wraps the communicator that is measured."""

        wraps: str = "shared_memory"

    def __init__(self, context: Any) -> None:
        """Map the file into memory."""
        super().__init__(context)
        is_counted = self.rank == 0
        self._sums = np.memmap(os.environ[TIMES], np.float64) if is_counted else np.zeros(2)

    def _timed(self, method: str, *args: Any) -> Any:
        began = time.perf_counter()
        result = getattr(self.wrapped, method)(*args)
        self._sums += time.perf_counter() - began, 1.0
        return result

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Time it."""
        return self._timed("all_reduce", x)  # type: ignore[no-any-return]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Time it."""
        return self._timed("all_gather", x)  # type: ignore[no-any-return]

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Time it."""
        return self._timed("broadcast", x, source)  # type: ignore[no-any-return]
