"""A trace with the texts of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from hardpoint.errors import HardpointError
from hardpoint.plugins import CompletionOutput, RequestOutput, SamplingParams

from .page import trace_page
from .records import Change, CompletionTrace, StepTrace, TokenTrace, TraceRecord
from .table import trace_table

TRACE = "trace"
"""Name of the step part, which requests have in `include`."""

Decode = Callable[[Sequence[int]], str]

_replace = msgspec.structs.replace


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The records of a prompt's completions.

    Attributes:
        prompt: text of the prompt, if there is one.
        num_prompt_tokens: tokens of the prompt.
        completions: the `n` completions, by index.
    """

    prompt: str | None = None
    num_prompt_tokens: int = 0
    completions: list[CompletionTrace] = []

    @property
    def errors(self) -> list[str]:
        """The errors that ended completions, each with the index."""
        return [f"completion {c.index}: {c.error}" for c in self.completions if c.error is not None]

    def json(self) -> str:
        """Return the trace as JSON."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def table(self, width: int = 100) -> str:
        """Return the trace as text for a terminal.

        Args:
            width: columns of the terminal.
        """
        return trace_table(self.prompt, self.num_prompt_tokens, self.completions, width)

    def html(self) -> str:
        """Return the trace as one HTML page, which loads nothing."""
        return trace_page(self.prompt, self.num_prompt_tokens, self.completions)


def asking_for_trace(params: SamplingParams, candidates: int | None = None) -> SamplingParams:
    """Return the parameters with "trace" in `include`.

    Args:
        candidates: tokens to show for a position, 1 to 20; None leaves it to the engine.
    """
    if not isinstance(params, SamplingParams) or not isinstance(params.include, list):
        return params  # the engine rejects them by name
    params = _replace(params, include=list(dict.fromkeys([*params.include, TRACE])))
    if candidates is None:
        return params
    arguments = {**params.plugin_args, f"step_parts/{TRACE}": {"candidates": candidates}}
    return _replace(params, plugin_args=arguments)


def trace_of(output: RequestOutput, decode: Decode | None = None) -> Trace:
    """Return the trace of a finished request that has "trace" in its `include`.

    Args:
        output: its last output.
        decode: returns the text of tokens; None leaves texts out.

    Raises:
        HardpointError: a completion has no trace.
    """
    return Trace(
        prompt=output.prompt,
        num_prompt_tokens=len(output.prompt_token_ids or ()),
        completions=[
            completion_trace(completion, decode, len(completion.token_ids))
            for completion in output.outputs
        ],
    )


def completion_trace(
    completion: CompletionOutput, decode: Decode | None = None, num_tokens: int | None = None
) -> CompletionTrace:
    """Return the trace of one completion; see `trace_of`.

    Args:
        completion: its last output.
        decode: as for `trace_of`.
        num_tokens: number of its tokens, if it is known: the engine may have sampled some more in
            the step of a stop string.
    """
    figures = (completion.part_figures or {}).get(TRACE) or {}
    if "record" not in figures:
        why = f": {completion.error}" if completion.error else ""
        raise HardpointError(
            f"completion {completion.index} has no trace: expected a finished one, of a "
            f'request with include=["{TRACE}"], got finish reason {completion.finish_reason!r}{why}'
        )
    record = msgspec.json.decode(figures["record"], type=TraceRecord)
    texts = _Texts(decode)
    steps = {entry.step: entry for entry in record.steps}
    tokens = [msgspec.json.decode(raw, type=TokenTrace) for raw in record.tokens]
    if num_tokens is not None and record.error is None:
        tokens = [token for token in tokens if token.position < num_tokens]
    notes = record.notes
    if (last := len(record.token_ids)) < (num_tokens or 0):
        notes = [*notes, f"positions from {last} on have no record: the request was ended by then"]
    return CompletionTrace(
        index=completion.index,
        text=completion.text,
        token_ids=record.token_ids[:num_tokens],
        tokens=[texts.token(token, steps.get(token.step)) for token in tokens],
        steps=record.steps,
        finish_reason=completion.finish_reason,
        error=record.error or completion.error,
        notes=notes,
    )


class _Texts:
    """Fills in the texts of tokens, and the makers of masks."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def token(self, token: TokenTrace, step: StepTrace | None) -> TokenTrace:
        return _replace(
            token,
            text=self._of(token.token_id),
            candidates=[
                _replace(candidate, text=self._of(candidate.token_id))
                for candidate in token.candidates
            ],
            changes=[self._change(change, step) for change in token.changes],
        )

    def _change(self, change: Change, step: StepTrace | None) -> Change:
        makers = step.masks if step is not None and not change.plugin else []
        if makers:
            names, packages = zip(*makers, strict=True)
            change = _replace(
                change, plugin=" and ".join(names), package=", ".join(dict.fromkeys(packages))
            )
        tokens = [_replace(token, text=self._of(token.token_id)) for token in change.tokens]
        return _replace(change, tokens=tokens)

    def _of(self, token_id: int | None) -> str | None:
        if self._decode is None or token_id is None:
            return None
        if token_id not in self._known:
            self._known[token_id] = self._decode([token_id])
        return self._known[token_id]
