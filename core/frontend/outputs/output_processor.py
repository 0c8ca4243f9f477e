"""The output processor: from an engine's outputs to users' outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts
from hardpoint.host.boundary.parts.output_formats import AnyOutput, OutputFormats
from hardpoint.host.registry.blame import logged_after
from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    RequestError,
    Tokenizer,
)

from .request_state import ParentRequest, RequestState


@dataclass
class ProcessedOutputs:
    """The result of processing one batch of engine outputs.

    Attributes:
        request_outputs: for the user, each with its request.
        aborts: internal ids of requests that ended here (stop string, or a completion of the same
            prompt was rejected) and are to be aborted in the engine.
        faults: (plugin, the request's internal id, message) of requests that a plugin ended.
    """

    request_outputs: list[tuple[ParentRequest, AnyOutput]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    faults: list[tuple[str, str, str]] = field(default_factory=list)


class OutputProcessor:
    """Detokenizes, finds stop strings, gathers log-probabilities and builds outputs.

    Inside, every completion of a prompt has an id of its own. Users may name a request by the id
    that they gave it, which several live ones may share, or by its internal one.

    Attributes:
        stream_interval: outputs of later requests between the first and the last wait for so many
            new tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stream_interval: int = 1,
        step_parts: FrontendParts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._step_parts = step_parts or FrontendParts()
        self._observers = self._step_parts.observers
        self.stream_interval = stream_interval
        self._states: dict[str, RequestState] = {}
        # Sets in order. A prompt's only completion has the id of the prompt, so it is in no table.
        self._by_parent: dict[str, dict[str, None]] = {}
        self._by_external: dict[str, dict[str, None]] = {}

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest,
        arrived: float = 0.0,
        formats: OutputFormats | None = None,
    ) -> None:
        """Register a request before the engine gets it.

        Args:
            formats: formats of its outputs; it holds them until its end.
            arrived: arrival time on the frontend's clock, for observers.

        Raises:
            RequestError: a live request has that id.
        """
        request_id = request.request_id
        if request_id in self._states:
            raise RequestError(f"request_id: {request_id!r} is the id of a live request")
        state = RequestState(
            request,
            prompt,
            parent,
            self._tokenizer,
            self.stream_interval,
            formats,
            self._flaw_of_answer(request, formats),
        )
        if self._observers.exist:
            state.observed = self._observers.add(request, arrived)
        self._states[request_id] = state
        if request_id != parent.internal_id:
            self._by_parent.setdefault(parent.internal_id, {})[request_id] = None
        self._by_external.setdefault(parent.request_id, {})[request_id] = None

    def _flaw_of_answer(
        self, request: EngineCoreRequest, formats: OutputFormats | None
    ) -> Callable[[str], str | None] | None:
        """Return the function that validates a whole answer; None if none is to be validated."""
        answer, form = None if formats is None else formats.answer, request.params.structured
        if answer is not None and form is not None and form.structural_tag is not None:
            params = msgspec.structs.replace(request.params, structured=answer)
            request = msgspec.structs.replace(request, params=params)
        return self._step_parts.validator_of(request)

    def num_unfinished_requests(self) -> int:
        """Return the number of registered requests."""
        return len(self._states)

    def is_live(self, request_id: str) -> bool:
        """Return whether an id, internal or the user's, is in use."""
        return (
            request_id in self._states
            or request_id in self._by_parent
            or request_id in self._by_external
        )

    def live_ids(self) -> list[str]:
        """Return all internal ids."""
        return list(self._states)

    def live_of(self, ids: Iterable[str]) -> list[str]:
        """Return the internal ids that belong to the user's or internal ids, each once.

        The id of one completion stands for its whole prompt.
        """
        internal_ids: dict[str, None] = {}
        for request_id in ids:
            if state := self._states.get(request_id):
                if request_id == state.parent.internal_id:  # the only completion
                    internal_ids[request_id] = None
                    continue
                request_id = state.parent.internal_id
            table = self._by_parent if request_id in self._by_parent else self._by_external
            internal_ids.update(table.get(request_id, {}))
        return list(internal_ids)

    def index_of(self, request_id: str) -> int:
        """Return which completion of its prompt an internal id is."""
        return self._states[request_id].index

    def parents_of(self, request_ids: Collection[str] | None) -> dict[ParentRequest, set[str]]:
        """Return the live prompts of internal ids, with the plugins that get arguments of them.

        Args:
            request_ids: unknown ones are skipped; None is all that are live.
        """
        parents: dict[ParentRequest, set[str]] = {}
        for request_id, state in list(self._states.items()):
            if request_ids is None or request_id in request_ids:
                parents.setdefault(state.parent, set()).update(state.plugins)
        return parents

    def observed(self) -> list[Sequence[Any]]:
        """Return the states that observers have of every live request."""
        return [state.observed for state in list(self._states.values())]

    def drop(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """Drop requests by internal ids, without further outputs.

        Args:
            reason: why they ended, for observers.
        """
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None:
                self._remove(request_id, state, reason)
                with logged_after("its request has ended"):
                    state.close(reason)

    def _remove(self, request_id: str, state: RequestState, reason: FinishReason) -> None:
        """Forget a request; its last output, if it has one, closes it."""
        del self._states[request_id]
        if request_id != state.parent.internal_id:
            _remove(self._by_parent, state.parent.internal_id, request_id)
        _remove(self._by_external, state.parent.request_id, request_id)
        if self._observers.exist:
            state.metrics = self._observers.end(state.observed, reason)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> ProcessedOutputs:
        """End requests by internal ids for a reason; return their outputs so far."""
        processed = ProcessedOutputs()
        for request_id in request_ids:
            if state := self._states.get(request_id):
                try:
                    state.end(reason)
                except PluginFaultError as fault:  # of the tokenizer
                    self._fail(state, fault, processed)
                self._remove(request_id, state, state.finish_reason or reason)
                self._show(state, processed)
                processed.aborts.append(request_id)
        return processed

    def process(self, outputs: Sequence[EngineCoreOutput]) -> ProcessedOutputs:
        """Process a batch. Unknown ids are skipped: they were aborted."""
        processed, remaining = ProcessedOutputs(), iter(outputs)
        while self._process_until_fault(remaining, processed):
            pass
        return processed

    def _process_until_fault(
        self, outputs: Iterator[EngineCoreOutput], processed: ProcessedOutputs
    ) -> bool:
        state_of, observers = self._states.get, self._observers
        add = processed.request_outputs.append
        try:
            for output in outputs:
                if (state := state_of(output.request_id)) is None:
                    continue
                if (
                    state.plain is None
                    or output.finish_reason is not None
                    or output.num_cached_tokens is not None
                    or output.weight_runs is not None
                ):
                    self._process_one(state, output, processed)
                    continue
                shown = state.advance(output.new_token_ids)
                if observers.exist:
                    observers.update(state.observed, output, state.num_tokens)
                if shown is not None:
                    add((state.parent, shown))
        except PluginFaultError as fault:
            assert state is not None
            self._fail(state, fault, processed)
            self._finish(state, output, FinishReason.ERROR, processed)
            self._show(state, processed)
            return True
        return False

    def _process_one(
        self, state: RequestState, output: EngineCoreOutput, processed: ProcessedOutputs
    ) -> None:
        if output.error_kind not in _NO_REFUSAL:
            self._reject(state, output, processed)
            return
        state.update(output)
        if self._observers.exist:
            self._observers.update(state.observed, output, state.num_tokens)
        if (reason := state.finish_reason) is not None:
            self._finish(state, output, reason, processed)
        if (request_output := state.output()) is not None:
            processed.request_outputs.append((state.parent, request_output))

    def _finish(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        reason: FinishReason,
        processed: ProcessedOutputs,
    ) -> None:
        if output.faulty_plugin is not None:
            fault = (output.faulty_plugin, state.parent.internal_id, output.error or "")
            processed.faults.append(fault)
        if output.request_id in self._states:
            self._remove(output.request_id, state, reason)
        if not output.finished:
            processed.aborts.append(output.request_id)

    def _fail(
        self, state: RequestState, fault: PluginFaultError, processed: ProcessedOutputs
    ) -> None:
        state.fail(str(fault))
        processed.faults.append((fault.plugin, state.parent.internal_id, str(fault)))

    def _show(self, state: RequestState, processed: ProcessedOutputs) -> None:
        try:
            request_output = state.output()
        except PluginFaultError as fault:  # of an output parser
            self._fail(state, fault, processed)
            request_output = state.output()
        if request_output is not None:
            processed.request_outputs.append((state.parent, request_output))

    def _reject(
        self, state: RequestState, output: EngineCoreOutput, processed: ProcessedOutputs
    ) -> None:
        others = [i for i in self.live_of([output.request_id]) if i != output.request_id]
        self.drop(others, FinishReason.ERROR)
        self._remove(output.request_id, state, FinishReason.ERROR)
        processed.aborts += others
        if (shown := state.rejected(output)) is not None:
            processed.request_outputs.append((state.parent, shown))


_NO_REFUSAL = frozenset({None, "EngineDeadError", "EngineFaultError"})
"""Kinds of errors of requests that were not refused: their engine died."""


def _remove(table: dict[str, dict[str, None]], key: str, value: str) -> None:
    del table[key][value]
    if not table[key]:
        del table[key]
