"""Values of the configuration, as commands print them."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")


def without_userinfo(value: Any) -> Any:
    """Return plain data without the users and passwords of the URLs in it."""
    if isinstance(value, str):
        return _USERINFO.sub("***@", value)
    if isinstance(value, dict):
        return {key: without_userinfo(part) for key, part in value.items()}
    return [without_userinfo(part) for part in value] if isinstance(value, list) else value


def toml(value: Any) -> str:
    """Return a value in TOML syntax; None, which TOML lacks, is `none`."""
    plain = without_userinfo(msgspec.to_builtins(value))
    return "none" if plain is None else json.dumps(plain, ensure_ascii=False)
