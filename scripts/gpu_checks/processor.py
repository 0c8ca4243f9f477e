"""The processor of a GPU machine: benchmarks/offline.py on its cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from gallery_costs import machine

from .device import Device
from .models import Sizes
from .recorder import Recorder

_BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "offline.py"


def check_processor(recorder: Recorder, _device: Device, sizes: Sizes) -> None:
    """Measure the demo model in bf16 on all cores, with the bounds of the machine."""
    cores = len(os.sched_getaffinity(0))
    with recorder.check(f"offline loads on {cores} cores") as check:
        check.fake("speeds")
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, str(_BENCHMARK), "--rounds", "1", "--peers"]
            command += ["--loads", *sizes.processor_loads]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
            environment.pop("TRITON_INTERPRET", None)
            subprocess.run(
                [*command, "--json", file.name],
                env=environment,
                check=True,
            )
            result = json.loads(Path(file.name).read_text())
        for load, bound in result["bounds"].items():
            speed = median(result["tokens_per_second"]["hardpoint"][load])
            check.measured(**{f"{load}_tok_per_s": speed, f"{load}_share_of_bound": speed / bound})
        check.set_detail(f"{machine()}, {torch.backends.cpu.get_cpu_capability()}")
