"""The check of the formats of outputs that frontend halves give, and of their readers."""

from __future__ import annotations

import copy
from typing import Any

from hardpoint.host.boundary.parts.hooks import selects
from hardpoint.plugins import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    FrontendHalf,
    RequestError,
    RequestOutput,
)
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.plugins.text import OutputFormat, OutputReader
from hardpoint.testing.reporting.calls import call
from hardpoint.testing.suite import Rule, short_repr

FORMATS = Rule(
    "formats: output_format refuses a request by a RequestError, or gives readers of any output",
    "return an OutputFormat or None; readers set fields of a completion to text or None, and "
    "return an output instead of the last one",
)

_TEXTS = ("text", "reasoning", "content", "warning")


def check_format(half: FrontendHalf, request: EngineCoreRequest, text: str) -> None:
    """Check the format that a half gives the outputs of a request.

    Args:
        half: half to check.
        request: request of the suite.
        text: text of the completion.

    Raises:
        Violation: the half breaks a rule.
    """
    if not selects(half, request):
        return
    request_copy = copy.deepcopy(request)

    def output_format() -> OutputFormat | None:
        try:
            return half.output_format(request_copy, None)
        except RequestError:
            return None

    found_format: Any = call(FORMATS, output_format)
    if found_format is None:
        return
    if not isinstance(found_format, OutputFormat):
        raise FORMATS.violation(
            f"output_format() returned {short_repr(found_format)}, expected an OutputFormat or None"
        )
    reader: Any = call(FORMATS, found_format.open, request_copy)
    if reader is not None:
        if not isinstance(reader, OutputReader):
            raise FORMATS.violation(
                f"open() returned {short_repr(reader)}, expected an OutputReader or None"
            )
        for finished in (False, True):
            _check_output(reader, request_copy, text, finished=finished)
    call(FORMATS, found_format.close)


def _check_output(
    reader: OutputReader, request: EngineCoreRequest, text: str, *, finished: bool
) -> None:
    reason = FinishReason.STOP if finished else None
    output = EngineCoreOutput(
        request_id=request.request_id, new_token_ids=[1], finish_reason=reason
    )
    call(FORMATS, reader.update, output)
    for token in reader.special:
        call(FORMATS, reader.mark, token, "", 0)
    completion = CompletionOutput(index=0, text=text, token_ids=[1], content=text or None)

    def complete() -> None:
        reader.complete(completion, finished=finished)

    call(FORMATS, complete)
    for name in _TEXTS:
        if not isinstance(value := getattr(completion, name), str | None):
            raise FORMATS.violation(f"complete() set {name} to {short_repr(value)}, expected text")
    if not isinstance(completion.tool_calls, list | None):
        raise FORMATS.violation(
            f"complete() set tool_calls to {short_repr(completion.tool_calls)}, expected a list"
        )
    if type(reader.has_calls) is not bool:
        raise FORMATS.violation(f"has_calls is {short_repr(reader.has_calls)}, expected a bool")
    completion.finish_reason = None if reason is None else str(reason)
    whole = RequestOutput(
        request_id=request.request_id,
        prompt=None,
        prompt_token_ids=request.known_prompt_ids,
        outputs=[completion],
        finished=finished,
    )
    shown: Any = call(FORMATS, reader.result, whole)
    is_output = isinstance(shown, RequestOutput | PoolingRequestOutput)
    if not is_output and (finished or shown is not None):
        raise FORMATS.violation(f"result() returned {short_repr(shown)}, expected an output")
