"""The worker halves of step parts behind one object: called in steps that have data for them."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hardpoint.errors import HardpointError, PluginContractError, PluginFaultError, shown
from hardpoint.host.boundary.checked_attention import is_block_view
from hardpoint.host.boundary.checked_model import CheckedModel, wrong_result
from hardpoint.host.registry.blame import describe, faults_as, raise_unless_fault
from hardpoint.plugins import ForwardBatch, LogitsRequest, ModelRunnerOutput, SchedulerOutput
from hardpoint.plugins.model import Attend, LayerHooks
from hardpoint.plugins.model.forward import AttentionWeights
from hardpoint.plugins.parallel import Parallel
from hardpoint.plugins.sampling.phases import LogitsStage
from hardpoint.plugins.worker_half import (
    AllocatedCache,
    Forward,
    ForwardStep,
    KVBlocks,
    StepRows,
)

from .bound_half import IN_LAYERS, BoundWorkerHalf, OpenHalves, form_of
from .layer_calls import LayerCalls

LogitsObserver = Callable[[LogitsStage, torch.Tensor, Sequence[LogitsRequest]], None]
"""Reads the logits [rows, vocab] after a stage, and whose rows they are."""

_HOOKS = {
    "embedded": ("changes embedded tokens", "embedded, as the layers of hardpoint.toolkit do"),
    "linear": ("changes linear layers", "linear, as the layers of hardpoint.toolkit do"),
    "added": ("changes what layers add", "added, as the built-in decoders do"),
    "skips": ("skips layers", "added, as the built-in decoders do"),
}
"""Effect of each method of a half in the layers, and the hook that the model has to call."""

_AFTER_LAYERS = ("after_layers", "hidden", "logits", "processed", "sampled", "report")
_IN_STEPS = ("begin", *IN_LAYERS, *_AFTER_LAYERS)


class WorkerParts:
    """The worker halves of all parts.

    A half that fails is left out of the rest of the step. In the rank that samples, the engine gets
    its fault with the result and decides by the part's scope; in another rank the step fails.

    Attributes:
        packs: whether a half needs packed inputs.
        encodes: whether a half encodes features.
        work_when_idle: whether a half has `idle`.
        open: opens the halves of further parts.
        observer: shows the logits of this step to halves that read them; None without such ones.
        verifier: the last half that can verify drafts.
    """

    def __init__(
        self, halves: Sequence[BoundWorkerHalf] = (), *, rank: int = 0, samples: bool = True
    ) -> None:
        """Bind the halves, in the order of their calls.

        Args:
            samples: whether this rank gives the result of a step.
        """
        self.open: OpenHalves[BoundWorkerHalf] | None = None
        self._known: dict[str, set[str]] = {}  # live users of parts with `only_users`
        self.use(halves)
        self._moving = [half for half in halves if half.moves_blocks]
        self._rank, self._samples = rank, samples
        self._idle = [half for half in halves if half.overrides("idle")]
        self.packs = any(half.half.packs for half in halves)
        self.encodes = any(half.half.encodes for half in halves)
        self.work_when_idle = bool(self._idle)
        self._active: list[BoundWorkerHalf] = []
        self._around: list[BoundWorkerHalf] = []  # of the active ones, those called for layers
        self._users: dict[str, frozenset[str] | None] = {}  # by part; None is all
        self._faults: dict[str, str] = {}
        self._failed_in_layers = False  # in this step
        self.observer: LogitsObserver | None = None

    @property
    def halves(self) -> Sequence[BoundWorkerHalf]:
        """All halves in use, of every plugin generation, in the order of their calls."""
        return self._halves

    def use(self, halves: Sequence[BoundWorkerHalf]) -> None:
        """Call these halves from the next step on."""
        self._halves = tuple(halves)
        self._in_steps = tuple(half for half in halves if any(map(half.overrides, _IN_STEPS)))
        self._follow = [half for half in halves if half.overrides("finished")]
        keys = [half.key for half in self._follow if half.half.only_users]
        self._known = {key: self._known.get(key, set()) for key in keys}
        verifiers = [half for half in halves if half.overrides("verify_drafts")]
        self.verifier = verifiers[-1] if verifiers else None

    def __bool__(self) -> bool:
        return bool(self._active or self._faults)

    @property
    def reads_tokens(self) -> str | None:
        """Name of a part that reads logits or tokens of this step; None if none does."""
        methods = ("sampled", "logits")
        readers = [h for h in self._active if self.observer or any(map(h.overrides, methods))]
        return readers[0].key if readers else None

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that the halves are going to allocate, by purpose.

        Raises:
            PluginFaultError: a half failed, or returned something else.
        """
        total: Counter[str] = Counter()
        for half in [half for half in self._halves if half.overrides("memory")]:
            sizes = half.checked("memory")
            if not isinstance(sizes, Mapping) or not all(
                isinstance(name, str) and type(size) is int and size >= 0
                for name, size in sizes.items()
            ):
                raise half.wrong("memory", sizes, "expected bytes by name")
            total.update(sizes)
        return total

    def around_model(self, forward: Callable[[ForwardBatch], torch.Tensor]) -> Forward | None:
        """Return the function that replaces a model's `forward` in steps; None if no half wraps it.

        Raises:
            PluginFaultError: a half failed, or returned no function.
        """
        model = around = functools.partial(_run_model, forward)
        for half in sorted(self._halves, key=lambda half: half.half.changes_inputs):
            if half.overrides("around_model"):
                inner, around = around, half.checked("around_model", around)
                if not callable(around):
                    raise half.wrong("around_model", around, "expected a function")
                if around is not inner:
                    around = functools.partial(_run_around, half, around)
        return None if around is model else around

    def cache_allocated(self, cache: AllocatedCache) -> None:
        """Notify all halves of the KV cache.

        Raises:
            PluginFaultError: one of them failed.
        """
        for half in self._halves:
            if half.overrides("cache_allocated"):
                half.checked("cache_allocated", cache)

    def cache_released(self) -> None:
        """Let all halves forget the KV cache.

        Raises:
            PluginFaultError: one of them failed.
        """
        with ExitStack() as stack:
            for half in self._halves:
                if half.overrides("cache_released"):
                    stack.callback(half.checked, "cache_released")

    def with_memory(self, layers: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Return views of each layer's blocks, and of the halves' memory for them.

        Raises:
            PluginFaultError: a half failed, or returned something else.
        """
        result, firsts = [list(views) for views in layers], [views[0] for views in layers]
        for half in self._halves:
            if half.overrides("block_memory"):
                memory = half.checked("block_memory")
                has_all = isinstance(memory, Sequence) and len(memory) == len(result)
                if not has_all or not all(map(is_block_view, memory, firsts)):
                    expected = f"{len(result)} uint8 tensors [num_blocks, bytes]"
                    raise wrong_result(half.source, "block_memory", memory, expected)
                for views, view in zip(result, memory, strict=True):
                    views.append(view)
        return result

    def finished(self, request_ids: Collection[str]) -> None:
        """Notify the halves of requests that have ended.

        Raises:
            PluginFaultError: one of them failed.
        """
        for half in self._follow:
            ids, users = request_ids, self._known.get(half.key)
            if users is not None:
                ids = users.intersection(ids)
                users -= ids
            if ids:
                half.checked("finished", ids)

    def call(self, name: str, message: bytes) -> tuple[str | None, bytes]:
        """Return None and the answer of a half, by its key; or kind and text of an error."""
        for half in self._halves:
            if half.key == name:
                return half.answer(message)
        return "HardpointError", f"the part {name!r} has no half in worker {self._rank}".encode()

    def idle(self) -> bool | None:
        """Let the halves do work ahead, until one of them has more to do.

        Returns:
            Whether one has more; None if none will have anything until a KV cache is allocated.

        Raises:
            PluginFaultError: a half failed.
        """
        answers = []
        for half in self._idle:
            answers.append(half.checked("idle"))
            if answers[-1]:
                return True
        return None if all(answer is None for answer in answers) else False

    @property
    def moves_blocks(self) -> str | None:
        """The setting that makes a half move blocks of the KV cache; None if none does."""
        return self._moving[0].moves_blocks if self._moving else None

    def check_hooks(self, model: CheckedModel, parallel: Parallel) -> None:
        """Check that a model calls the hooks that halves need, after its trial step.

        Raises:
            PluginContractError: it does not.
        """
        for half in self._halves:
            for method, (effect, hook) in _HOOKS.items():
                is_called = hook.partition(",")[0] in model.called_hooks
                is_here = method != "embedded" or parallel.is_first
                if half.overrides(method) and is_here and not is_called:
                    raise PluginContractError(
                        f"{half.source}: it {effect}, and {model.source} does not call "
                        f"ModelContext.hooks.{hook}"
                    )

    def start(self, blocks: KVBlocks | None) -> dict[str, bytes]:
        """Give the KV cache to the halves that move blocks; return their handshakes, by part.

        Raises:
            HardpointError: one failed.
        """
        handshakes = {}
        for half in self._moving:
            name = f"{half.source}: its start()"
            with faults_as(PluginFaultError, name, passing=(HardpointError,)):
                handshake = half.run("start", blocks)
                if handshake is not None:
                    handshakes[half.name] = handshake
        return handshakes

    def release_blocks(self) -> None:
        """Let the halves that move blocks let go of the KV cache."""
        for half in self._moving:
            half.run("release_blocks")

    def take_blocks(self, blocks: Callable[[], KVBlocks]) -> None:
        """Give the halves that move blocks the KV cache again."""
        for half in self._moving:
            half.run("take_blocks", blocks())

    def begin(self, plan: SchedulerOutput) -> None:
        """Begin a step: the halves for which a plan has data take it."""
        self._forget_step()
        for half in self._in_steps:
            part = plan.part_data.get(half.key)
            if part is not None:
                self._active.append(half)
                users = part.request_ids
                self._users[half.key] = None if users is None else frozenset(users)
                if (known := self._known.get(half.key)) is not None:
                    known.update(plan.num_scheduled_tokens if users is None else users)
                if half.overrides("processed"):
                    self.observer = self._processed
                if half.overrides("begin"):
                    self._run(half, "begin", plan, part.data)
        if plan.total_num_scheduled_tokens:
            self._around = [
                half
                for half in self._active.copy()
                if half.is_in_layers and self._wants_layers(half)
            ]

    def _wants_layers(self, half: BoundWorkerHalf) -> bool:
        return bool(self._run(half, "wants_layers", function=lambda: half.half.wants_layers))

    @property
    def wants_layers(self) -> bool:
        """Whether a half is called in the layers of this step."""
        return bool(self._around)

    def around_layers(self, attend: Attend, weights: AttentionWeights) -> Attend:
        """Return `attend` with the calls of all halves around it, which may call `weights`."""
        for half in [half for half in reversed(self._around) if half.overrides("around_layers")]:
            if half.overrides("take_attention_weights"):
                self._run(half, "take_attention_weights", weights)
            inner = self._run(half, "around_layers", attend)
            if callable(inner):
                attend = inner
        return attend

    @contextmanager
    def in_layers(
        self, hooks: LayerHooks, requests: Sequence[LogitsRequest], starts: Iterable[int]
    ) -> Iterator[None]:
        """Let halves change embeddings and linear layers of a model while the body runs it.

        Args:
            starts: first token of each request, and the number of all tokens.
        """
        users = {
            half: self._rows_of(half, requests, starts)
            for half in self._around
            if any(map(half.overrides, _HOOKS))
        }
        is_called = self._around.__contains__
        functions = is_called, self._run, self._changed, self._leave_out
        calls = LayerCalls(users, int(list(starts)[-1]), *functions)
        with calls.bound(hooks):
            yield

    def _rows_of(
        self, half: BoundWorkerHalf, requests: Sequence[LogitsRequest], starts: Iterable[int]
    ) -> tuple[list[int], StepRows]:
        spans = zip(requests, itertools.pairwise(map(int, starts)), strict=True)
        user_spans = [(x.request_id, *at) for x, at in spans if self._is_user(half, x.request_id)]
        lengths = [end - start for _, start, end in user_spans]
        rows = StepRows([name for name, *_ in user_spans], [0, *itertools.accumulate(lengths)])
        return [row for _, start, end in user_spans for row in range(start, end)], rows

    def after_layers(self) -> None:
        """Notify the halves that all layers of a step are computed."""
        for half in list(self._active):
            if half.overrides("after_layers"):
                self._run(half, "after_layers")

    def hidden(
        self, hidden: torch.Tensor, requests: Sequence[LogitsRequest], starts: Iterable[int]
    ) -> torch.Tensor:
        """Return the hidden states of a step as the halves change them.

        Args:
            hidden: [tokens, hidden_size].
            starts: first token of each request, and the number of all tokens.
        """
        for half in list(self._active):
            if half.overrides("hidden"):
                indices, rows = self._rows_of(half, requests, starts)
                hidden = self._changed(half, "hidden", hidden, indices, rows)
        return hidden

    def logits(self, logits: torch.Tensor, requests: Sequence[LogitsRequest]) -> torch.Tensor:
        """Return the logits of a step, [rows, vocab_size], as the halves change them."""
        for half in list(self._active):
            if half.overrides("logits"):
                rows = enumerate(request.request_id for request in requests)
                users = {row: name for row, name in rows if self._is_user(half, name)}
                logits = self._changed(half, "logits", logits, list(users), list(users.values()))
        return logits

    def _processed(
        self, stage: LogitsStage, logits: torch.Tensor, requests: Sequence[LogitsRequest]
    ) -> None:
        """Show logits to the halves that read them; each gets copies of its rows."""
        for half in list(self._active):
            if half.overrides("processed"):
                names = enumerate(request.request_id for request in requests)
                rows = [row for row, name in names if self._is_user(half, name)]
                if rows:
                    self._run(half, "processed", stage, logits[rows], [requests[i] for i in rows])

    def _is_user(self, half: BoundWorkerHalf, request_id: str) -> bool:
        users = self._users[half.key]
        return users is None or request_id in users

    def _changed(
        self,
        half: BoundWorkerHalf,
        method: str,
        values: torch.Tensor,
        indices: Sequence[int],
        rows: Any,
        before: tuple[Any, ...] = (),
    ) -> torch.Tensor:
        """Return values with the rows of a half as it changed them; it never gets other rows.

        Args:
            values: [rows, ...].
            rows: last argument.
            before: arguments before the values.
        """
        if not indices:
            return values
        selected = values if len(indices) == len(values) else values[list(indices)]
        changed = self._run(half, method, *before, selected, rows)
        if changed is None:
            return values
        if not isinstance(changed, torch.Tensor) or changed.shape != selected.shape:
            expected = f"a tensor {list(selected.shape)} or None"
            self._leave_out(half, method, f"gave {form_of(changed)}, expected {expected}")
            return values
        if len(indices) == len(values):
            return changed.to(values.dtype)
        result = values.clone()
        result[list(indices)] = changed.to(values.dtype)
        return result

    def report(self, output: ModelRunnerOutput) -> None:
        """Add the reports and the faults of the halves to the result of the step."""
        tokens = output.sampled_token_ids
        for half in list(self._active) if self._samples else ():
            if half.overrides("sampled"):
                part_tokens = {name: tokens[name] for name in tokens if self._is_user(half, name)}
                self._run(half, "sampled", part_tokens)
        for half in list(self._active):
            if half.overrides("report"):
                report = self._run(half, "report")
                if report is not None and not isinstance(report, bytes):
                    self._leave_out(half, "report", f"gave {shown(report)}, expected bytes")
                elif report is not None:
                    output.part_reports.setdefault(half.key, {})[self._rank] = report
        output.part_faults.update(self._faults)
        output.is_cache_uncertain |= self._failed_in_layers
        self._forget_step()

    def _forget_step(self) -> None:
        self._active, self._around, self._faults = [], [], {}
        self._failed_in_layers, self.observer = False, None

    def notify(self, method: str, *args: Any) -> None:
        """Call `sleep`, `wake_up` or `weights_changed` of all halves."""
        for half in self._halves:
            if half.overrides(method):
                half.run(method, *args)

    def close(self) -> None:
        """Close all halves."""
        with ExitStack() as stack:
            for half in self._halves:
                stack.callback(half.close)

    def _run(
        self,
        half: BoundWorkerHalf,
        method: str,
        *args: Any,
        function: Callable[..., Any] | None = None,
    ) -> Any:
        """Call a method; leave the half out of the step if it fails."""
        try:
            return half.run(method, *args, function=function)
        except BaseException as cause:
            raise_unless_fault(cause)
            self._leave_out(half, method, f"failed: {describe(cause)}", cause)
            return None

    def _leave_out(
        self, half: BoundWorkerHalf, method: str, defect: str, cause: BaseException | None = None
    ) -> None:
        """Leave a half out of the rest of the step."""
        half.state.log()
        message = f"its {method}() {defect}"
        begins = method == "begin" and half.is_in_layers  # its layers are left out, too
        self._failed_in_layers |= begins or method in IN_LAYERS
        if not self._samples:
            raise PluginFaultError(f"{half.source}: {message}") from cause
        self._active.remove(half)
        if half in self._around:
            self._around.remove(half)
        self._faults[half.key] = message


def _run_model(forward: Callable[[ForwardBatch], torch.Tensor], step: ForwardStep) -> torch.Tensor:
    return forward(step.batch)


def _run_around(half: BoundWorkerHalf, forward: Forward, step: ForwardStep) -> torch.Tensor:
    """Return the hidden states that a half's function gives."""
    hidden = forward(step)
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 2:
        raise half.wrong("around_model", hidden, "in a step, expected hidden states")
    return hidden
