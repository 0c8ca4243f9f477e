"""A step without traced requests makes the calls that it makes without the part."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from support.driving import FINAL
from support.source_tree import without_collections
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint import RequestError, SamplingParams
from hardpoint.testing import scripted_engine

FIELDS = {"temperature": 0.8, "seed": 1, "top_k": 5, "logit_bias": {65: 1.0}, "max_tokens": 60}


class Operations(TorchDispatchMode):
    """Counts the operations on tensors, each of them at least a kernel."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(engine, *, traced):
    """Operations and calls of Python functions in steps of two requests, after warm ones."""
    include = {"include": ["trace"]} if traced else {}
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], SamplingParams(**FIELDS, **FINAL, **include))
    for _ in range(10):
        engine.step()
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame, event, _):
        if event == "call" and "hardpoint" in frame.f_code.co_filename:
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    with without_collections(), Operations() as operations:  # finalizers of others are no calls
        sys.setprofile(note)
        try:
            for _ in range(5):
                engine.step()
        finally:
            sys.setprofile(None)
    engine.abort_requests(["a", "b"])
    engine.step()
    return operations.found, calls


@pytest.fixture(scope="module")
def engines(scripted):
    without = scripted_engine(scripted, {"plugins": {"disable": ["trace"]}})
    having = scripted_engine(scripted)
    yield without, having
    without.close()
    having.close()


def test_the_part_adds_neither_an_operation_nor_a_call(engines):
    without, having = engines
    for engine in engines:  # what is made once is in no count
        counted(engine, traced=False)
    expected = counted(without, traced=False)
    assert sum(expected[0].values()) > 50
    assert sum(expected[1].values()) > 500
    assert differences(counted(having, traced=False), expected) == []
    operations, calls = counted(having, traced=True)  # so that the counts can differ
    assert sum(operations.values()) > sum(expected[0].values())
    assert any("builtin_plugins/step_parts/trace" in file for file, _ in calls)
    assert differences(counted(having, traced=False), expected) == []


def differences(actual, expected):
    """Return the names called more or less often, with both numbers."""
    return [
        (name, counts[name], other[name])
        for counts, other in zip(actual, expected, strict=True)
        for name in counts.keys() | other.keys()
        if counts[name] != other[name]
    ]


def test_a_disabled_part_is_no_part(engines):
    without, _ = engines
    with pytest.raises(RequestError, match=r"include.*trace"):
        without.add_request("c", [1], SamplingParams(include=["trace"], **FINAL))
