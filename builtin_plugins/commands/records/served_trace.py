"""A trace that a server makes, over HTTP."""

from __future__ import annotations

import argparse
import http

import msgspec

from hardpoint.builtin_plugins.commands.sampling import sampling_fields
from hardpoint.builtin_plugins.http_calls import HttpAnswer, environment_key, post_json
from hardpoint.plugins import HardpointError, RequestError
from hardpoint.toolkit.trace import CompletionTrace, Trace

API_KEY = "HARDPOINT_API_KEY"
"""Environment variable of the key."""

_LOCAL = ("config", "set")


class _Choice(msgspec.Struct):
    trace: CompletionTrace


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _TraceAnswer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


def served_trace(options: argparse.Namespace, prompt: str) -> Trace:
    """Return the trace of a prompt, which a server continues.

    Args:
        options: options of `hardpoint trace`; the server has defaults for the others.

    Raises:
        RequestError: the options do not go together, or the server refuses the request.
        HardpointError: the server cannot be reached, does not allow traces, or is none of ours.
    """
    for name in _LOCAL:
        if getattr(options, name, None):
            raise RequestError(f"--{name}: expected none with --url: the server has its own")
    body = sampling_fields(options) | {"trace": _asked(options.candidates)}
    if (model := getattr(options, "model", None)) is not None:
        body["model"] = model
    if options.chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        path, body["prompt"] = "/v1/completions", prompt
    answer = post_json(options.url, path, body, option="--url", key=environment_key(API_KEY))
    response = _read(options.url, answer)
    return Trace(
        prompt=prompt,
        num_prompt_tokens=response.usage.prompt_tokens,
        completions=[choice.trace for choice in response.choices],
    )


def _asked(candidates: int | None) -> bool | dict[str, int]:
    return True if candidates is None else {"candidates": candidates}


def _read(url: str, answer: HttpAnswer) -> _TraceAnswer:
    """Return the answer of a server.

    Raises:
        RequestError, HardpointError: see `served_trace`.
    """
    if answer.status == http.HTTPStatus.OK:
        try:
            return msgspec.convert(answer.content, _TraceAnswer)
        except msgspec.ValidationError as error:
            cause = str(error)
    else:
        cause = f"status {answer.status}"
    if answer.message is None:
        raise HardpointError(f"--url: {url}: expected an answer with a trace, got {cause}")
    kind = RequestError if answer.status == http.HTTPStatus.BAD_REQUEST else HardpointError
    raise kind(f"--url: {url}: {answer.message}")
