"""Triton's kernels and their launchers have no call that makes the host wait for the device.

Their tests run on the CPU, where nothing waits; so the sources are read. What is found: calls whose
names show that they wait, values of the host that are made on a device, tensors moved to a device
but not from pinned memory (`non_blocking=True` shows that), and bool() of a tensor, or `if`
and `while` with one, where it is written as any(), all() or the like. A tensor whose truth is asked
for by its name alone is not found, nor is what called functions of other modules do.

What runs when a model is loaded may wait, and what records a CUDA graph; repeating one may not.
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
TRUTHS = {"all", "any", "eq", "ge", "gt", "isnan", "le", "lt", "max", "min", "ne", "sum"}
"""Methods of tensors, of which the host may ask whether the result is true."""
ON_HOST = {"seq_lens", "query_starts"}
"""Numpy arrays, whose methods have these names too."""
RARE = ("__init__", "pack", "_pack", "read", "_read", "_write", "record")
"""How functions begin that run once per matrix, when a model is loaded, or once per CUDA graph."""
SOURCES = sorted(
    path
    for folder in ("kernels/triton", "builtin_plugins/ops", "builtin_plugins/attention")
    for path in (ROOT / folder).glob("*.py")
    if folder == "kernels/triton" or path.name in ("triton.py", "cuda_graphs.py")
    if not path.name.startswith("packed")  # layouts, which are read and written at load
)


def waits(source: str) -> Iterator[str]:
    """Yield the waits of the host in a source, but for functions that run rarely."""
    for node in ast.parse(source).body:
        yield from _waits(node)


def _waits(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef) and node.name.startswith(RARE):
        return
    if isinstance(node, ast.If | ast.While | ast.IfExp) and _is_truth(node.test):
        yield f"line {node.lineno}: truth"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        makes = name in MAKING and any(keyword.arg == "device" for keyword in node.keywords)
        if name in WAITING or makes or _moves(node):
            yield f"line {node.lineno}: {name}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        converts = node.func.id in ("bool", "float", "int") and node.args
        if converts and _is_truth(node.args[0]):
            yield f"line {node.lineno}: {node.func.id}"
    for child in ast.iter_child_nodes(node):
        yield from _waits(child)


def _moves(call: ast.Call) -> bool:
    """Return whether a call moves a tensor to a device and waits."""
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
    named = " ".join(ast.unparse(value) for value in values)
    is_queued = any(keyword.arg == "non_blocking" for keyword in call.keywords)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    to_device = name == "cuda" or (name == "to" and ("device" in named or "cuda" in named))
    return to_device and not is_queued


def _is_truth(test: ast.expr) -> bool:
    """Return whether an expression is, or negates, a tensor that a method of one gives."""
    if isinstance(test, ast.UnaryOp):
        return _is_truth(test.operand)
    if isinstance(test, ast.BoolOp):
        return any(_is_truth(value) for value in test.values)
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute)):
        return False
    return test.func.attr in TRUTHS and not any(name in ast.unparse(test) for name in ON_HOST)


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

def launch_if(x, host, pinned):
    host.to(x.device)
    pinned.to(device=x.device, non_blocking=True)
    x.to(torch.float32)
    if not (x > 0).any():
        return bool(x.all())
    return int(step.seq_lens.max())
"""


def test_calls_that_wait_are_found():
    assert list(waits(BROKEN)) == [
        "line 11: nonzero",
        "line 15: tensor",
        "line 16: item",
        "line 19: to",
        "line 22: truth",
        "line 23: bool",
    ]
