"""The output processor: from an engine's outputs to what users see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    RequestOutput,
    Tokenizer,
)

from .parent_request import ParentRequest
from .request_state import RequestState

__all__ = ["OutputProcessor", "ProcessedOutputs"]


@dataclass
class ProcessedOutputs:
    """What one batch of engine outputs came to.

    Attributes:
        request_outputs: for the user, each with its request.
        aborts: internal ids of requests that ended here (stop string, or a completion of the same
            prompt was refused) while the engine runs on.
        faults: (plugin, the request's internal id, message) of requests that a plugin ended.
    """

    request_outputs: list[tuple[ParentRequest, RequestOutput]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    faults: list[tuple[str, str, str]] = field(default_factory=list)


class OutputProcessor:
    """Detokenises, finds stop strings, gathers log-probabilities and builds outputs.

    Inside, every completion of a prompt has an id of its own. Users may name a request by the id
    that they gave it, which several live ones may share, or by its internal one.
    """

    def __init__(self, tokenizer: Tokenizer, stream_interval: int = 1) -> None:
        """The tokenizer gives every text.

        Args:
            stream_interval: outputs between the first and the last wait for so many new tokens.
        """
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._states: dict[str, RequestState] = {}
        self._by_parent: dict[str, list[str]] = {}
        self._by_external: dict[str, list[str]] = {}

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, parent: ParentRequest
    ) -> None:
        """Register a request; to be done before the engine gets it."""
        request_id = request.request_id
        self._states[request_id] = RequestState(
            request, prompt, parent, self._tokenizer, self._stream_interval
        )
        self._by_parent.setdefault(parent.internal_id, []).append(request_id)
        self._by_external.setdefault(parent.request_id, []).append(request_id)

    def num_unfinished_requests(self) -> int:
        """Return the number of registered requests."""
        return len(self._states)

    def is_live(self, request_id: str) -> bool:
        """Whether an id, internal or the user's, is in use."""
        tables = (self._states, self._by_parent, self._by_external)
        return any(request_id in table for table in tables)

    def live_ids(self) -> list[str]:
        """Return all internal ids."""
        return list(self._states)

    def live_of(self, ids: Iterable[str]) -> list[str]:
        """Return the internal ids that belong to the user's or internal ids, each once.

        The id of one completion stands for its whole prompt.
        """
        found: dict[str, None] = {}
        for request_id in ids:
            if state := self._states.get(request_id):
                request_id = state.parent.internal_id
            table = self._by_parent if request_id in self._by_parent else self._by_external
            found.update(dict.fromkeys(table.get(request_id, [])))
        return list(found)

    def index_of(self, request_id: str) -> int:
        """Return which completion of its prompt an internal id is."""
        return self._states[request_id].index

    def parents(self) -> list[ParentRequest]:
        """Return every live prompt."""
        return list({id(s.parent): s.parent for s in self._states.values()}.values())

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests by internal ids; they give no more outputs."""
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                _remove(self._by_parent, state.parent.internal_id, request_id)
                _remove(self._by_external, state.parent.request_id, request_id)

    def abort(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """End requests by internal ids; return what they have so far."""
        processed = ProcessedOutputs()
        for request_id in request_ids:
            if state := self._states.get(request_id):
                state.end(FinishReason.ABORT)
                if (request_output := state.output()) is not None:
                    processed.request_outputs.append((state.parent, request_output))
                self.drop([request_id])
                processed.aborts.append(request_id)
        return processed

    def process(self, outputs: Sequence[EngineCoreOutput]) -> ProcessedOutputs:
        """Take a batch; the only loop over it. Unknown ids are skipped: they were aborted."""
        processed = ProcessedOutputs()
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            if output.error_kind is not None:
                self._refused(state, output, processed)
                continue
            state.update(output)
            if output.faulty_plugin is not None:
                fault = (output.faulty_plugin, state.parent.internal_id, output.error or "")
                processed.faults.append(fault)
            if state.finish_reason is not None:
                self.drop([output.request_id])
                if not output.finished:
                    processed.aborts.append(output.request_id)
            if (request_output := state.output()) is not None:
                processed.request_outputs.append((state.parent, request_output))
        return processed

    def _refused(
        self, state: RequestState, output: EngineCoreOutput, processed: ProcessedOutputs
    ) -> None:
        """End a prompt of which a completion was refused: all of them run, or none."""
        family = self.live_of([output.request_id])
        self.drop(family)
        processed.aborts += [each for each in family if each != output.request_id]
        processed.request_outputs.append((state.parent, state.refused(output)))


def _remove(table: dict[str, list[str]], key: str, value: str) -> None:
    table[key].remove(value)
    if not table[key]:
        del table[key]
