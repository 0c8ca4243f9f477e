"""Settings as one writes them in a shell: `scheduler.policy=fair`."""

from __future__ import annotations

import tomllib
from typing import Any

from hardpoint.plugins.errors import ConfigError


def split_setting(text: str, option: str, example: str) -> tuple[list[str], str]:
    """Split `a.b=text` into its path and what is right of the first `=`.

    Args:
        text: the setting.
        option: the option that it was given to, for the message.
        example: a setting that would be right, for the message.

    Raises:
        ConfigError: there is no `=`, or a part of the path is empty.
    """
    path, equals, value = text.partition("=")
    steps = [step.strip() for step in path.split(".")]
    if not equals or not all(steps):
        raise ConfigError(f"{option}: expected PATH=VALUE such as {example}, got {text!r}")
    return steps, value.strip()


def parse_value(text: str) -> Any:
    """Return the TOML value that a text is (`5`, `true`, `[1, 2]`, `"x"`), else the text itself."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = document["value"]
    too_long = isinstance(value, int) and not -(2**63) <= value < 2**63  # no TOML integer is
    return value if len(document) == 1 and not too_long else text
