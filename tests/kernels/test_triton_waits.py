"""Triton's kernels and what launches them never make the host wait for the device.

Their tests run on the CPU, where nothing waits; so the sources are read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAITING = {
    "bincount",
    "cpu",
    "equal",
    "item",
    "masked_select",
    "new_tensor",
    "nonzero",
    "numpy",
    "synchronize",
    "tolist",
    "unique",
    "unique_consecutive",
}
MAKING = {"tensor", "as_tensor", "asarray"}
"""Of values of the host, on a device."""
AT_LOAD = ("__init__", "pack", "_pack", "read", "_read")
"""How functions begin that run once per matrix, when a model is loaded."""
SOURCES = sorted(
    path
    for folder in ("kernels/triton", "builtin_plugins/ops", "builtin_plugins/attention")
    for path in (ROOT / folder).glob("*.py")
    if folder == "kernels/triton" or path.name == "triton.py"
    if not path.name.startswith("packed")  # layouts, which are read and written at load
)


def waits(source: str) -> Iterator[str]:
    """Yield the calls of a source that make the host wait, but for those when a model is loaded."""
    for node in ast.parse(source).body:
        yield from _waits(node)


def _waits(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef) and node.name.startswith(AT_LOAD):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        makes = name in MAKING and any(keyword.arg == "device" for keyword in node.keywords)
        if name in WAITING or makes:
            yield f"line {node.lineno}: {name}"
    for child in ast.iter_child_nodes(node):
        yield from _waits(child)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_in_a_step_waits(path):
    assert not list(waits(path.read_text(encoding="utf-8")))


def test_the_sources_are_there():
    assert len(SOURCES) >= 2


BROKEN = """
class Ops:
    def __init__(self, x):
        self.size = x.item()

    def pack_codes(self, x):
        return x.tolist()

    def linear(self, x):
        def run(y):
            return y.nonzero()
        return run

def launch(x):
    index = torch.tensor([1], device=x.device)
    return kernel[(len(x),)](x, index, int(x.sum().item()))
"""


def test_calls_that_wait_are_found():
    assert list(waits(BROKEN)) == ["line 11: nonzero", "line 15: tensor", "line 16: item"]
