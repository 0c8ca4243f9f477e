"""JSON values as texts that are equal where the values are."""

from __future__ import annotations

import json
from typing import Any


def canonical(value: Any) -> str:
    """Return the same text for equal JSON values: 1 equals 1.0."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole(item) for item in value]
        case dict():
            return {name: _whole(item) for name, item in value.items()}
    return value
