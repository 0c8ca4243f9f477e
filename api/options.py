"""Keyword arguments of LLM's and AsyncLLM's calls: their check, and their place in `help`."""

from __future__ import annotations

import functools
import inspect
import textwrap
import typing as t
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from hardpoint.plugins import LoRARequest
from hardpoint.plugins.request_options import ChatOptions, RequestOptions
from hardpoint.typed import suggest
from hardpoint.typed.describing import attribute_docs

__all__ = ["BatchOptions", "ChatBatchOptions", "takes_options"]

Call = TypeVar("Call", bound=Callable[..., Any])


class BatchOptions(TypedDict, total=False):
    """RequestOptions of several prompts: each is one for all, or a list of one per prompt."""

    priority: int | Sequence[int]
    timeout: float | Sequence[float | None] | None
    tags: Mapping[str, str] | Sequence[Mapping[str, str]] | None
    cache_salt: str | Sequence[str | None] | None
    kv_transfer_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    trace_headers: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None
    truncate_prompt_tokens: int | Sequence[int | None] | None
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None


class ChatBatchOptions(ChatOptions, BatchOptions, total=False):
    """ChatOptions of all conversations, and the options of their requests."""


class _Unstated:
    """A default that the signature leaves to the text below it."""

    def __repr__(self) -> str:
        return "..."


_UNSTATED = _Unstated()
_DOCS = attribute_docs(ChatOptions) | attribute_docs(RequestOptions)


def takes_options(call: Call) -> Call:
    """Check the keywords of a call whose last parameter is `**options: Unpack[...]`.

    A wrong one is a TypeError of the call itself, also of one that returns an iterator. `help` and
    completions show each keyword as if the signature had it.
    """
    (options,) = t.get_args(t.get_type_hints(call)["options"])
    signature = inspect.signature(call)
    parameters = list(signature.parameters.values())[:-1]
    for name, type_ in options.__annotations__.items():
        parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_UNSTATED)
        parameters.append(parameter.replace(annotation=type_.__forward_arg__))
    known = [parameter.name for parameter in parameters[1:]]

    @functools.wraps(call)
    def checked(*args: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                raise TypeError(
                    f"{call.__qualname__}() got an unexpected keyword argument {name!r}"
                    f"{suggest(name, known)}"
                )
        return call(*args, **given)

    checked.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    if call.__doc__:
        lines = [_entry(name, _DOCS[name]) for name in options.__annotations__]
        checked.__doc__ = "\n".join([inspect.cleandoc(call.__doc__), "", "Options:", *lines])
    return t.cast(Call, checked)


def _entry(name: str, text: str) -> str:
    return textwrap.fill(f"{name}: {text}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
