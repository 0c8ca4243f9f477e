"""The calls of a step part's half in a worker, with tensors of the requests that use the part."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MethodType
from typing import Any

import msgspec
import numpy as np
import torch

from hardpoint.host.boundary.parts.hooks import WORKER_HOOKS
from hardpoint.plugins import ModelRunnerOutput, SchedulerOutput, WorkerHalf
from hardpoint.plugins.requests.plan import PartData
from hardpoint.plugins.worker_half import StepRows
from hardpoint.testing.snapshots import snapshot

from . import rules
from .verifying import check_verifier

__all__ = ["HIDDEN_SIZE", "Rows", "WorkerSteps", "overrides"]

HIDDEN_SIZE = 16
_LAYERS = 2
_HEAD_SIZE = 8
_STACKS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("self_attn.q_proj", 16), ("self_attn.k_proj", 8), ("self_attn.v_proj", 8)),
    (("self_attn.o_proj", 16),),
)
"""Linear layers of each layer: names and rows of the stacked matrices."""
_NUM_HEADS = 2
_IN_LAYERS = ("around_layers", "embedded", "linear", "added", "skips")
_BRANCHES = ("attention", "mlp")

Rows = dict[str, np.ndarray]
"""The rows of one request that a half has changed in a step, by the name of the values."""

PositionRows = dict[tuple[str, int], np.ndarray]
"""The changed rows of one request in a step, by the name of the values and their position."""


def overrides(half: WorkerHalf, method: str) -> bool:
    """Return whether a half has a hook, and not its default."""
    return method in WORKER_HOOKS.implemented(half)


class WorkerSteps:
    """Calls a worker half like a worker does, and checks its results."""

    def __init__(self, half: WorkerHalf, part: str, vocab_size: int, *, watch: bool) -> None:
        """Begin without requests.

        Args:
            vocab_size: vocabulary size of the model.
            watch: whether to compare plans and other arguments before and after each call.
        """
        self._half, self._part, self._vocab_size, self._watch = half, part, vocab_size, watch
        self._hooks = WORKER_HOOKS.implemented(half)
        self._ended = set[str]()  # not reported to the half yet

    def run(
        self,
        plan: SchedulerOutput,
        part: PartData | None,
        seeds: Mapping[str, str],
        output: ModelRunnerOutput,
    ) -> tuple[dict[str, Rows], dict[str, PositionRows]]:
        """Run a step, and add the half's report to its result.

        Args:
            plan: plan of the step.
            part: data for the half; None calls it for the requests that have ended alone.
            seeds: seeds of the values of all requests of the plan, which depend on the position
                of each row, too: a row that is computed again, or as a draft, is the same.
            output: with the sampled tokens.

        Returns:
            The rows that the half has changed, by request; and each row of these by its position.

        Raises:
            Violation: a rule was broken.
        """
        plan = msgspec.structs.replace(
            plan,
            part_data={} if part is None else {self._part: part},
            finished_request_ids=plan.finished_request_ids | self._ended,
        )
        self._ended.clear()
        if plan.finished_request_ids and self._overrides("finished"):
            self._call("finished", plan.finished_request_ids)
        if self._overrides("verify_drafts"):
            check_verifier(self._verify_drafts, plan, output.sampled_token_ids)
        if part is None or not plan.total_num_scheduled_tokens:
            return {}, {}
        names = list(plan.num_scheduled_tokens) if part.request_ids is None else part.request_ids
        num_tokens, drafts = plan.num_scheduled_tokens, plan.draft_token_ids
        firsts = plan.num_computed_tokens()
        step = _Step(num_tokens, names, seeds, firsts)
        if self._overrides("begin"):
            self._call("begin", plan, part.data)
        if any(map(self._overrides, _IN_LAYERS)) and self._wants_layers():
            whole = _Step(num_tokens, list(num_tokens), seeds, firsts)
            self._run_layers(step, whole)
            step.add(whole)
        if names and self._overrides("hidden"):
            self._change(step, "hidden", "hidden states", HIDDEN_SIZE)
        if self._overrides("after_layers"):
            self._call("after_layers")
        if names and self._overrides("logits"):
            sampled = {
                n: 1 + len(drafts.get(n, ())) for n in names if n in output.sampled_token_ids
            }
            places = {name: firsts[name] + num_tokens[name] - sampled[name] for name in sampled}
            last = _Step(sampled, list(sampled), seeds, places)
            self._change(last, "logits", "logits", self._vocab_size)
            step.add(last)
        self._read_result(names, output)
        return step.changed, step.by_position

    def weights_changed(self) -> None:
        """Notify the half of other weights."""
        if self._overrides("weights_changed"):
            self._call("weights_changed")

    def lost(self, plan: SchedulerOutput) -> None:
        """Keep which requests have ended, of a plan that reaches no worker."""
        self._ended |= plan.finished_request_ids

    def _overrides(self, method: str) -> bool:
        return method in self._hooks

    def _verify_drafts(self, rows: Any) -> Any:
        return self._checked("verify_drafts", lambda: self._half.verify_drafts(rows))

    def _wants_layers(self) -> bool:
        return bool(self._checked("wants_layers", lambda: self._half.wants_layers))

    def _run_layers(self, step: _Step, whole: _Step) -> None:
        """Run the layers of a model.

        Args:
            step: rows of the requests that use the part.
            whole: rows of all requests.
        """
        plain = _Attend()
        attend: Callable[..., torch.Tensor] = plain
        has_around = self._overrides("around_layers")
        if self._overrides("take_attention_weights"):
            self._call("take_attention_weights", whole.attention_weights)
        if has_around:
            attend = self._call("around_layers", plain)
            rules.check_function(attend)
        has_rows = bool(step.names)
        if has_rows and self._overrides("embedded"):
            self._change(step, "embedded", "embedded tokens", HIDDEN_SIZE)
        for layer in range(_LAYERS):
            if has_rows and self._overrides("skips"):
                self._skip(step, layer)
            for stack in _STACKS if has_rows and self._overrides("linear") else ():
                parts = [(f"model.layers.{layer}.{name}", rows) for name, rows in stack]
                label = f"product of {parts[0][0]}"
                x = step.values(f"{label} x", HIDDEN_SIZE)
                size = sum(rows for _, rows in stack)
                self._change(step, "linear", label, size, before=(parts, x))
            if has_around:
                self._attend(attend, plain, whole, layer)
            for branch in _BRANCHES if has_rows and self._is_called_for(layer) else ():
                self._add(step, layer, branch)

    def _is_called_for(self, layer: int) -> bool:
        if not self._overrides("added"):
            return False
        layers = self._checked("layers", lambda: self._half.layers)
        return layers is None or layer in layers

    def _skip(self, step: _Step, layer: int) -> None:
        """Let the half skip a layer, and record which rows do."""
        rows = step.rows()
        skipped = self._call("skips", layer, rows)
        rules.check_skipped(skipped, rows.starts[-1])
        if skipped is not None:
            column = skipped.float().unsqueeze(1)
            step.keep(f"skipped tokens of layer {layer}", column, torch.zeros_like(column))

    def _add(self, step: _Step, layer: int, branch: str) -> None:
        """Let the half change the output of a branch of a layer, and record the changed rows."""
        labels = [f"{name} of the {branch} of layer {layer}" for name in ("residual", "output")]
        values = [step.values(label, HIDDEN_SIZE) for label in labels]
        copies = [value.clone() for value in values]
        returned = self._call("added", layer, branch, *values, step.rows())
        if not all(map(torch.equal, values, copies)):
            raise rules.WORKER_READS.violation("added() mutated its input")
        rules.check_added(returned, copies[0])
        for label, changed, copy in zip(labels, returned or (), copies, strict=False):
            step.keep(label, changed, copy)

    def _attend(
        self, attend: Callable[..., torch.Tensor], plain: _Attend, whole: _Step, layer: int
    ) -> None:
        """Call the attention of a layer for all requests.

        Args:
            attend: from the half.
            plain: attention around it.
            whole: rows of all requests.
            layer: index.
        """
        plain.calls.clear()
        q, k, v = (
            whole.values(f"{name} {layer}", heads * _HEAD_SIZE).view(-1, heads, _HEAD_SIZE)
            for name, heads in (("q", _NUM_HEADS), ("k", 1), ("v", 1))
        )
        out = self._checked("around_layers", lambda: attend(layer, q, k, v))
        rules.check_attention(out, q, layer, plain.calls)
        whole.keep(f"attention of layer {layer}", out, q)

    def _change(
        self, step: _Step, method: str, label: str, size: int, before: tuple[Any, ...] = ()
    ) -> None:
        """Let the half change rows of a step, and record the changed rows.

        Args:
            step: the rows.
            method: method of the half.
            label: names the values.
            size: elements of each row.
            before: arguments before the values.
        """
        values = step.values(label, size)
        rows = step.names_of_rows() if method == "logits" else step.rows()
        tensors = [value for value in (*before, values) if isinstance(value, torch.Tensor)]
        copies = [value.clone() for value in tensors]
        returned = self._call(method, *before, values, rows)
        rules.check_changed(method, returned, copies[-1])
        for value, copy in zip(tensors, copies, strict=True):
            is_returned = returned is not None and returned.data_ptr() == value.data_ptr()
            if not is_returned and not torch.equal(value, copy):
                raise rules.WORKER_READS.violation(
                    f"{method}() mutated an input that it did not return"
                )
        if returned is not None:
            step.keep(label, returned, copies[-1])

    def _read_result(self, names: Collection[str], output: ModelRunnerOutput) -> None:
        if self._overrides("sampled"):
            tokens = output.sampled_token_ids
            self._call("sampled", {name: tokens[name] for name in tokens if name in names})
        if self._overrides("report"):
            report = self._call("report")
            rules.check_report(report)
            if report is not None:
                output.part_reports.setdefault(self._part, {})[0] = report

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the half; anything raised is wrong.

        Raises:
            Violation: it raised, or changed a plan or another argument that is not a tensor.
        """
        plain = [
            value
            for value in arguments
            if not isinstance(value, torch.Tensor | _Attend | MethodType)
        ]
        before = snapshot(plain) if self._watch else None
        returned = self._checked(method, lambda: getattr(self._half, method)(*arguments))
        if self._watch and snapshot(plain) != before:
            raise rules.WORKER_READS.violation(f"{method}() mutated its input")
        return returned

    def _checked(self, name: str, function: Callable[[], Any]) -> Any:
        try:
            with torch.inference_mode():
                return function()
        except Exception as cause:
            name = name if name in ("wants_layers", "layers") else f"{name}()"
            raise rules.WORKER.violation(
                f"{name} of the worker half raised {type(cause).__name__}: {cause}"
            ) from cause


