"""The worker half of speculation: calls the speculators after each step, with faults caught."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec

from hardpoint.plugins import (
    Arguments,
    DraftRequest,
    EngineConfig,
    LogitsOps,
    NewRequest,
    SchedulerOutput,
    Speculator,
    SpeculatorContext,
)
from hardpoint.plugins.exponential_race import mixed_seed
from hardpoint.plugins.kv_cache import sharing_key
from hardpoint.plugins.step_part import HiddenStates, WorkerMemory, WorkerStep
from hardpoint.plugins.worker_half import WorkerHalfContext
from hardpoint.typed import ReadOnlyList, prepared_type, read_only

from .messages import DraftData, DraftReport
from .requests import KIND
from .verification import DraftVerification

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.step_part.worker_data import StepRows


@dataclass
class Drafted:
    """A request that a speculator drafts for.

    Attributes:
        output: its tokens so far, which speculators read; grows by `list.extend`.
        hidden: hidden states of tokens that were computed since it got one, next to each other.
        hidden_end: position after the last of them.
    """

    request: DraftRequest
    speculator: str
    output: ReadOnlyList[int]
    hidden: list[torch.Tensor] = field(default_factory=list)
    hidden_end: int = 0


class Drafting(DraftVerification, WorkerStep, WorkerMemory):
    """Follows the outputs of requests, and lets their speculators draft."""

    def __init__(self, config: EngineConfig, context: WorkerHalfContext) -> None:
        """Build the speculators.

        Raises:
            PluginError: one cannot be built; the others are closed.
        """
        self._components = context.components
        self._describe = context.describe_fault
        longest = 1 if context.loaded is None else context.loaded.max_model_len
        self._faults: list[tuple[str, str]] = []
        self._failing: set[str] = set()  # speculators that had a fault in this call
        self._speculators: dict[str, Speculator] = {}
        self._arguments: dict[str, type[Arguments]] = {}
        with ExitStack() as undo:
            for name in self._components.enabled(KIND):
                cls = cast(type[Speculator], self._components.find(KIND, name))
                self._arguments[name] = prepared_type(cls)
                speculator = self._components.guarded(
                    KIND,
                    name,
                    SpeculatorContext,
                    functools.partial(self._failed, name),
                    device=context.device,
                    vocab_size=context.vocab_size,
                    hidden_size=context.hidden_size,
                    max_num_seqs=config.scheduler.max_num_seqs,
                    max_model_len=longest,
                    num_draft_tokens=config.speculation.num_draft_tokens,
                    ops=LogitsOps() if context.loaded is None else context.loaded.ops,
                    loaded=context.loaded,
                    open_model=context.open_model,
                    open_head=context.open_head,
                    max_step_tokens=config.scheduler.max_num_batched_tokens,
                    num_layers=context.num_layers,
                )
                undo.callback(self._components.close, speculator)
                self._speculators[name] = speculator
            undo.pop_all()
        self._vocab_size = context.vocab_size
        self._known: dict[str, Drafted] = {}
        self._data = DraftData({})
        self._verified: Mapping[str, Sequence[int]] = {}
        self._report = DraftReport({})

    def _failed(self, name: str, message: str, cause: BaseException | None) -> None:
        self._failing.add(name)
        if cause is not None:
            message += f": {self._describe(cause)}"
        self._faults.append((name, f"{self._components.source(KIND, name)}: its {message}"))

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that the speculators are going to allocate."""
        return {
            f"speculator {name}": speculator.memory()
            for name, speculator in self._speculators.items()
        }

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Take the limits of drafts, and new requests."""
        self._data = msgspec.msgpack.decode(data, type=DraftData)
        self._verified = plan.draft_token_ids
        for new in plan.new_requests:
            request_id = new.source.request_id
            if (name := self._data.started.get(request_id)) and request_id not in self._known:
                self._start(new, name)
        for request_id, tokens in self._data.missed.items():
            if request_id in self._known:
                list.extend(self._known[request_id].output, tokens)

    def _start(self, new: NewRequest, name: str) -> None:
        source, speculator = new.source, self._speculators[name]
        arguments = source.plugin_args.get(f"{KIND}/{name}", {})
        output = ReadOnlyList(new.output_token_ids)
        request = DraftRequest(
            source.request_id,
            ReadOnlyList(source.known_prompt_ids),
            output,
            read_only(source.params),
            msgspec.convert(arguments, self._arguments[name]),
            sharing_key(source),
            mixed_seed(source.params.seed, source.child_index),
        )
        try:
            request.state = speculator.start(request)
        except BaseException as cause:
            self._failed(name, f"start() of request {source.request_id!r} failed", cause)
            self._report.failed.append(source.request_id)
            return
        self._known[source.request_id] = Drafted(request, name, output)

    def sampled(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Append the tokens of the step, and draft the next ones."""
        drafting = self._without_token(token_ids)
        observed: dict[str, list[DraftRequest]] = {}
        for name, tokens in token_ids.items():
            known = self._known.get(name)
            if known is None:
                continue
            speculator = self._speculators[known.speculator]
            self._add_tokens(known, speculator, tokens)
            limit = self._data.limits.get(name, 0)
            if limit or self._always_drafts(known):
                known.request.limit = limit
                drafting.setdefault(known.speculator, []).append(known.request)
            elif speculator.is_quick and name in self._data.observed:
                known.request.limit = 1
                observed.setdefault(known.speculator, []).append(known.request)
        left = self._data.budget
        for speculator_name, requests in drafting.items():
            budget = min(left, sum(request.limit for request in requests))
            left -= self._propose(speculator_name, requests, budget)
        for speculator_name, requests in observed.items():
            self._propose(speculator_name, requests, len(requests))
            for request in requests:
                if drafts := self._report.drafts.pop(request.request_id, None):
                    self._report.observed[request.request_id] = drafts[0]

    def _always_drafts(self, known: Drafted) -> bool:  # noqa: ARG002
        """Return whether a request is shown to its speculator after steps without drafts, too."""
        return False

    def _without_token(
        self,
        token_ids: Mapping[str, Sequence[int]],  # noqa: ARG002
    ) -> dict[str, list[DraftRequest]]:
        """Return the requests without a token that are shown to speculators, by their names."""
        return {}

    def _add_tokens(self, known: Drafted, speculator: Speculator, tokens: Sequence[int]) -> None:
        """Append the tokens of the step, and show them to the speculator."""
        list.extend(known.output, tokens)
        drafts = self._verified.get(known.request.request_id, ())
        if drafts:
            speculator.verified(known.request, tuple(drafts), len(tokens) - 1)
        self._show_hidden(known, len(drafts) + 1 - len(tokens))

    def _show_hidden(self, known: Drafted, rejected: int) -> None:
        """Show hidden states of a request to its speculator, without rejected drafts."""

    def _propose(self, name: str, requests: list[DraftRequest], budget: int) -> int:
        """Let a speculator draft for some requests; a fault leaves them without drafts for good.

        Returns:
            The number of drafts.
        """
        self._failing.discard(name)
        proposals = self._speculators[name].propose(tuple(requests), budget)
        for token in itertools.chain.from_iterable(proposals):
            if not 0 <= token < self._vocab_size:
                expected = f"token ids from 0 to {self._vocab_size - 1}"
                self._failed(name, f"propose() returned {token}, expected {expected}", None)
                break
        if name in self._failing:
            self._report.failed += [request.request_id for request in requests]
            return 0
        left = budget
        for request, drafts in zip(requests, proposals, strict=True):
            if drafts := list(drafts[:left]):
                left -= len(drafts)
                self._report.drafts[request.request_id] = drafts
        return budget - left

    def report(self) -> bytes:
        """Return the drafts and the faults."""
        report, self._report = self._report, DraftReport({})
        report.faults, self._faults = self._faults, []
        return msgspec.msgpack.encode(report)

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        for name in request_ids:
            if (known := self._known.pop(name, None)) is not None:
                self._speculators[known.speculator].ended(known.request)

    def sleep(self, level: int) -> None:
        """Let the speculators release memory."""
        for speculator in self._speculators.values():
            speculator.sleep(level)

    def wake_up(self) -> None:
        """Let the speculators allocate again."""
        for speculator in self._speculators.values():
            speculator.wake_up()

    def close(self) -> None:
        """Close the speculators, and forget them: they report faults to this."""
        speculators, self._speculators = self._speculators, {}
        with ExitStack() as stack:
            for speculator in speculators.values():
                stack.callback(self._components.close, speculator)


