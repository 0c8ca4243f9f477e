"""The logits pipeline: the processors of a step, in order, and the state they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from hardpoint.errors import PluginContractError
from hardpoint.host.boundary.logits.processor_runner import ActiveRows, End, Ends, ProcessorRunner
from hardpoint.host.boundary.logits.rows import ProcessorRows
from hardpoint.host.boundary.parts.worker_parts import LogitsObserver
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.host.system.transfers import select_rows
from hardpoint.plugins import BatchUpdate, LogitsRequest
from hardpoint.plugins.device import to_device
from hardpoint.plugins.requests.stats import PluginMeter
from hardpoint.plugins.sampling import Distribution
from hardpoint.plugins.sampling.logits import FollowsBatch
from hardpoint.plugins.sampling.phases import MASK, MODEL
from hardpoint.toolkit.logits_calls.states import ObservedStates, set_state
from hardpoint.typed import ReadOnlyDict, ReadOnlyList

from .grammar_mask import GrammarMask


class LogitsPipeline:
    """Runs processors in their order. A processor that no row uses costs nothing in a step.

    Args:
        runners: in the order in which they run.
        sampler: keeps the states of the sampler; None without any.
        observed_states: states of requests from before; None if there are none.
        quarantined: by name, why a processor was removed.

    Attributes:
        runners: runners of all processors, in the order in which they run.
        batch_size: rows of the worker's batch.
        observer: called after each stage, in steps that step parts observe; None in others.
    """

    observer: LogitsObserver | None = None

    def __init__(
        self,
        runners: Sequence[ProcessorRunner],
        device: torch.device,
        observed_states: ObservedStates | None = None,
        sampler: ProcessorRunner | None = None,
        quarantined: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.observed_states = ObservedStates() if observed_states is None else observed_states
        self.batch_size = 0
        self._quarantined = quarantined
        self._device = device
        self._active: list[ActiveRows] = []
        self._advancing: list[ProcessorRunner] = []
        self._observing: list[ProcessorRunner] = []
        self._version = 0
        self._sampler: Sequence[ProcessorRunner] = () if sampler is None else (sampler,)
        self.use(runners)

    def use(self, runners: Sequence[ProcessorRunner]) -> None:
        """Run other processors from the next step on, in the order in which they run."""
        self.runners = runners
        self._keeping = (*runners, *self._sampler)
        # Those that follow the batch's rows, in use or not.
        self._batch_followers = [
            runner
            for runner in runners
            if runner.has_device_state or isinstance(runner.processor, FollowsBatch)
        ]
        self._timed = [runner for runner in runners if runner.slow_seconds]
        self._requests: list[LogitsRequest] = []  # what follows from the rows is derived again

    def runner(self, name: str, generation: int) -> ProcessorRunner | None:
        """Return the runner of a name that requests of a generation use; None without one."""
        for runner in self._keeping:
            if runner.name == name and runner.serves(generation):
                return runner
        return None

    def why_missing(self, name: str) -> str:
        """Return why no runner has a name: the frontend accepted a request that uses it."""
        if why := self._quarantined.get(name):
            return f"the plugin is quarantined: {why}"
        return "no logits processor of that name is enabled"

    def _runner_of(self, name: str, request: LogitsRequest) -> ProcessorRunner:
        runner = self.runner(name, request.generation)
        assert runner is not None, "its arguments were converted for it"
        return runner

    def meters(self) -> dict[str, PluginMeter]:
        """Return the cost of each processor so far, by name; of several, of the latest one."""
        self._end_step()
        latest = sorted(self.runners, key=lambda runner: runner.since)
        return {runner.name: runner.meter for runner in latest}

    def start(self, request: LogitsRequest, observed: Sequence[float] = ()) -> End | None:
        """Build the states of a request that got its row; return the end of the request, if any.

        Args:
            request: with its output tokens.
            observed: logprobs of the tokens that another engine has sampled.
        """
        for name in request.arguments:
            runner = self._runner_of(name, request)
            try:
                with runner.measured("start"):
                    if runner.observes:
                        state = self.observed_states.start(runner.processor, request, observed)
                        set_state(request.state, name, state)
                    elif runner.has_state:
                        set_state(request.state, name, runner.processor.start(request))
                    if runner.has_device_state:
                        runner.device_state.start(request)
            except BaseException as cause:
                return runner.end("start", cause)
        return None

    def update(
        self, update: BatchUpdate | None, full_update: Callable[[], BatchUpdate] | None = None
    ) -> None:
        """Pass the changes of the batch on; called in every step, before the model runs.

        Args:
            update: changes since the last step, None without any.
            full_update: returns the batch as if every request had just been added.
        """
        self._end_step()
        if update is not None:
            self.batch_size = update.batch_size
        for runner in self._batch_followers:
            runner.update(update, full_update)

    def masked(
        self, logits: torch.Tensor, requests: Sequence[LogitsRequest], mask: GrammarMask | None
    ) -> torch.Tensor:
        """Apply a mask, if there is one, in place; return the logits. A pass begins with it."""
        if self.observer is not None:
            self.observer(MODEL, logits, requests)
        if mask is not None:
            mask.apply(logits)
            if self.observer is not None:
                self.observer(MASK, logits, requests)
        return logits

    def apply(self, logits: torch.Tensor, requests: list[LogitsRequest]) -> torch.Tensor:
        """Run the processors, each on all of its rows at once.

        Args:
            logits: float32 [rows, vocab]; may be edited in place.
            requests: one per row; a request that left the batch and came back is a new object.

        Raises:
            ProcessorError: a processor failed; `logits` may be damaged.
        """
        for rows in self.active_rows(requests):
            logits = rows.run(logits, self.batch_size)
            if self.observer is not None:
                self.observer(rows.runner.stage, logits, requests)
        return logits

    def active_rows(self, requests: list[LogitsRequest]) -> Sequence[ActiveRows]:
        """Return the rows of each processor that one of a step's requests uses, in order."""
        if requests != self._requests:  # compares identities: LogitsRequest has no equality
            self._version += 1
            self._requests = list(requests)
            used = {name for request in requests for name in request.arguments}
            runners = [runner for runner in self._keeping if runner.name in used]
            self._advancing = [runner for runner in runners if runner.advances]
            self._observing = [runner for runner in runners if runner.observes]
            active = [runner.active_rows(requests, self._version) for runner in runners]
            self._active = [rows for rows in active if rows is not None]
        return self._active

    def single_row(self, runner: ProcessorRunner, request: LogitsRequest) -> ActiveRows | None:
        """Return a step of one request for a processor, None if the request does not use it."""
        self._version += 1  # processors cache by version
        return runner.active_rows([request], self._version)

    def advance(
        self, requests: Sequence[LogitsRequest], tokens: Sequence[int], device_ids: torch.Tensor
    ) -> Ends:
        """Advance the states of each request by its new token; return the ends of requests.

        Args:
            requests: requests of the last `apply` that got a token.
            tokens: on the host.
            device_ids: the same on the device, int64 [requests].
        """
        if requests != self._requests:
            self._requests = []  # some grew and some did not: the rows' version has to change
        faults: Ends = {}
        for runner in self._advancing:
            self._advance_host(runner, requests, tokens, faults)
        for runner in self._batch_followers:
            if runner.has_device_state:
                faults.update(self._advance_device(runner, requests, device_ids))
        return faults

    def observing_rows(self, requests: Sequence[LogitsRequest]) -> list[int]:
        """Return the rows of the last `apply` with requests that use an observing processor."""
        if not self._observing:
            return []
        return [
            row
            for row, request in enumerate(requests)
            if any(runner.is_used_by(request) for runner in self._observing)
        ]

    @property
    def wants_distribution(self) -> bool:
        """Whether a processor of the last `apply` observes distributions."""
        return any(runner.wants_distribution for runner in self._observing)

    def observe(
        self, requests: Sequence[LogitsRequest], tokens: Sequence[int], seen: Sequence[Distribution]
    ) -> Ends:
        """Carry on the states that depend on logits by each request's new token.

        Args:
            requests: requests of the rows of `observing_rows` that got a token, their last one.
            tokens: on the host.

        Returns:
            The requests that end.
        """
        faults: Ends = {}
        for runner in self._observing:
            name, observe = runner.name, runner.observe
            with runner.measured("observe"):
                for request, token, distribution in zip(requests, tokens, seen, strict=True):
                    if name not in request.state or not runner.serves(request.generation):
                        continue
                    if request.request_id in faults:
                        continue
                    try:
                        state = observe(request.state[name], token, distribution)
                        self.observed_states.record(runner.processor, request, state)
                        set_state(request.state, name, state)
                    except BaseException as cause:
                        faults[request.request_id] = runner.end("observe", cause)
        return faults

    def followed_by(self, requests: Sequence[LogitsRequest]) -> str | None:
        """Return a processor of some requests that follows the batch; None if there is none."""
        for runner in self._batch_followers:
            follows = isinstance(runner.processor, FollowsBatch)
            if follows and any(runner.is_used_by(request) for request in requests):
                return runner.name
        return None

    def check_drafts(self) -> None:
        """Raise if a processor is on that does not support draft tokens.

        Raises:
            PluginContractError: names the processor.
        """
        for runner in self.runners:
            if not runner.processor.supports_drafts:
                raise PluginContractError(
                    f"{runner.source}: it does not declare supports_drafts, so it cannot be on "
                    f"together with speculation"
                )

    def observes(self, requests: Sequence[LogitsRequest]) -> bool:
        """Return whether a processor of one of the requests observes."""
        observing = [runner for runner in self._keeping if runner.observes]
        return any(runner.is_used_by(request) for runner in observing for request in requests)

    def fork(
        self, source: LogitsRequest, draft: int, row: int, seen: Distribution | None = None
    ) -> LogitsRequest:
        """Return a view of a request after a draft token, with copies of its states.

        Args:
            source: the request, or its view after the drafts before.
            row: row that `fork_device_state` will fill.
            seen: distribution of the token, for processors that observe; None without such ones.
        """
        view = replace(
            source,
            output_token_ids=ReadOnlyList([*source.output_token_ids, draft]),
            row=row,
            draft_of=source.draft_of or source,
            state=ReadOnlyDict(),
        )
        for name, state in source.state.items():
            runner = self._runner_of(name, source)
            processor = runner.processor
            if runner.observes:
                assert seen is not None, "rows of processors that observe run in turn"
                state = runner.observe(processor.fork(state), draft, seen)
            elif runner.advances:
                state = processor.advance(processor.fork(state), draft)
            set_state(view.state, name, state)
        return view

    def fork_device_state(self, forks: Sequence[tuple[LogitsRequest, LogitsRequest, int]]) -> None:
        """Fill the device state of draft views.

        Args:
            forks: for each view, in the order of drafts: what it was forked from, the view, and the
                draft token.
        """
        for runner in self._batch_followers:
            if not runner.has_device_state:
                continue
            for source, view, token in forks:
                runner.device_state.copy_to_scratch([(source, view)])
                self._advance_device(runner, [view], to_device([token], self._device))

    def _end_step(self) -> None:
        for runner in self._timed:
            if runner.meter.seconds != runner.seconds_before:
                runner.end_step()

    def _advance_host(
        self,
        runner: ProcessorRunner,
        requests: Sequence[LogitsRequest],
        tokens: Sequence[int],
        faults: Ends,
    ) -> None:
        name, advance = runner.name, runner.processor.advance
        with runner.measured("advance"):
            for request, token in zip(requests, tokens, strict=True):
                state = request.state
                if name not in state or not runner.serves(request.generation):
                    continue
                if not faults or request.request_id not in faults:
                    try:
                        set_state(state, name, advance(state[name], token))
                    except BaseException as cause:
                        faults[request.request_id] = runner.end("advance", cause)

    def _advance_device(
        self, runner: ProcessorRunner, requests: Sequence[LogitsRequest], device_ids: torch.Tensor
    ) -> Ends:
        indices = [i for i, request in enumerate(requests) if runner.is_used_by(request)]
        if not indices:
            return {}
        users = [requests[index] for index in indices]
        tokens = select_rows(device_ids, indices)
        self._version += 1
        rows = ProcessorRows(runner.name, users, self._version, self._device, runner.device_state)
        try:
            with runner.measured("advance_rows"):
                runner.device_state.advance(
                    users, lambda tensors: runner.processor.advance_rows(rows, tokens, tensors)
                )
        except BaseException as cause:
            raise_unless_fault(cause)
            if len(users) == 1:
                return {users[0].request_id: runner.fault("advance_rows", cause)}
            faults: Ends = {}
            for index, request in zip(indices, users, strict=True):  # to find the one at fault
                faults |= self._advance_device(runner, [request], device_ids[index : index + 1])
            return faults
        return {}
