"""What callers of LLM may say in several ways, and what they are told back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.core.errors import error_of
from hardpoint.core.frontend.input_processor import RequestExtras
from hardpoint.plugins import RequestError, RequestOutput, RequestOutputKind, SamplingParams

__all__ = ["accepted", "as_list", "extras_of", "not_yet", "one_each", "with_kind"]


def not_yet(call: str) -> RequestError:
    """Return the refusal of a call that only models that pool can answer."""
    return RequestError(
        f"{call}: this version of Hardpoint has no pooling models; use generate, chat or stream"
    )


def accepted(output: RequestOutput) -> RequestOutput:
    """Return an output.

    Raises:
        HardpointError: it says that the engine refused the request; as if the engine were here.
    """
    for completion in output.outputs:
        if completion.error_kind is not None:
            raise error_of(completion.error_kind, completion.error)
    return output


def as_list(prompts: Any) -> list[Any]:
    """Return prompts as a list, one prompt or many.

    Raises:
        RequestError: they are neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts: expected a prompt or a list, got {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def extras_of(said: Mapping[str, Any], count: int) -> list[RequestExtras]:
    """Return what each prompt says beside its parameters; what is None is left at its default."""
    columns = {name: one_each(value, count, name) for name, value in said.items()}
    return [
        RequestExtras(**{name: v[i] for name, v in columns.items() if v[i] is not None})
        for i in range(count)
    ]


def one_each(value: Any, count: int, what: str) -> list[Any]:
    """Return a value per prompt: a list's own, or the same for all.

    Raises:
        RequestError: the list has another length.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise RequestError(f"{what}: expected one or {count}, one per prompt, got {len(value)}")
        return list(value)
    return [value] * count


def with_kind(params: Any, kind: RequestOutputKind) -> Any:
    """Return a copy of parameters with another kind of outputs."""
    if not isinstance(params, SamplingParams):
        return params  # the engine refuses it with its own words
    return msgspec.structs.replace(params, output_kind=kind)
