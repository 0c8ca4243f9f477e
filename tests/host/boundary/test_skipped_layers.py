"""Worker halves that skip layers: the tokens that a model gets, and its outputs for these."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from support.core.engine_harness import ScriptedPart

from hardpoint.errors import PluginContractError
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.parts.bound_half import BoundWorkerHalf
from hardpoint.host.boundary.parts.worker_parts import WorkerParts
from hardpoint.plugins import ModelRunnerOutput, SchedulerOutput
from hardpoint.plugins.component import Source
from hardpoint.plugins.model import LayerHooks
from hardpoint.plugins.parallel import Parallel
from hardpoint.plugins.requests.plan import PartData
from hardpoint.plugins.step_part import ResidualStream

STARTS = [0, 2, 3, 6]  # first tokens of "a", "b" and "c"


class Skips(ResidualStream):
    """Skips layers, and keeps what it was called with."""

    def __init__(self, mask):
        self.mask, self.calls = mask, []

    def skips(self, layer, rows):
        self.calls.append((layer, list(rows.request_ids), list(rows.starts)))
        return self.mask(layer, rows)


class Watches(ResidualStream):
    """Keeps the outputs of each layer."""

    def __init__(self):
        self.seen = []

    def added(self, layer, branch, residual, delta, rows):
        self.seen.append((layer, branch, delta.tolist()))


def parts_of(*halves):
    bound = []
    for index, half in enumerate(halves):
        source = Source(f"part{index}", f"acme:Part{index}", "acme", "1.0", "plugins.enable")
        calls = PluginCalls(Activity(), "step_parts", source)
        bound.append(BoundWorkerHalf(ScriptedPart(source.name), half, calls))
    return WorkerParts(bound)


def layers_of(parts, users, *, asks=True):
    """Run two layers that add ones; return the outputs that are left, by layer and branch."""
    hooks, left = LayerHooks(), {}
    requests = [SimpleNamespace(request_id=name) for name in "abc"]
    data = {part: PartData(b"", ids) for part, ids in users.items()}
    counts = {"num_scheduled_tokens": {"a": 2, "b": 1, "c": 3}}
    counts |= {"total_num_scheduled_tokens": STARTS[-1]}
    parts.begin(SchedulerOutput(part_data=data, **counts))
    with parts.in_layers(hooks, requests, STARTS):
        for layer in range(2):
            if asks and hooks.skips is not None:
                hooks.skips(layer)
            for branch in ("attention", "mlp"):
                delta = torch.ones(6, 1)
                hooks.added(layer, branch, torch.zeros(6, 1), delta)
                left[layer, branch] = delta.flatten().tolist()
    assert (hooks.added, hooks.skips) == (None, None)
    return left


def first_tokens(layer, rows):
    """Let the first token of each request skip layer 1."""
    mask = torch.zeros(rows.starts[-1], dtype=torch.bool)
    mask[list(rows.starts[:-1])] = True
    return mask if layer == 1 else None


@pytest.mark.parametrize("asks", [True, False], ids=["", "a model that does not ask"])
def test_outputs_of_tokens_that_skip_a_layer_are_zero(asks):
    half, watching = Skips(first_tokens), Watches()
    users = {"part0": ["a", "c"], "part1": None}
    left = layers_of(parts_of(half, watching), users, asks=asks)
    skipped = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert left[0, "attention"] == left[0, "mlp"] == [1.0] * 6
    assert left[1, "attention"] == left[1, "mlp"] == skipped
    assert half.calls == [(layer, ["a", "c"], [0, 2, 5]) for layer in range(2)]
    assert watching.seen[-1] == (1, "mlp", [[value] for value in skipped])


def test_a_token_skips_what_any_half_skips():
    parts = parts_of(Skips(first_tokens), Skips(lambda layer, rows: torch.tensor([layer == 1])))
    left = layers_of(parts, {"part0": ["a"], "part1": ["b"]})
    assert left[1, "mlp"] == [0.0, 1.0, 0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda layer, rows: torch.ones(2), r"gave .*, expected a bool tensor \[2\] or None"),
        (lambda layer, rows: torch.ones(1).bool(), r"gave .*, expected a bool tensor \[2\] or"),
        (lambda layer, rows: 1 // layer, "failed: ZeroDivisionError"),
    ],
    ids=["numbers", "short", "raises"],
)
def test_a_wrong_mask_is_a_fault_of_its_part(mask, message):
    parts = parts_of(Skips(mask), Skips(first_tokens))
    left = layers_of(parts, {"part0": ["a"], "part1": ["c"]})
    assert left[1, "mlp"] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    output = ModelRunnerOutput()
    parts.report(output)
    ((part, fault),) = output.part_faults.items()
    assert part == "part0"
    assert re.search(r"its skips\(\) " + message, fault)
    assert output.is_cache_uncertain


def test_a_model_that_does_not_call_the_hook_is_refused():
    model = SimpleNamespace(called_hooks=frozenset({"embedded", "linear"}), source="plugin 'gpt'")
    message = r"it skips layers, and plugin 'gpt' does not call ModelContext.hooks.added, as the bu"
    with pytest.raises(PluginContractError, match=message):
        parts_of(Skips(first_tokens)).check_hooks(model, Parallel())
    model.called_hooks = frozenset({"added"})
    parts_of(Skips(first_tokens)).check_hooks(model, Parallel())
