"""Text that cannot travel: refused at the edge, the same wherever the engine runs."""

from __future__ import annotations

from typing import Any

from hardpoint.plugins import EngineCoreRequest, RequestError, SamplingParams
from hardpoint.plugins.typed import join_path

__all__ = ["check_params_text", "check_request_text", "check_text"]


def check_text(value: Any, path: str) -> None:
    r"""Refuse text that UTF-8 cannot hold, which is text with half of a surrogate pair in it.

    Args:
        value: plain data; texts in it are found at any depth, as keys too.
        path: of the field, for the error.

    Raises:
        RequestError: such as `cache_salt: expected text that UTF-8 can hold, got '\ud800' at
            character 4`.
    """
    if isinstance(value, str):
        _check_one(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                _check_one(key, f"{path}, a key")
            check_text(item, join_path(path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_text(item, f"{path}[{index}]")


def check_params_text(params: SamplingParams) -> None:
    """Refuse such text in sampling parameters.

    Raises:
        RequestError: naming the field.
    """
    for field in ("stop", "bad_words", "plugin_args"):
        check_text(getattr(params, field), field)


def check_request_text(request: EngineCoreRequest) -> None:
    """Refuse such text in a request that was made elsewhere.

    Raises:
        RequestError: naming the field.
    """
    check_params_text(request.params)
    for field in ("tags", "cache_salt", "plugin_args", "kv_transfer_params", "trace_headers"):
        check_text(getattr(request, field), field)


def _check_one(text: str, path: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(
            f"{path}: expected text that UTF-8 can hold, got {text[cause.start]!r} at "
            f"character {cause.start}"
        ) from None