class _Attend:
    """Attention that returns its queries.

    Attributes:
        calls: layers for which it was called.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,  # noqa: ARG002
        v: torch.Tensor,  # noqa: ARG002
        angles: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        self.calls.append(layer)
        return q.clone()


class _Step:
    """The rows of some requests of a step, which depend on each request and position alone.

    Attributes:
        names: ids of the requests.
        changed: values that a half has changed, by request and by their name.
        by_position: the same, row by row.
    """

    def __init__(
        self,
        num_tokens: Mapping[str, int],
        names: Sequence[str],
        seeds: Mapping[str, str],
        firsts: Mapping[str, int],
    ) -> None:
        self.names = list(names)
        self._sizes = [num_tokens[name] for name in names]
        self._seeds, self._firsts = seeds, firsts
        self.changed: dict[str, Rows] = {name: {} for name in names}
        self.by_position: dict[str, PositionRows] = {name: {} for name in names}

    def add(self, other: _Step) -> None:
        for name in other.changed.keys() & self.changed.keys():
            self.changed[name] |= other.changed[name]
            self.by_position[name] |= other.by_position[name]

    def rows(self) -> StepRows:
        return StepRows(list(self.names), [0, *itertools.accumulate(self._sizes)])

    def names_of_rows(self) -> list[str]:
        pairs = zip(self.names, self._sizes, strict=True)
        return [name for name, size in pairs for _ in range(size)]

    def values(self, label: str, size: int) -> torch.Tensor:
        """Return float32 [tokens, size]."""
        rows = [
            _row(self._seeds[name], label, self._firsts[name] + index, size)
            for name, count in zip(self.names, self._sizes, strict=True)
            for index in range(count)
        ]
        return torch.from_numpy(np.stack(rows))

    def attention_weights(
        self,
        layer: int,  # noqa: ARG002
        q: torch.Tensor,  # noqa: ARG002
        request_id: str,
        count: int,
    ) -> torch.Tensor:
        """Return equal weights, see `AttentionWeights`.

        Raises:
            ValueError: the step has no such tokens.
        """
        sizes = dict(zip(self.names, self._sizes, strict=True))
        if not 0 < count <= (size := sizes.get(request_id, 0)):
            raise ValueError(
                f"attention weights: expected 1 to {size} tokens of {request_id!r}, got {count}"
            )
        length = self._firsts[request_id] + size
        return torch.full((_NUM_HEADS, length), count / length)

    def keep(self, label: str, values: torch.Tensor, before_hook: torch.Tensor) -> None:
        plain, end = values.to(torch.float32), 0
        for name, count in zip(self.names, self._sizes, strict=True):
            start, end = end, end + count
            if torch.equal(plain[start:end], before_hook[start:end]):
                continue
            rows = plain[start:end].numpy().copy()
            self.changed[name][label] = rows
            for index, (row, before) in enumerate(
                zip(rows, before_hook[start:end].numpy(), strict=True)
            ):
                if not np.array_equal(row, before):
                    self.by_position[name][label, self._firsts[name] + index] = row


@functools.lru_cache(maxsize=4096)
def _row(seed: str, label: str, position: int, size: int) -> np.ndarray:
    """Return float32 [size]."""
    generator = np.random.default_rng((zlib.crc32(f"{seed} {label}".encode()), position))
    return generator.standard_normal(size, dtype=np.float32)
