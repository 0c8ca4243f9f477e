"""Profiles of a worker, made by torch's profiler."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from hardpoint.plugins import ConfigError, HardpointError


class Profiling:
    """Records profiles, one at a time, each into a file of its own.

    The files are Chrome traces, for Perfetto or chrome://tracing.

    Args:
        folder: is created when a profile starts; without a folder, no profile can start.
        rank: part of the names of files; None if there is one rank.
    """

    def __init__(self, folder: str | None, device: torch.device, rank: int | None = None) -> None:
        self._folder = folder
        self._label = "" if rank is None else f"rank{rank}-"
        self._device = device
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> None:
        """Start to record the activity of this thread and of the device.

        Raises:
            ConfigError: no folder is configured.
            HardpointError: a profile is being recorded.
        """
        if self._folder is None:
            raise ConfigError(
                "engine.profile_dir: expected a folder to write profiles to, got nothing"
            )
        if self._profiler is not None:
            raise HardpointError(
                "a profile is being recorded; stop it before you start another one"
            )
        Path(self._folder).mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        self._profiler = profiler

    def stop(self) -> str:
        """Stop, and return the file that the profile was written to.

        Raises:
            HardpointError: no profile is being recorded.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None or self._folder is None:
            raise HardpointError("no profile is being recorded")
        profiler.stop()
        path = Path(self._folder) / f"hardpoint-{self._label}{os.getpid()}-{time.time_ns()}.json"
        profiler.export_chrome_trace(str(path))
        return str(path)

    def close(self) -> None:
        """Discard the profile that is being recorded, if any."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