class DraftingFromHidden(Drafting, HiddenStates):
    """As `Drafting`, with speculators that read hidden states."""

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Take the limits of drafts, new requests, and where the tokens of the step are."""
        super().begin(plan, data)
        cached = plan.cached_requests
        self._computed = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        self._computed |= {n.source.request_id: n.num_computed_tokens for n in plan.new_requests}

    def hidden(self, hidden: torch.Tensor, rows: StepRows) -> None:
        """Keep the hidden states of the step for speculators that read them."""
        for index, name in enumerate(rows.request_ids):
            known = self._known.get(name)
            if known is not None and self._speculators[known.speculator].needs_hidden:
                start, end = rows.starts[index : index + 2]
                if known.hidden_end != self._computed[name]:
                    known.hidden = []  # a preemption, or a step without data, was in between
                known.hidden.append(self._rows_for(known, hidden, start, end))
                known.hidden_end = self._computed[name] + end - start

    def _rows_for(self, known: Drafted, hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:  # noqa: ARG002
        return hidden[start:end].clone()

    def _show_hidden(self, known: Drafted, rejected: int) -> None:
        import torch  # noqa: PLC0415 - features load without it

        known.request.hidden_start = known.hidden_end - sum(map(len, known.hidden))
        if known.hidden and rejected:
            known.hidden[-1] = known.hidden[-1][:-rejected]
        known.request.hidden = torch.cat(known.hidden) if known.hidden else None
        known.hidden = []
