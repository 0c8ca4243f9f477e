"""The logits pipeline: runs the processors of a step, and finds the guilty when one fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hardpoint.plugins import BatchLogitsProcessor, BatchUpdate, LogitsRequest, RequestFault
from hardpoint.plugins.errors import PluginContractError
from hardpoint.plugins.stats import PluginMeter

from .rows import ProcessorRows
from .processor_runner import Share, Stage, StageFault, row_is_sound

Faults = dict[str, RequestFault]
"""Requests that cannot go on, by id."""


class LogitsPipeline:
    """Runs processors in their order. One that no row uses costs nothing in a step."""

    def __init__(self, stages: Sequence[Stage], device: torch.device) -> None:
        """`stages` are in the order in which they run."""
        self.stages = stages
        self._device = device
        self._by_name = {stage.name: stage for stage in stages}
        self._whole_batch = [
            stage
            for stage in stages
            if stage.device_state or isinstance(stage.processor, BatchLogitsProcessor)
        ]
        self._shares: list[Share] = []
        self._advancing: list[Stage] = []
        self._members: list[LogitsRequest] = []
        self._version = 0
        self._batch_size = 0

    def meters(self) -> dict[str, PluginMeter]:
        """Return what each processor cost so far, by name."""
        return {stage.name: stage.meter for stage in self.stages}

    def fault(self, name: str, what: str, cause: Exception) -> RequestFault:
        """Return the fault of a request whose arguments a processor could not take.

        Args:
            name: of the processor.
            what: of it failed.
        """
        return self._by_name[name].fault(what, cause)

    def start(self, request: LogitsRequest) -> RequestFault | None:
        """Build the states of a request that took its row; return who failed to."""
        for name in request.arguments:
            stage = self._by_name[name]
            try:
                with stage.measured():
                    if stage.has_state:
                        request.state[name] = stage.processor.start(request)
                    if stage.device_state:
                        stage.device_state.start(request)
            except Exception as cause:
                return stage.fault("start", cause)
        return None

    def update(
        self, update: BatchUpdate | None, whole: Callable[[], BatchUpdate] | None = None
    ) -> None:
        """Tell batch-level processors what changed; to be done each step, before the model.

        Args:
            update: what changed since the last step.
            whole: gives the batch as it is now, as if all of it had just been added.
        """
        if update is not None:
            self._batch_size = update.batch_size
        for stage in self._whole_batch:
            stage.update(update, whole)

    def advance(
        self, requests: Sequence[LogitsRequest], tokens: Sequence[int], device_ids: torch.Tensor
    ) -> Faults:
        """Carry states over one more token per request.

        Args:
            requests: those that got a token, of the rows of the last `apply`.
            tokens: on the host.
            device_ids: the same, int64 [requests].
        """
        if requests != self._members:
            self._members = []  # some grew and some did not: the rows' version has to change
        faults: Faults = {}
        for stage in self._advancing:
            self._advance_host(stage, requests, tokens, faults)
        for stage in self._whole_batch:
            if stage.device_state:
                faults.update(self._advance_device(stage, requests, device_ids))
        return faults

    def check_drafts(self) -> None:
        """Refuse draft tokens together with batch-level processors that do not support them.

        Raises:
            PluginContractError: naming them.
        """
        for stage in self.stages:
            processor = stage.processor
            if isinstance(processor, BatchLogitsProcessor) and not processor.supports_drafts:
                raise PluginContractError(
                    f"{stage.source}: it works on the whole batch and does not declare "
                    f"supports_drafts, so it cannot be on together with speculation"
                )

    def fork(self, request: LogitsRequest, drafts: Sequence[int], row: int) -> LogitsRequest:
        """Return a request as it would be after draft tokens, with states of its own.

        Device state is not filled; `row` is where it shall be.
        """
        view = LogitsRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=[*request.output_token_ids, *drafts],
            params=request.params,
            stop_token_ids=request.stop_token_ids,
            child_index=request.child_index,
            arguments=request.arguments,
            row=row,
            draft_of=request,
        )
        for name, state in request.state.items():
            processor = self._by_name[name].processor
            forked = processor.fork(state) if self._by_name[name].advances else state
            for token in drafts if self._by_name[name].advances else ():
                forked = processor.advance(forked, token)
            view.state[name] = forked
        return view

    def fork_device_state(self, views: Sequence[LogitsRequest], drafts: Sequence[int]) -> None:
        """Fill the device state of draft views from their requests.

        Args:
            views: of draft positions, in order within each request; the first of a request stands
                for its first draft.
            drafts: the draft token that each view adds to the one before it.
        """
        for stage in self._whole_batch:
            if not stage.device_state:
                continue
            before: LogitsRequest | None = None
            for view, token in zip(views, drafts, strict=True):
                follows = before is not None and before.draft_of is view.draft_of
                source = before if follows else view.draft_of
                assert source is not None, "a draft view stands for a request"
                stage.device_state.copy_to_scratch([(source, view)])
                self._advance_device(stage, [view], torch.tensor([token], device=self._device))
                before = view

    def apply(
        self,
        logits: torch.Tensor,
        requests: list[LogitsRequest],
        isolated: dict[str, Exception | None],
        faults: Faults,
        *,
        checking: bool = False,
    ) -> torch.Tensor:
        """Run the processors.

        Args:
            logits: float32 [rows, vocab]; may be edited in place.
            requests: one per row; a request that left the batch and came back is a new object.
            isolated: processors to run row by row, because running them together failed or did
                damage; with what they raised then.
            faults: takes the requests for which an isolated processor fails. Their rows are left.
            checking: look at the rows after each batch-level processor: a row that it spoils is its
                fault, for all others have been tried alone and were cleared.

        Raises:
            StageFault: a processor that is not isolated failed; `logits` may be damaged.
        """
        if requests != self._members:  # compares identities: LogitsRequest has no equality
            self._activate(requests)
        for share in self._shares:
            if share.stage.name in isolated:
                self._run_apart(share, logits, isolated[share.stage.name], faults)
            else:
                logits = share.run(logits, self._batch_size)
                if checking and isinstance(share.stage.processor, BatchLogitsProcessor):
                    _blame_batch_level(share, logits, faults)
        return logits

    def culprit(self, logits: torch.Tensor, request: LogitsRequest) -> RequestFault | None:
        """Find who spoils a row, by processing it alone.

        Args:
            logits: float32 [vocab], as the model gave them.
            request: whose row it is.

        Returns:
            The fault; None if the row stays sound. Batch-level processors are not tried: they
            cannot run on one row.
        """
        if not row_is_sound(logits):
            return RequestFault("the model gave logits that are NaN, infinite or all -inf")
        row = logits.unsqueeze(0).clone()
        ran: list[str] = []
        for stage in self.stages:
            single = self._alone(stage, request)
            if single is None or isinstance(stage.processor, BatchLogitsProcessor):
                continue
            try:
                row = single.run(row, 1)
            except StageFault as fault:
                return stage.fault(stage.what, fault.cause)
            if not row_is_sound(row[0]):
                return stage.fault(stage.what, _damage(row[0], ran))
            ran.append(stage.name)
        return None

    def suspects(self, request: LogitsRequest) -> list[str]:
        """Return the names of the processors of a request that can run row by row."""
        return [
            stage.name
            for stage in self.stages
            if stage.name in request.arguments
            and not isinstance(stage.processor, BatchLogitsProcessor)
        ]

    def _activate(self, requests: list[LogitsRequest]) -> None:
        """Find who uses what; done only when the rows change."""
        self._version += 1
        self._members = list(requests)
        used = {name for request in requests for name in request.arguments}
        stages = [stage for stage in self.stages if stage.name in used]
        self._advancing = [stage for stage in stages if stage.advances]
        shares = (stage.share(requests, self._version) for stage in stages)
        self._shares = [share for share in shares if share is not None]

    def _alone(self, stage: Stage, request: LogitsRequest) -> Share | None:
        """Return a stage's share in a step of one request; its version is new, for caches."""
        self._version += 1
        return stage.share([request], self._version)

    def _run_apart(
        self, share: Share, logits: torch.Tensor, raised: Exception | None, faults: Faults
    ) -> None:
        """Run a stage row by row; a row for which it fails is left as it was."""
        stage = share.stage
        whole_batch = isinstance(stage.processor, BatchLogitsProcessor)
        for row, request in zip(share.batch_rows, share.rows.requests, strict=True):
            if request.request_id in faults:
                continue
            if whole_batch:  # it knows rows, not requests: all of its users are affected
                what = "update_state" if stage.broken is not None else "apply"
                faults[request.request_id] = stage.fault(what, raised or "its result is unusable")
                continue
            single = self._alone(stage, request)
            assert single is not None  # it is one of the stage's own rows
            try:
                logits[row] = single.run(logits[row : row + 1].clone(), 1)[0]
            except StageFault as fault:
                faults[request.request_id] = stage.fault(stage.what, fault.cause)

    def _advance_host(
        self,
        stage: Stage,
        requests: Sequence[LogitsRequest],
        tokens: Sequence[int],
        faults: Faults,
    ) -> None:
        name, advance = stage.name, stage.processor.advance
        with stage.measured():
            for request, token in zip(requests, tokens, strict=True):
                state = request.state
                if name in state and (not faults or request.request_id not in faults):
                    try:
                        state[name] = advance(state[name], token)
                    except Exception as cause:
                        faults[request.request_id] = stage.fault("advance", cause)

    def _advance_device(
        self, stage: Stage, requests: Sequence[LogitsRequest], device_ids: torch.Tensor
    ) -> Faults:
        places = [i for i, request in enumerate(requests) if stage.name in request.arguments]
        if not places:
            return {}
        own = [requests[place] for place in places]
        tokens = device_ids[torch.tensor(places, device=self._device)]
        self._version += 1
        rows = ProcessorRows(stage.name, own, self._version, self._device, stage.device_state)
        try:
            with stage.measured():
                stage.device_state.advance(
                    own, lambda tensors: stage.processor.advance_rows(rows, tokens, tensors)
                )
        except Exception as cause:
            if len(own) == 1:
                return {own[0].request_id: stage.fault("advance_rows", cause)}
            faults: Faults = {}
            for place, request in zip(places, own, strict=True):  # which of them is it?
                faults |= self._advance_device(stage, [request], device_ids[place : place + 1])
            return faults
        return {}


def _blame_batch_level(share: Share, logits: torch.Tensor, faults: Faults) -> None:
    for row, request in zip(share.batch_rows, share.rows.requests, strict=True):
        if request.request_id not in faults and not row_is_sound(logits[row]):
            faults[request.request_id] = share.stage.fault("apply", _damage(logits[row], ()))


def _damage(row: torch.Tensor, ran: Sequence[str]) -> str:
    """Say what is wrong with a row, and who ran before."""
    if bool(row.isnan().any()):
        return "it made logits NaN"
    if bool((row == torch.inf).any()):
        return "it made logits infinite"
    after = f", after {', '.join(ran)}" if ran else ""
    return f"it left no token to choose{after}"
