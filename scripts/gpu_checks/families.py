"""Tiny random models of all families of transformers: their tokens, compared with `generate`."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .device import Device, num_processes
from .models import Sizes
from .recorder import Recorder

_TESTS = Path(__file__).resolve().parents[2] / "tests"
_AT_ONCE = 12
_TOO_LARGE = "has kernels for heads of at most"
"""What Triton's attention refuses, which torch's runs."""


def check_families(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Run each family that runs on a CPU, natively and through transformers."""
    sys.path.append(str(_TESTS))
    models = _running_families()[: sizes.families]
    at_once, context = num_processes(device, _AT_ONCE), multiprocessing.get_context("spawn")
    with (
        recorder.check("families: as transformers, in chunks and with prefix hits") as check,
        ProcessPoolExecutor(at_once, context, _begin) as pool,
    ):
        reasons = pool.map(_difference, *zip(*models, strict=True), [device.name] * len(models))
        differences = dict(zip(models, reasons, strict=True))
        refused = [model for model, why in differences.items() if _TOO_LARGE in why]
        wrong = {model: why for model, why in differences.items() if why and model not in refused}
        check.facts |= {"models": len(models), "refused": refused}
        check.problems += [f"{name} ({use}): {why}" for (name, use), why in wrong.items()]
        check.detail = f"{len(models) - len(refused)} models"
        check.detail += f"; {len(refused)} refused, of larger heads" if refused else ""


def _running_families() -> list[tuple[str, str]]:
    """Return the architectures that run, with the value of `models.use` of each way."""
    from support.families.data import read_data
    from support.families.survey import NATIVE, THROUGH

    families = read_data().families
    native = [(family.name, "auto") for family in families if family.path in (NATIVE, THROUGH)]
    return native + [
        (family.name, "transformers")
        for family in families
        if family.path == NATIVE and family.other == "equal"
    ]


def _begin() -> None:
    """Prepare a process."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _difference(name: str, use: str, device: str) -> str:
    """Return how a model's tokens differ from transformers; empty if they do not."""
    from support.families.survey import tokens_on

    with tempfile.TemporaryDirectory() as folder:
        try:
            return str(tokens_on(device, name, use, Path(folder)))
        except Exception as error:  # the others are to run
            return f"{type(error).__name__}: {error}"
