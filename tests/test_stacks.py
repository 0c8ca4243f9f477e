"""The configuration files in examples/stacks serve the demo model as they stand."""

from __future__ import annotations

import json
import sys

import pytest
from support.processes import ROOT, run

STACKS = sorted((ROOT / "examples" / "stacks").glob("*.toml"))
HARDPOINT = (sys.executable, "-m", "hardpoint")


def test_there_are_two():
    assert [path.name for path in STACKS] == ["careful.toml", "creative.toml"]


@pytest.fixture
def packages(acme, acme_tiny_scheduler):
    """The packages that the files name."""
    return f"{acme}:{acme_tiny_scheduler}"


@pytest.mark.parametrize("stack", STACKS, ids=lambda path: path.stem)
def test_a_stack_answers(stack, packages, tmp_path):
    command = ("generate", "The capital of France is", "--max-tokens", "1", "--config", str(stack))
    assert run(*HARDPOINT, *command, path=packages, cwd=tmp_path) == " Paris\n"


def test_a_stack_chooses_its_components(packages, tmp_path):
    on = {}
    for stack in STACKS:
        command = ("plugins", "list", "--json", "--config", str(stack))
        rows = json.loads(run(*HARDPOINT, *command, path=packages, cwd=tmp_path))
        on[stack.stem] = {f"{row['kind']}/{row['name']}" for row in rows if row["on"]}
    assert "scheduling_policies/priority" in on["careful"]
    assert "logits_processors/logit_bias" not in on["careful"]
    assert "scheduling_policies/fcfs" in on["creative"]
    assert "logits_processors/top_a" in on["creative"] - on["careful"]
    assert {"samplers/default", "schedulers/default"} <= on["careful"]
    assert {"samplers/top_n_sigma", "schedulers/tiny"} <= on["creative"]
