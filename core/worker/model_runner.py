"""The model runner: executes a plan on the persistent batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hardpoint.core.worker.sampling.draft_rows import DraftRows, planned_drafts
from hardpoint.core.worker.sampling.grammar_mask import GrammarMask
from hardpoint.core.worker.sampling.logprobs import Float32Rows, prompt_logprobs
from hardpoint.core.worker.sampling.processors import Converted
from hardpoint.core.worker.sampling.sampling_stage import SamplingStage
from hardpoint.host.boundary.activity import PluginCalls
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.host.boundary.checked_model import CheckedModel
from hardpoint.host.boundary.logits.processor_runner import Ends
from hardpoint.host.boundary.parts.worker_parts import WorkerParts
from hardpoint.plugins import (
    ForwardBatch,
    GrammarBitmask,
    LogitsRequest,
    ModelRunnerOutput,
    NewRequest,
    Ops,
    RequestFault,
    SchedulerOutput,
)
from hardpoint.plugins.device import to_device
from hardpoint.plugins.process.executor import LateOutput
from hardpoint.plugins.requests.stats import PluginMeter
from hardpoint.plugins.worker_half import AllocatedCache, Forward, ForwardStep
from hardpoint.toolkit.batches.groups import combine_groups, copy_to_members
from hardpoint.toolkit.kv_blocks.releases import StepWeights
from hardpoint.typed import ReadOnlyDict, ReadOnlyList, read_only

from .input_batch import InputBatch, StepInput
from .late_tokens import LateTokens
from .ranks import Ranks

_Pending = tuple[SchedulerOutput, StepInput, torch.Tensor, torch.Tensor | None]
"""Plan, tokens, hidden states and experts of a step whose tokens are not sampled yet."""


class ModelRunner:
    """Runs the model over a plan's tokens, and samples for each sequence that it completed.

    Attributes:
        model: model with loaded weights.
        ops: operations of its layers.
        attention: backend of them.
        parts: the worker halves of step parts.
        on_forward: see `WorkerLaunch`; called before step parts begin, which may wait for loads.
    """

    def __init__(
        self,
        model: CheckedModel,
        calls: PluginCalls,
        attention: CheckedAttention,
        ops: Ops,
        sampling: SamplingStage | None,  # None in a rank that does not sample
        ranks: Ranks,
        device: torch.device,
        finish_late: Callable[[Callable[[], ModelRunnerOutput]], ModelRunnerOutput],
    ) -> None:
        """Run a model, with `finish_late` for the late end of a step."""
        self.model = model
        self._calls, self.attention = calls, attention
        self._sampling, self._ranks = sampling, ranks
        # Read in every step, of which the shortest take 0.1 ms.
        self._are_many, self._is_last = ranks.are_many, ranks.parallel.is_last
        self._divides_logits = ranks.parallel.tensor.size > 1
        self._has_experts = model.routed_experts is not None
        self.ops, self._device, self._finish_late = ops, device, finish_late
        self._allocated: InputBatch | None = None
        self._caches: list[Any] = []
        self.parts = WorkerParts()
        self.on_forward: Callable[[], None] | None = None
        self._around_model: Forward | None = None
        self._float32_rows = Float32Rows()
        self._pending: _Pending | None = None
        self._late: tuple[LateTokens, LateOutput] | None = None
        self._over: set[LogitsRequest] = set()  # with the last tokens
        self._broken: Ends = {}  # could not start; not reported yet
        self._pooled: set[str] = set()  # requests that get no token

    def use_parts(self, parts: WorkerParts) -> None:
        """Call the worker halves of step parts from now on."""
        self.parts = parts
        self._around_model = parts.around_model(self.model.forward)

    def block_views(self, user: str) -> list[list[torch.Tensor]]:
        """Return the views of each layer's cache, see `KVBlocks`; `user` needs them."""
        return self.parts.with_memory(self.attention.block_views(self._caches, user))

    def allocate(self, num_blocks: int, batch: InputBatch) -> None:
        """Allocate the KV cache of every layer, and use `batch`, with block tables of it."""
        self._allocated = batch
        self.restore_cache(num_blocks)

    def drop_cache(self) -> None:
        """Release the KV cache. No step can run until `restore_cache`."""
        self.parts.cache_released()
        self.forget_cache()

    def forget_cache(self) -> None:
        """Forget the KV cache; no worker half of a step part uses it any more."""
        self._caches, self._float32_rows = [], Float32Rows()

    def restore_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache of every layer, without content."""
        self._caches = self.attention.allocate(num_blocks)
        batch, attend = self._batch, functools.partial(self.attention.of_step, self._caches)
        self.parts.cache_allocated(
            AllocatedCache(
                attend,
                batch.max_model_len,
                batch.block_size,
                batch.num_groups,
                num_blocks,
                self.attention.group_of,
                [group.window for group in self.attention.groups],
            )
        )

    @property
    def has_batch(self) -> bool:
        """Whether `allocate` was called."""
        return self._allocated is not None

    @property
    def _batch(self) -> InputBatch:
        assert self._allocated is not None, "allocate() comes first"
        return self._allocated

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model; return None if `sample` has to follow."""
        batch = self._batch
        self._apply(plan, batch)
        if plan.finished_request_ids:
            self.parts.finished(plan.finished_request_ids)
        if has_parts := bool(plan.part_data or self.parts):
            if self.on_forward is not None:
                self.on_forward()
            self.parts.begin(plan)
        if plan.total_num_scheduled_tokens == 0:
            return self._with_reports(ModelRunnerOutput())
        step = batch.prepare(plan.num_scheduled_tokens, self._device, plan.draft_token_ids)
        before = None
        if self._are_many:
            before = self._ranks.receive_hidden(self.model.empty_hidden(len(step.token_ids)))
        elif not (has_parts or plan.draft_token_ids or self._ranks.parallel.engines.size > 1):
            step.needed = step.read_tokens(self._device)
        routed = self._receive_experts(step) if self._has_experts else None
        hidden = self._forward(step, before, routed)
        if has_parts and self._late is None:  # else when the step is not to be run again
            hidden = self._after_layers(step, hidden)
        if not self._is_last:
            self._ranks.send_hidden(hidden)
            if routed is not None:
                self._ranks.send_hidden(routed)
        self._pending = (plan, step, hidden, routed)
        return None

    def _forward(
        self,
        step: StepInput,
        before: torch.Tensor | None,
        routed: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the hidden states of a step; a repeated step overwrites earlier ones.

        Args:
            before: hidden states of the stage before.
            routed: gets the experts of the tokens.
        """
        if not self.parts.wants_layers:
            needs_model = routed is not None or step.token_types is not None
            return self._run(step, before, routed, needs_model=needs_model)
        with self.parts.in_layers(self.model.hooks, step.requests, step.query_starts):
            return self._run(step, before, routed, needs_model=True)

    def _run(
        self,
        step: StepInput,
        before: torch.Tensor | None,
        routed: torch.Tensor | None,
        *,
        needs_model: bool,
    ) -> torch.Tensor:
        inputs = functools.partial(self._inputs, step, before, routed)
        if self._around_model is None:
            return self._calls.run("forward", lambda: self.model.forward(inputs()))
        if self.on_forward is not None:
            self.on_forward()
        around = ForwardStep(inputs, step.packed, step, needs_model=needs_model)
        return self._calls.run("forward", self._around_model, around)

    def _inputs(
        self, step: StepInput, before: torch.Tensor | None, routed: torch.Tensor | None
    ) -> ForwardBatch:
        attend = self.attention.of_step(self._caches, step.attention)
        if self.parts.wants_layers:
            inputs = self.attention, self._caches, step.attention, step.requests
            attend = self.parts.around_layers(attend, StepWeights(*inputs))
        if self.on_forward is not None:
            self.on_forward()
        types, recur = step.token_types, self.attention.recurrence(self._caches, step.attention)
        tensors = step.token_ids, step.positions, attend, before, routed, types, recur
        return ForwardBatch(*tensors, needed=step.needed)

    def _after_layers(self, step: StepInput, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.parts.hidden(hidden, step.requests, step.query_starts)
        self.parts.after_layers()
        return hidden

    def _with_reports(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        if self.parts:
            self.parts.report(output)
        return output

    def _receive_experts(self, step: StepInput) -> torch.Tensor | None:
        size, ranks = self.model.routed_experts, self._ranks
        is_asked = any(request.params.routed_experts for request in step.requests)
        if size is None or not is_asked or ranks.parallel.tensor.rank:  # all ranks choose the same
            return None
        shape = len(step.token_ids), *size
        routed = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        return routed if ranks.parallel.is_first else ranks.receive_hidden(routed)

    @torch.inference_mode()
    def sample(
        self, bitmask: GrammarBitmask | None = None, *, overlaps: bool = False
    ) -> ModelRunnerOutput | LateOutput | None:
        """Sample from the hidden states that `execute` computed.

        Args:
            overlaps: whether the next step may be launched before the tokens are on the host.

        Returns:
            The result; in a rank that does not sample, None or the reports of its step parts.
        """
        assert self._pending is not None, "sample() without an execute() that returned None"
        (plan, step, hidden, routed), self._pending = self._pending, None
        if self._sampling is None:
            self._help_to_sample(hidden, step.requests)
            if self.parts.moves_blocks is None:
                return None
            return self._with_reports(ModelRunnerOutput())
        self._sampling.pipeline.observer = self.parts.observer
        output = self._new_output()
        if any(request.params.prompt_logprobs is not None for request in step.requests):
            logits_of = functools.partial(self._logits, hidden)
            output.prompt_logprobs = prompt_logprobs(step, self._device, logits_of)
        if routed is not None:
            output.routed_experts = step.experts_by_request(routed)
        batch, samples, over = self._batch, step.samples, self._over
        groups = batch.groups
        if (skipped := output.faults.keys() | self._pooled) or over or groups.by_leader:
            samples = step.samples_without(skipped, over | groups.members)
            self._over = set()
        if len(indices := samples.nonzero()[0]):
            last = step.query_starts[1:][indices] - 1
            requests = [step.requests[index] for index in indices.tolist()]
            if plan.draft_token_ids:
                self._verify(hidden, last.tolist(), requests, (plan, step), output, bitmask)
            else:
                rows = groups.with_rows(requests, last, step) if groups.by_leader else last
                read = None if groups.by_leader else step.needed
                is_read = read is not None and len(read) == len(rows)
                index = read if read is not None and is_read else to_device(rows, self._device)
                late = self._choose(
                    batch, hidden, index, requests, output, bitmask, overlaps=overlaps
                )
                if late is not None:
                    return late
        if self._divides_logits:
            self._end_division(step, output)
        return self._with_reports(output)

    def _new_output(self) -> ModelRunnerOutput:
        output = ModelRunnerOutput()
        if self._broken:
            output.end(self._broken)
            self._broken = {}
        return output

    def _end_division(self, step: StepInput, output: ModelRunnerOutput) -> None:
        """Let the ranks that compute parts of the logits go on."""
        self._ranks.ask_for_logits(torch.empty(0, dtype=torch.int64, device=self._device))
        if self._ranks.shares_tokens:
            sampled = output.sampled_token_ids
            tokens = [sampled.get(request.request_id, ()) for request in step.requests]
            self._ranks.share_tokens(tokens, self._device)

    def _help_to_sample(self, hidden: torch.Tensor, requests: Sequence[LogitsRequest]) -> None:
        if not self._is_last:
            return
        while (rows := self._ranks.asked_for_logits(self._device)) is not None:
            self._calls.run("compute_logits", self.model.compute_logits, hidden[rows])
        if self._ranks.shares_tokens:
            shared = self._ranks.shared_tokens(self._device)
            for request, tokens in zip(requests, shared, strict=True):
                for token in tokens:
                    self._batch.append(request.request_id, token)

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return the time and the faults of each logits processor so far, by name."""
        return {} if self._sampling is None else self._sampling.pipeline.meters()

    def _choose(
        self,
        batch: InputBatch,
        hidden: torch.Tensor,
        last: torch.Tensor,
        requests: list[LogitsRequest],
        output: ModelRunnerOutput,
        bitmask: GrammarBitmask | None,
        *,
        overlaps: bool,
    ) -> LateOutput | None:
        """Sample a token per request on the device; return the output if its tokens come later.

        A processor that follows the batch gets the update of the next step after these tokens.

        Args:
            last: int64 [requests]; the row of each request's last token.
        """
        assert self._sampling is not None
        if overlaps := overlaps and not self._are_many:
            follower = self._sampling.pipeline.followed_by(requests)
            # A step that runs again would advance states a second time.
            states = "" if self.attention.states is None else self.model.source.name
            output.waited_for = self.parts.reads_tokens or follower or states
            overlaps = not output.waited_for
        if overlaps and (self._around_model is not None or batch.groups.by_leader):
            # The next step overwrites hidden states, and may have no groups.
            hidden, last = hidden[last], torch.arange(len(last), device=self._device)
        ids, copy, finish = self._sampling.launch(
            self._with_parts(self._logits(hidden, last), requests),
            requests,
            lambda: self._new_logits(hidden, last, requests),
            None if bitmask is None else GrammarMask(bitmask, requests, self.ops),
        )
        batch.append_late(requests, ids)
        late = LateTokens(requests, output, ids, finish)
        if not overlaps:
            self._finish(late)
            return None
        self._with_reports(output)
        finish_late = functools.partial(self._finish_late, functools.partial(self._finish, late))
        self._late = late, LateOutput(copy.is_complete, finish_late)
        return self._late[1]

    @torch.inference_mode()
    def _finish(self, late: LateTokens) -> ModelRunnerOutput:
        """Wait for the tokens of a step; if others replace them, run the next step again."""
        assert self._sampling is not None
        self._late = None
        tokens, are_replaced = late.distribute(self._batch, self._sampling.pipeline)
        if self._pending is not None:
            self._over = late.over(tokens)
            plan, step, hidden, routed = self._pending
            if are_replaced:
                step.replace_last(tokens)
                hidden = self._forward(step, None, routed)
            if plan.part_data or self.parts:
                hidden = self._after_layers(step, hidden)
            self._pending = plan, step, hidden, routed
        return late.output

    def _verify(
        self,
        hidden: torch.Tensor,
        last: Sequence[int],
        requests: list[LogitsRequest],
        planned: tuple[SchedulerOutput, StepInput],
        output: ModelRunnerOutput,
        bitmask: GrammarBitmask | None,
    ) -> None:
        """Sample a token per draft, too, and append the accepted ones as `_choose` does."""
        assert self._sampling is not None
        assert self.parts.verifier is not None
        drafts, chosen = planned_drafts(planned[0], requests, last)
        owners = [r for r, ids in zip(requests, drafts, strict=True) for _ in range(1 + len(ids))]
        if self._batch.groups.by_leader:
            chosen = self._batch.groups.with_rows(owners, chosen, planned[1])
        index = to_device(chosen, self._device)
        rows = DraftRows(
            requests,
            drafts,
            self._sampling,
            lambda: self._new_logits(hidden, index, owners),
            None if bitmask is None else GrammarMask(bitmask, owners, self.ops),
        )
        accepted = self.parts.verifier.verify_drafts(rows, rows.defect)
        rows.keep(accepted, self._batch.append, output)
        for member, tokens in copy_to_members(requests, output).items():
            for token in tokens:
                self._batch.append(member.request_id, token)

    def _new_logits(
        self, hidden: torch.Tensor, chosen: torch.Tensor, requests: Sequence[LogitsRequest]
    ) -> torch.Tensor:
        """Return float32 logits of chosen rows in memory of their own."""
        logits = self._compute_logits(hidden, chosen).to(torch.float32, copy=True)
        return self._with_parts(logits, requests)

    def _with_parts(self, logits: torch.Tensor, requests: Sequence[LogitsRequest]) -> torch.Tensor:
        if len(logits) > len(requests):  # then come those of members
            logits = combine_groups(logits, requests, self.parts.halves)
        return self.parts.logits(logits, requests) if self.parts else logits

    def _apply(self, plan: SchedulerOutput, batch: InputBatch) -> None:
        if self._late is not None:
            late, result = self._late
            late.ended = plan.finished_request_ids
            if not plan.total_num_scheduled_tokens:  # nothing runs while the tokens come
                result.result()
        batch.remove(plan.finished_request_ids | plan.preempted_request_ids)
        self._pooled -= plan.finished_request_ids
        batch.drop_rejected(plan.cached_requests)
        for sampled in plan.sampled if self._sampling is None else ():  # else by itself
            batch.append_sampled(sampled)
        for request_id, block_ids in plan.cached_requests.new_block_ids.items():
            batch.extend_blocks(request_id, block_ids)
        for request_id, columns in plan.cached_requests.released_columns.items():
            batch.release_columns(request_id, columns)
        if self._sampling is not None:  # before another request may have one of their ids
            states = self._sampling.pipeline.observed_states
            if states.versions:
                states.drop(plan.finished_request_ids)
        for new in plan.new_requests:
            self._add(new, batch, plan.step)
        update = batch.settle()
        if self._sampling is not None:
            self._sampling.pipeline.update(update, batch.full_update)

    def _add(self, new: NewRequest, batch: InputBatch, step: int) -> None:
        source, outputs = new.source, ReadOnlyList(new.output_token_ids)
        converted: Converted = ReadOnlyDict(), None, None
        if self._sampling is not None:
            converted = ReadOnlyDict(), self._sampling.default_arguments, None
            if source.plugin_args or self._sampling.states_key:
                converted = self._sampling.arguments_of(source)
        arguments, sampler_arguments, end = converted
        checked = self.attention.arguments_of(source) if source.plugin_args else (None, None)
        for_attention, end = checked[0], end or checked[1]
        is_grouped = bool(source.members) or source.leader is not None
        request = LogitsRequest(
            request_id=source.request_id,
            prompt_token_ids=ReadOnlyList(source.known_prompt_ids),
            output_token_ids=outputs,
            params=read_only(source.params),
            stop_token_ids=ReadOnlyList(source.stop_token_ids),
            child_index=source.child_index,
            arguments=arguments,
            sampler_arguments=sampler_arguments,
            state=ReadOnlyDict(),
            generation=source.generation,
            group=batch.groups.join(source) if is_grouped else None,
        )
        if is_grouped:
            batch.groups.add(request)
        computed, types = new.num_computed_tokens, source.second_type_start
        batch.add(request, outputs, new.block_ids, computed, step, types, for_attention)
        if new.released_columns:
            batch.release_columns(request.request_id, new.released_columns)
        if source.features:
            batch.add_spans(source)
        if source.pooling_params is not None:
            self._pooled.add(source.request_id)
        if self._sampling is None:
            return
        if source.params.routed_experts and self.model.routed_experts is None:
            end = end or RequestFault("routed_experts: the model is no mixture of experts")
        end = end or self._sampling.pipeline.start(request, source.observed_before)
        if end is not None:
            dict.clear(arguments)  # no processor runs for it until it is reported and removed
            self._broken[request.request_id] = end

    def _logits(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return float32 logits of chosen rows; they may be overwritten by the next call."""
        logits = self._compute_logits(hidden, chosen)
        if logits.dtype == torch.float32 or self._device.type != "cpu":
            return logits.float()
        return self._float32_rows.of(logits)

    def _compute_logits(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        if self._divides_logits:
            self._ranks.ask_for_logits(chosen)
        if len(chosen) < len(hidden) or self._batch.groups.by_leader:  # members come last
            hidden = hidden[chosen]
        return self._calls.run("compute_logits", self.model.compute_logits, hidden)
