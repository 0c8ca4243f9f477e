"""The output processor: from an engine's outputs to what users see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hardpoint.plugins import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Logprob,
    RequestOutput,
    RequestOutputKind,
    Tokenizer,
    TokenLogprobs,
)

from .detokenizer import Detokenizer
from .parent_request import ParentRequest

__all__ = ["OutputProcessor", "ProcessedOutputs"]


@dataclass
class ProcessedOutputs:
    """What one batch of engine outputs came to.

    Attributes:
        request_outputs: for the user.
        aborts: ids of requests that ended here (stop string) while the engine runs on.
        faults: (plugin, the user's request id, message) of requests that a plugin ended.
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    faults: list[tuple[str, str, str]] = field(default_factory=list)


class OutputProcessor:
    """Detokenises, finds stop strings, gathers log-probabilities and builds outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """The tokenizer gives every text."""
        self._tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, parent: ParentRequest
    ) -> None:
        """Register a request; to be done before the engine gets it."""
        self._states[request.request_id] = _RequestState(request, prompt, parent, self._tokenizer)

    def num_unfinished_requests(self) -> int:
        """Return the number of registered requests."""
        return len(self._states)

    def is_live(self, request_id: str) -> bool:
        """Whether a request is registered under an internal id."""
        return request_id in self._states

    def unfinished_of(self, external_ids: Iterable[str]) -> list[str]:
        """Return the registered ids that belong to the user's ids."""
        wanted = set(external_ids)
        return [i for i, state in self._states.items() if state.parent.request_id in wanted]

    def children_of(self, external_id: str) -> dict[str, int]:
        """Return the registered ids that belong to a user's id, with their completions' indices."""
        return {
            request_id: state.index
            for request_id, state in self._states.items()
            if state.parent.request_id == external_id
        }

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests; they give no more outputs."""
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> ProcessedOutputs:
        """Take a batch; the only loop over it. Unknown ids are skipped: they were aborted."""
        processed = ProcessedOutputs()
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            state.update(output)
            if output.faulty_plugin is not None:
                fault = (output.faulty_plugin, state.parent.request_id, output.error or "")
                processed.faults.append(fault)
            if state.finish_reason is not None:
                del self._states[output.request_id]
                if not output.finished:
                    processed.aborts.append(output.request_id)
            if (request_output := state.output()) is not None:
                processed.request_outputs.append(request_output)
        return processed


class _RequestState:
    """One request's text, tokens and log-probabilities so far."""

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest,
        tokenizer: Tokenizer,
    ) -> None:
        params = request.params
        self.parent = parent
        self.finish_reason: FinishReason | None = None
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._detokenizer = (
            Detokenizer(tokenizer, request.prompt_token_ids, params) if params.detokenize else None
        )
        self._token_ids: list[int] = []
        self._logprobs: list[Mapping[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] = []
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._sent_prompt = 0
        self._sent_tokens = 0
        self._sent_chars = 0

    @property
    def index(self) -> int:
        """Which of the `n` completions this is."""
        return self._request.child_index

    def update(self, output: EngineCoreOutput) -> None:
        """Take one engine output."""
        new = output.new_token_ids
        self.finish_reason = output.finish_reason
        self._stop_reason, self._error = output.stop_reason, output.error
        if output.prompt_logprobs is not None:
            self._prompt_logprobs += [
                self._decoded(entry) if entry else None for entry in output.prompt_logprobs
            ]
        if self._detokenizer is not None:
            taken = self._detokenizer.update(
                new, ended_by_token=output.finish_reason is FinishReason.STOP
            )
            if taken is not None:
                new = new[:taken]
                self.finish_reason = FinishReason.STOP
            elif output.finished:
                self._detokenizer.finish()
            if self._detokenizer.stop_string is not None:
                self.finish_reason = FinishReason.STOP
                self._stop_reason = self._detokenizer.stop_string
        self._token_ids += new
        for entry in (output.logprobs or [])[: len(new)]:
            self._cumulative_logprob += entry.logprobs[0]
            self._logprobs.append(self._decoded(entry))

    def output(self) -> RequestOutput | None:
        """Return what the user is to see now, if anything."""
        finished = self.finish_reason is not None
        params = self._request.params
        kind = params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        delta = kind is RequestOutputKind.DELTA
        text = self._detokenizer.text if self._detokenizer else ""
        chars = self._detokenizer.certain_length(finished=finished) if self._detokenizer else 0
        first_token, first_char = (self._sent_tokens, self._sent_chars) if delta else (0, 0)
        asked = params.logprobs is not None
        completion = CompletionOutput(
            index=self._request.child_index,
            text=text[first_char:chars],
            token_ids=self._token_ids[first_token:],
            cumulative_logprob=self._cumulative_logprob if asked else None,
            logprobs=self._logprobs[first_token:] if asked else None,
            finish_reason=str(self.finish_reason) if self.finish_reason is not None else None,
            stop_reason=self._stop_reason,
            error=self._error,
        )
        if delta and not finished and not completion.token_ids:
            return None
        self._sent_tokens, self._sent_chars = len(self._token_ids), max(chars, self._sent_chars)
        outputs = self.parent.gather(completion, final_only=kind is RequestOutputKind.FINAL_ONLY)
        if not outputs:
            return None
        return RequestOutput(
            request_id=self.parent.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=outputs,
            finished=self.parent.finished,
            prompt_logprobs=self._prompt_part(delta=delta),
        )

    def _prompt_part(self, *, delta: bool) -> list[Mapping[int, Logprob] | None] | None:
        """Return the prompt's log-probabilities, if asked for; with `delta`, those not yet sent."""
        if self._request.params.prompt_logprobs is None:
            return None
        part = self._prompt_logprobs[self._sent_prompt if delta else 0 :]
        self._sent_prompt = len(self._prompt_logprobs)
        return part

    def _decoded(self, entry: TokenLogprobs) -> Mapping[int, Logprob]:
        """Return an entry by token id, each with its own text; the chosen token first."""
        result: dict[int, Logprob] = {}
        for place, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            if token not in result:  # the chosen one may stand among the likeliest again
                rank = place if place else entry.rank
                text = self._tokenizer.decode([token], skip_special_tokens=False)
                result[token] = Logprob(logprob, rank, text)
        return result
