"""Errors of the plugins that run Triton kernels where these cannot run."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from hardpoint.builtin_plugins.gpu import load_kernels
from hardpoint.kernels.triton import launch
from hardpoint.plugins import ModelError, OpsContext

CONTEXT = OpsContext(name="triton", options=None, device=torch.device("cuda"), dtype=torch.bfloat16)


def with_driver(monkeypatch, get_current_target):
    """Let Triton have another driver, and no interpreter."""
    monkeypatch.delenv(launch.INTERPRETER, raising=False)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=get_current_target))
    monkeypatch.setattr(launch.triton.runtime, "driver", driver)


def test_a_machine_without_a_compiler_is_found_when_kernels_are_loaded(monkeypatch):
    def fail():
        raise FileNotFoundError("gcc is not here")

    with_driver(monkeypatch, fail)
    message = (
        r"ops.use: 'triton' cannot be used: .* needs a C compiler and Python's headers "
        r"\(Python.h\): FileNotFoundError: gcc is not here"
    )
    with pytest.raises(ModelError, match=message):
        load_kernels(CONTEXT, "ops.use")


@pytest.mark.parametrize("value", ["1", "true", "ON", "yes", "y"])
def test_all_values_that_triton_takes_interpret(monkeypatch, value):
    monkeypatch.setenv(launch.INTERPRETER, value)
    message = "ops.use: 'triton' cannot be used: TRITON_INTERPRET=1 has the CPU interpret them"
    with pytest.raises(ModelError, match=message):
        load_kernels(CONTEXT, "ops.use")


@pytest.mark.parametrize("value", ["0", "false", "off", ""])
def test_other_values_do_not(monkeypatch, value):
    monkeypatch.setenv(launch.INTERPRETER, value)
    with pytest.raises(ModelError, match=r"on a CPU in Triton's interpreter \(TRITON_INTERPRET=1"):
        load_kernels(dataclasses.replace(CONTEXT, device=torch.device("cpu")), "ops.use")


def test_a_driver_that_loads_is_enough(monkeypatch):
    with_driver(monkeypatch, lambda: "sm_90")
    assert load_kernels(CONTEXT, "ops.use") is False
