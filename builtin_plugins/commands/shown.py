"""Values of the configuration, as commands print them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from hardpoint.typed import toml_text

_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")


def without_userinfo(value: Any) -> Any:
    """Return plain data without the users and passwords of the URLs in it."""
    if isinstance(value, str):
        return _USERINFO.sub("***@", value)
    if isinstance(value, dict):
        return {key: without_userinfo(part) for key, part in value.items()}
    return [without_userinfo(part) for part in value] if isinstance(value, list) else value


def toml(value: Any) -> str:
    """Return a value in TOML syntax, without the users and passwords of URLs."""
    return toml_text(without_userinfo(msgspec.to_builtins(value)))
